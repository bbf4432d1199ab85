"""Measuring a user's dataset under many settings.

Settings are compared in short measurements that take turns, so that a machine that is slower
for a while is so for all of them. One argument is swept after another, each at the best of
what was swept before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ._prefetcher import Prefetcher
from ._stats import Stats
from ._sweep import (
    ROUNDS,
    SHARES,
    SLOT,
    Budget,
    Choice,
    Measured,
    Result,
    Sample,
    Wishes,
    candidates,
    recommend,
)
from ._target import Target, Unusable

_CEILING = 0.2  # seconds that the replay takes, at most

Tell = Callable[[float, str], None]


class Bench:
    """Measures a target.

    Parameters
    ----------
    tell
        Called with the seconds used and what is being done.
    """

    def __init__(self, target: Target, wishes: Wishes, tell: Tell, *, traced: str | None) -> None:
        self.result = Result(target.name, wishes)
        self._wishes = wishes
        self._tell = tell
        self._traced = traced
        self._arguments = _arguments(target, wishes)
        self._length = target.config.facts.length if target.config.facts.kind == "map" else None
        self._batched = target.config.batch_sampler is not None
        self._at = _beginning(target, wishes, self._length)
        if self._batched:
            self.result.unit = "batches"

    async def run(self) -> Result:
        """Measure until the time is over, or the task is cancelled.

        Raises
        ------
        Unusable
            The dataset cannot be read, or no batch came in time.
        """
        budget = self._budget = Budget(self._wishes.seconds)
        try:
            await self._sweep_all()
            await self._finish()
        except asyncio.CancelledError:  # Ctrl-C
            self.result.interrupted = True
        self.result.elapsed = budget.used
        return self.result

    async def _sweep_all(self) -> None:
        reserve = self._reserve
        self._budget.seconds -= reserve
        names = list(SHARES)
        for number, name in enumerate(names):
            settings = self._possible(candidates(name, self._at, self._wishes))
            if len(settings) > 1 or not self.result.measured:
                weights = sum(SHARES[n] for n in names[number:])
                await self._sweep(name, settings, self._budget.share(SHARES[name], weights))
            self._at = recommend(self.result.measured).take.choice
        self._budget.seconds += reserve

    @property
    def _reserve(self) -> float:
        """Seconds for the replay and the timeline."""
        return min(3.0, 0.15 * self._wishes.seconds) if self._traced else 0.0

    def _possible(self, settings: list[Choice]) -> list[Choice]:
        """Those that a Prefetcher accepts; why the others are left out is noted."""
        possible = []
        for choice in settings:
            try:
                self._make(choice)
            except (TypeError, ValueError) as error:
                self.result.left_out[str(choice)] = str(error)
            else:
                possible.append(choice)
        if not possible and not self.result.measured:
            raise Unusable(next(iter(self.result.left_out.values())))
        return possible

    async def _sweep(self, name: str, settings: list[Choice], end: float) -> None:
        """Measure settings in turns, in another order each time."""
        rows = [self.result.of(choice) for choice in settings]
        for turn in range(ROUNDS):
            for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
                start = _start_of(row, rows)
                needed = start + SLOT[0] if turn else 0.0
                late = self._budget.used + needed >= (end if turn else self._budget.seconds)
                if late and self.result.measured:
                    return
                self._tell(self._budget.used, f"{name}: {row.choice}")
                slot = self._budget.slot(end, len(rows), start)
                await self._measure(row, slot)

    async def _measure(self, row: Measured, slot: float) -> None:
        """One measurement; nothing is noted when the time ends before it has begun."""
        limit = max(self._budget.left, SLOT[0]) + slot
        try:
            async with asyncio.timeout(limit):
                sample, stats = await self._pass(row.choice, slot)
        except TimeoutError:
            if not self.result.measured:
                raise Unusable(
                    f"no batches came within {limit:.3g} s: give more time with --seconds, or "
                    "see with doctor what the dataset needs"
                ) from None
            if not row.samples:
                self.result.left_out[str(row.choice)] = "no batches came in the time that was left"
        else:
            row.samples.append(sample)
            row.stats = stats

    async def _pass(
        self, choice: Choice, slot: float, trace: str | None = None
    ) -> tuple[Sample, Stats]:
        began = time.monotonic()
        async with self._make(choice, trace) as batches:
            iterator = aiter(batches)
            meter = _Meter(self._wishes.consumer)
            await meter.step(iterator)
            start = time.monotonic() - began
            for _ in range(max(1, choice.num_proc)):  # until all workers are under way
                await meter.step(iterator)
            meter.reset()
            while meter.elapsed < slot or not meter.batches:
                await meter.step(iterator)
            rate = meter.batches * self._items(choice) / meter.elapsed
            sample = Sample(rate, meter.waited / meter.elapsed, start)
            stats = batches.stats()
        self._batch = meter.batch
        return sample, stats

    def _make(self, choice: Choice, trace: str | None = None) -> Prefetcher[Any]:
        arguments = {**self._arguments, **choice.arguments(), "trace": trace}
        if self._batched:
            del arguments["batch_size"]
        elif choice.batch_size and (self._length or 0) >= choice.batch_size:
            arguments["drop_last"] = True  # so that all batches are equal
        with warnings.catch_warnings():  # of forks and repeated items: both are asked for here
            warnings.simplefilter("ignore")
            return Prefetcher(**arguments)

    def _items(self, choice: Choice) -> int:
        """In a batch."""
        if self._batched:
            return 1
        return min(choice.batch_size or 1, self._length or choice.batch_size or 1)

    async def _finish(self) -> None:
        if self._wishes.consumer:
            self._tell(self._budget.used, "replaying a cached batch")
            self.result.ceiling = await self._replay()
        if self._traced:
            self._tell(self._budget.used, "recording a timeline")
            take = recommend(self.result.measured).take
            slot = min(1.2, max(0.3, self._budget.left - take.start))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(slot + 10 * take.start + 5):
                    await self._pass(take.choice, slot, self._traced)

    async def _replay(self) -> float:
        """Items a second of the consumer, who never waits."""
        meter = _Meter(self._wishes.consumer)
        iterator = _again(self._batch)
        while meter.elapsed < _CEILING or not meter.batches:
            await meter.step(iterator)
        return meter.batches * self._items(self._at) / meter.elapsed


async def _again(batch: Any) -> AsyncIterator[Any]:
    while True:
        yield batch


class _Meter:
    """A consumer who counts, and notes how long each batch was waited for."""

    def __init__(self, consumer: float) -> None:
        self._consumer = consumer
        self.batch: Any = None
        self.reset()

    def reset(self) -> None:
        self.batches, self.waited = 0, 0.0
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    async def step(self, iterator: AsyncIterator[Any]) -> None:
        began = time.monotonic()
        try:
            self.batch = await anext(iterator)
        except StopAsyncIteration:
            raise Unusable("the dataset gives no items") from None
        self.waited += time.monotonic() - began
        self.batches += 1
        if self._consumer:
            await asyncio.sleep(self._consumer)


def _arguments(target: Target, wishes: Wishes) -> dict[str, Any]:
    """Those of a Prefetcher that are the same in all settings."""
    facts = target.config.facts
    if facts.one_shot:
        raise Unusable(
            f"{target.name} is an iterator, which can be read once: name the function that makes it"
        )
    if target.arguments.get("pool") is not None:
        raise Unusable(
            f"{target.name} works on a shared pool, and bench starts workers of its own: name a "
            "Prefetcher without pool="
        )
    asked = {"shuffle": wishes.shuffle or None, "split": wishes.split}
    asked["ordered"] = False if wishes.unordered else None
    given = {name: value for name, value in asked.items() if value is not None}
    return {**target.arguments, **given, "epochs": None}


def _beginning(target: Target, wishes: Wishes, length: int | None) -> Choice:
    """The setting from which the sweeps go out."""
    config = target.config
    sizes = wishes.batch_size or [config.batch_size or 32]
    if config.facts.kind == "map" and not length:
        raise Unusable(f"{target.name} has no items, or no len()")
    first = None if config.batch_sampler is not None else sizes[0]
    prefetch = wishes.num_prefetch[0] if wishes.num_prefetch else config.num_prefetch
    context = config.mp_context
    if context is not None and not isinstance(context, str):
        context = context.get_start_method()
    return Choice(batch_size=first, num_prefetch=prefetch, mp_context=context)


def _start_of(row: Measured, rows: Sequence[Measured]) -> float:
    """Seconds that its start will take, by what is known."""
    known = row.samples or [sample for other in rows for sample in other.samples]
    return statistics.median(s.start for s in known) if known else 0.0
