"""What stands in for a primitive that a platform or a loop lacks."""

from __future__ import annotations

import asyncio
import fcntl
import os
from typing import Any

import numpy as np
import pytest

from aioprefetch import Prefetcher, TaskError, WorkerDied
from tests import arrays
from tests.helpers import collect


class WatchesNothing(asyncio.SelectorEventLoop):
    """As Windows' default loop: it has no add_reader."""

    def add_reader(self, *args: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError

    def remove_reader(self, *args: Any) -> Any:
        raise NotImplementedError


def run_there(main: Any) -> Any:
    with asyncio.Runner(loop_factory=WatchesNothing) as runner:
        return runner.run(asyncio.wait_for(main, 30))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_loop_that_watches_nothing(ordered: bool) -> None:
    p = Prefetcher(arrays.Images(40), batch_size=8, num_proc=2, ordered=ordered)
    batches = run_there(collect(p))
    labels = np.concatenate([batch["label"] for batch in batches])
    assert sorted(labels.tolist()) == list(range(40))
    assert all((batch["image"][:, 0, 0] == batch["label"]).all() for batch in batches)
    assert not ordered or labels.tolist() == list(range(40))


async def twice(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_async_functions_and_streams_on_a_loop_that_watches_nothing() -> None:
    p = Prefetcher(iter(range(20)), map_fn=twice, num_proc=2)
    assert run_there(collect(p)) == list(range(0, 40, 2))


def test_errors_and_deaths_on_a_loop_that_watches_nothing() -> None:
    async def main() -> tuple[list[int], list[type]]:
        items, errors = [], []
        async with Prefetcher(arrays.Fatal(20, 5), num_proc=1, retries=1) as p:
            iterator = aiter(p)
            while True:
                try:
                    items.append(await anext(iterator))
                except TaskError as error:
                    errors.append(type(error))
                except StopAsyncIteration:
                    return items, errors

    items, errors = run_there(main())
    assert items == [item for item in range(20) if item != 5]
    assert errors == [WorkerDied]


@pytest.mark.parametrize("missing", ["pidfd_open", "memfd_create"])
async def test_a_platform_without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, missing)
    async with Prefetcher(arrays.Images(40), batch_size=8, num_proc=2) as p:
        labels = [int(label) async for batch in p for label in batch["label"]]
        assert labels == list(range(40))
    async with Prefetcher(arrays.Fatal(20, 5), num_proc=1, retries=0) as p:
        iterator = aiter(p)
        assert [await anext(iterator) for _ in range(5)] == list(range(5))
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await asyncio.wait_for(anext(iterator), 5)


async def test_a_platform_whose_kernel_does_not_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fcntl, "F_SETSIG")  # a forked worker finds it missing too
    with pytest.warns(RuntimeWarning, match="fork"):
        p = Prefetcher(range(20), num_proc=2, mp_context="fork")
    assert await collect(p) == list(range(20))
