"""Measuring a user's dataset under many settings, and which of them to take.

Settings are compared in short measurements that take turns, so that a machine that is slower
for a while is so for all of them. One argument is swept after another, each at the best of
what was swept before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ._config import default_start_method
from ._prefetcher import Prefetcher
from ._stats import Stats
from ._target import Target, Unusable

CLOSE = 0.05  # of the best: a smaller setting that is no further from it is as good
ROUNDS = 5  # measurements of a setting in one sweep, at most
_MEANT = 3  # that a sweep is planned for
_SLOT = (0.05, 2.0)  # seconds of a measurement, at least and at most
_CEILING = 0.2  # seconds that the replay takes, at most
_SHARES = {"num_proc": 4, "batch_size": 2, "num_prefetch": 2, "mp_context": 1}  # of the time


@dataclass(frozen=True)
class Choice:
    """A setting: the arguments that are swept."""

    num_proc: int = 1
    batch_size: int | None = None
    num_prefetch: int | None = None  # None where the Prefetcher chooses
    mp_context: str | None = None

    def arguments(self) -> dict[str, Any]:
        """As a Prefetcher takes them; without workers there is no start method."""
        context = self.mp_context if self.num_proc else None
        return {**self.__dict__, "mp_context": context}

    def __str__(self) -> str:
        given = {name: v for name, v in self.arguments().items() if v is not None}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())


class Sample(NamedTuple):
    """One measurement."""

    rate: float  # items a second
    wait_share: float  # of the time that the consumer waited, 0 to 1
    start: float  # seconds until the first batch


@dataclass
class Measured:
    """The measurements of one setting."""

    choice: Choice
    samples: list[Sample] = field(default_factory=list)
    stats: Stats = Stats()  # of the last one

    @property
    def rate(self) -> float:
        return self._median(0)

    @property
    def wait_share(self) -> float:
        return self._median(1)

    @property
    def start(self) -> float:
        return self._median(2)

    def _median(self, column: int) -> float:
        return statistics.median(sample[column] for sample in self.samples)

    @property
    def size(self) -> tuple[float, ...]:
        """What a setting costs, the dearest first: workers, what they hold, the start."""
        batch = self.choice.batch_size or 1
        window = self.stats.setting.num_prefetch * batch
        usual = self.choice.mp_context in (None, default_start_method())
        return self.choice.num_proc, window, batch, not usual


class Advice(NamedTuple):
    """The setting to take, and the fastest one."""

    take: Measured
    best: Measured


def recommend(table: Sequence[Measured]) -> Advice:
    """The smallest setting within 5 % of the best median."""
    best = max(table, key=lambda m: m.rate)
    close = [m for m in table if m.rate >= (1 - CLOSE) * best.rate]
    return Advice(min(close, key=lambda m: m.size), best)


@dataclass(frozen=True)
class Wishes:
    """What the user asked for."""

    seconds: float = 60.0
    num_proc: Sequence[int] | None = None
    batch_size: Sequence[int | None] | None = None
    num_prefetch: Sequence[int] | None = None
    mp_context: Sequence[str] | None = None
    consumer: float = 0.0  # seconds of a step
    shuffle: bool = False
    unordered: bool = False
    split: Any = None


@dataclass
class Result:
    """What was measured so far."""

    target: str
    wishes: Wishes
    unit: str = "items"
    table: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # settings, and why
    ceiling: float | None = None  # items a second of the consumer alone
    elapsed: float = 0.0
    interrupted: bool = False

    @property
    def measured(self) -> list[Measured]:
        return [m for m in self.table if m.samples]

    def of(self, choice: Choice) -> Measured:
        """The row of a setting, made when there is none."""
        for row in self.table:
            if row.choice == choice:
                return row
        self.table.append(Measured(choice))
        return self.table[-1]


# What to sweep


def usable_cpus() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_counts(cpus: int) -> list[int]:
    """0, 1, 2, 4, … and all of them."""
    return sorted({0, 1, 2, cpus, *(2**n for n in range(8) if 2**n <= cpus)})


def candidates(name: str, at: Choice, wishes: Wishes) -> list[Choice]:
    """The settings of a sweep; all but one argument are those of ``at``."""
    asked = getattr(wishes, name)
    return [replace(at, **{name: v}) for v in (asked or _usual(name, at))]


def _usual(name: str, at: Choice) -> Sequence[Any]:
    if name == "num_proc":
        return worker_counts(usable_cpus())
    if name == "batch_size":
        return [at.batch_size]
    if name == "num_prefetch":
        workers = max(1, at.num_proc)
        return [None, 2 * workers, 8 * workers]
    return [None, *(["spawn"] if at.num_proc and default_start_method() != "spawn" else [])]


class Budget:
    """The seconds there are, and what of them a measurement may take.

    Parameters
    ----------
    seconds
        For everything.
    clock
        What tells the time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()

    @property
    def used(self) -> float:
        return self._clock() - self._began

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.used)

    def share(self, weight: float, weights: float) -> float:
        """Seconds after the beginning at which a sweep ends, by its part of what is left."""
        return self.used + self.left * weight / weights

    def slot(self, end: float, settings: int, start: float) -> float:
        """Seconds of a measurement, where each setting is to have three by ``end``."""
        room = max(0.0, end - self.used) / (_MEANT * settings) - start
        least, most = _SLOT
        return min(most, max(least, room))


# Measuring

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
        names = list(_SHARES)
        for number, name in enumerate(names):
            settings = self._possible(candidates(name, self._at, self._wishes))
            if len(settings) > 1 or not self.result.measured:
                weights = sum(_SHARES[n] for n in names[number:])
                await self._sweep(name, settings, self._budget.share(_SHARES[name], weights))
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
                late = self._budget.used >= end if turn else self._budget.left <= 0
                if late and self.result.measured:
                    return
                self._tell(self._budget.used, f"{name}: {row.choice}")
                slot = self._budget.slot(end, len(rows), _start_of(row, rows))
                await self._measure(row, slot)

    async def _measure(self, row: Measured, slot: float) -> None:
        """One measurement; nothing is noted when the time ends before it has begun."""
        limit = max(self._budget.left, _SLOT[0]) + slot
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
        self._tell(self._budget.used, "replaying a cached batch")
        if self._wishes.consumer:
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
