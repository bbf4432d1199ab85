"""Random sequences of use and abuse, beside a model that knows only the plan."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioprefetch import Prefetcher, TaskError
from tests.helpers import LOOPS, run
from tests.mortal import Uneven
from tests.processes import send, workers

LENGTH = 40
STEPS = (
    "anext", "anext", "anext", "cancelled anext", "kill", "stop", "continue",
    "hoard", "release", "leave", "close",
)  # fmt: skip


class Model:
    """What has to come next."""

    def __init__(self, source: Uneven) -> None:
        self._source = source
        self.next = 0

    def check(self, outcome: Any) -> None:
        if self.next == LENGTH:
            assert isinstance(outcome, StopAsyncIteration)
            self.next = 0
            return
        if self.next in self._source.raising:
            assert isinstance(outcome, TaskError)
            assert outcome.index == self.next
        else:
            assert (outcome == self.next).all()
        self.next += 1


class Play:
    """A Prefetcher under a sequence of steps."""

    def __init__(self, source: Uneven, batches: Prefetcher) -> None:
        self.model = Model(source)
        self._p = batches
        self._iterator = aiter(batches)
        self._last: Any = None
        self._hoard: list[tuple[int, Any]] = []

    async def step(self, name: str, number: int) -> None:
        if name == "anext":
            self._take(await outcome_of(self._iterator))
        elif name == "cancelled anext":
            task = asyncio.ensure_future(outcome_of(self._iterator))
            await asyncio.sleep(number * 0.0005)
            task.cancel()
            with suppress(asyncio.CancelledError):
                self._take(await task)
        elif name == "hoard":
            if isinstance(self._last, np.ndarray):
                self._hoard.append((int(self._last[0]), self._last))
        elif name == "release":
            self.check_hoard()
            self._hoard.clear()
        elif name == "leave":
            self._iterator, self.model.next = aiter(self._p), 0
        elif name == "close":
            await self._p.aclose()
            await self._p.start()
            self._iterator, self.model.next = aiter(self._p), 0
        else:
            self._hurt(name, number)

    def check_hoard(self) -> None:
        """What is held is as it was when it came."""
        for number, array in self._hoard:
            assert (array == number).all()

    def _take(self, outcome: Any) -> None:
        self.model.check(outcome)
        self._last = outcome
        if isinstance(outcome, StopAsyncIteration):
            self._iterator = aiter(self._p)

    @staticmethod
    def _hurt(how: str, number: int) -> None:
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
        there = workers()
        if there:
            send(there[number % len(there)], signals[how])


async def outcome_of(iterator: Any) -> Any:
    """What an anext gives, or the error that it raises."""
    try:
        return await anext(iterator)
    except (TaskError, StopAsyncIteration) as error:
        return error


async def play(steps: list[tuple[str, int]], raising: set[int]) -> None:
    source = Uneven(LENGTH, frozenset(raising))
    p = Prefetcher(
        source, num_proc=2, retries=99, task_timeout=0.4, num_prefetch=6, shutdown_timeout=0.5
    )
    async with p:
        scene = Play(source, p)
        for name, number in steps:
            await scene.step(name, number)
        for _ in range(LENGTH + 1 - scene.model.next):
            await scene.step("anext", 0)
        assert scene.model.next == 0
        scene.check_hoard()


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.timeout(120)
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), min_size=10, max_size=60),
    raising=st.sets(st.integers(0, LENGTH - 1), max_size=4),
)
def test_whatever_is_done_the_stream_is_the_plans(
    loop: Any, steps: list[tuple[str, int]], raising: set[int]
) -> None:
    run(play(steps, raising), loop, timeout=50)
