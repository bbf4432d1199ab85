"""Settings that are compared: which, for how long, and which of them to take."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ._config import default_start_method
from ._stats import Stats

CLOSE = 0.05  # of the best: a smaller setting that is no further from it is as good
ROUNDS = 5  # measurements of a setting in one sweep, at most
_MEANT = 3  # that a sweep is planned for
SLOT = (0.05, 2.0)  # seconds of a measurement, at least and at most
SHARES = {"num_proc": 4, "batch_size": 2, "num_prefetch": 2, "mp_context": 1}  # of the time


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
    stats: Stats = field(default_factory=Stats)  # of the last one

    @property
    def rate(self) -> float:
        return self._median(0)

    @property
    def wait_share(self) -> float:
        return self._median(1)

    @property
    def start(self) -> float:
        return self._median(2)

    @property
    def spread(self) -> float:
        """Between the first and the third quarter of the rates, as a part of their median."""
        if len(self.samples) < 2:
            return 0.0
        low, middle, high = statistics.quantiles((s.rate for s in self.samples), method="inclusive")
        return (high - low) / middle

    def _median(self, column: int) -> float:
        return statistics.median(sample[column] for sample in self.samples)

    @property
    def setting(self) -> Choice:
        """The choice, with the window that came of it."""
        return replace(self.choice, num_prefetch=self.stats.setting.num_prefetch)

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
        least, most = SLOT
        return min(most, max(least, room))
