"""Which ordinals of a sequence have been delivered: nearly always all below one of them.

    0 ────────────── through ···[──)······[────)···············
      all delivered             beyond, in the window's reach

What is beyond is there because batches came out of order, were handed over and not used yet,
or were delivered when hosts divided the sequence in another way; then it may be every n-th.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import gcd
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tail = Literal["exact", "pad", "drop"]

TAILS: tuple[Tail, ...] = ("exact", "pad", "drop")

ALL = 2**63 - 1  # the end of a sequence whose length does not matter


class Run(NamedTuple):
    """``range(start, stop, step)``, not empty."""

    start: int
    stop: int
    step: int = 1

    def clipped(self, start: int, stop: int) -> Run | None:
        """What of it lies in ``range(start, stop)``."""
        first = self.start + max(0, -(-(start - self.start) // self.step)) * self.step
        stop = min(stop, self.stop)
        return Run(first, stop, self.step) if first < stop else None


class Share(NamedTuple):
    """Every n-th ordinal: what one host takes of a sequence that all of them see."""

    rank: int = 0
    world_size: int = 1
    tail: Tail = "exact"

    def count(self, length: int) -> int:
        """How many of a sequence's ordinals, and of those that fill its last round, are its."""
        if self.tail == "drop":
            return length // self.world_size
        if self.tail == "pad":
            return -(-length // self.world_size)
        return len(range(self.rank, length, self.world_size))

    def whole(self, run: Run) -> Run:
        """A run of this share's own ordinals, in those of the whole sequence."""
        start = self.rank + self.world_size * run.start
        count = len(range(*run))
        step = self.world_size * run.step
        return Run(start, start + (count - 1) * step + 1, step)

    def own(self, run: Run) -> Run | None:
        """What a run of the whole sequence is in this share's ordinals."""
        shared = gcd(run.step, self.world_size)
        gap = self.rank - run.start
        if gap % shared:
            return None
        # The first ordinal of the run, at or after its start, that is in this share.
        step, world = run.step // shared, self.world_size // shared
        turns = gap // shared * pow(step, -1, world) % world if world > 1 else 0
        first = run.start + turns * run.step
        if first >= run.stop:
            return None
        stop = -(-(run.stop - self.rank) // self.world_size)
        return Run((first - self.rank) // self.world_size, stop, step)


EVERYTHING = Share()


class Delivered:
    """A growing set of ordinals of one sequence.

    Parameters
    ----------
    loaded
        What it begins with.
    """

    def __init__(self, loaded: Iterable[Run] = ()) -> None:
        self._loaded = tuple(_joined(loaded))
        self._begun = self.through = _reached(self._loaded)
        self._spans: dict[int, int] = {}  # added out of turn

    @property
    def begun(self) -> int:
        """Below it nothing was left to be delivered when it was made."""
        return self._begun

    def add(self, start: int, stop: int) -> None:
        """What was not loaded of ``range(start, stop)``.

        Spans do not overlap, and each begins where another ended or will end, the first at
        `begun`; they may be added in any order.
        """
        self._spans[start] = stop
        while self.through in self._spans:
            self.through = self._spans.pop(self.through)

    def runs(self) -> Iterable[Run]:
        """All of it, in as few runs as it takes."""
        if not (self._spans or self._loaded):
            return [Run(0, self.through)] if self.through else []
        added = [Run(self._begun, self.through)] if self.through > self._begun else []
        added += [Run(start, stop) for start, stop in self._spans.items()]
        runs = (*self._loaded, *added)
        reached = _reached(runs)
        rest = [run.clipped(reached, ALL) for run in runs]
        joined = _joined(run for run in rest if run is not None)
        return [Run(0, reached), *joined] if reached else list(joined)

    def without(self, spans: Iterable[tuple[int, int]]) -> Delivered:
        """A copy that lacks some of what was added."""
        runs: list[Run | None] = list(self.runs())
        for span in spans:
            kept = [run.clipped(*span) for run in self._loaded]
            ends = [(run.clipped(0, span[0]), run.clipped(span[1], ALL)) for run in runs if run]
            runs = [*kept, *(piece for pieces in ends for piece in pieces)]
        return Delivered(run for run in runs if run is not None)

    def covers(self, ordinals: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of each ordinal, whether it was loaded."""
        found = ordinals < self._begun
        for start, stop, step in self._loaded:
            if stop > self._begun:
                inside = (ordinals >= start) & (ordinals < stop)
                found |= inside & ((ordinals - start) % step == 0)
        return found

    def was_loaded(self, ordinal: int) -> bool:
        """The same of one."""
        return ordinal < self._begun or any(ordinal in range(*run) for run in self._loaded)

    def gap(self, start: int) -> tuple[int, int]:
        """The first stretch from ``start`` on of which nothing was loaded."""
        start = max(start, self._begun)
        for run in self._loaded:
            if start < run.start:
                return start, run.start
            start = max(start, run.stop)
        return start, ALL


def _reached(runs: Iterable[Run]) -> int:
    """Up to where runs leave nothing out."""
    by_step: defaultdict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_step[run.step].append(run)
    reached, before = 0, -1
    while reached > before:
        before = reached
        for step, alike in by_step.items():
            if len(alike) >= step:
                reached = _end_of(alike, step, reached)
    return reached


def _end_of(runs: Iterable[Run], step: int, start: int) -> int:
    """The first ordinal from ``start`` on that is in no run, all of one step."""
    ends = {ordinal % step: ordinal for ordinal in range(start, start + step)}
    for run in runs:
        residue = run.start % step
        if run.start <= ends[residue] < run.stop:
            ends[residue] += len(range(ends[residue], run.stop, step)) * step
    return min(ends.values())


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """The same set in as few runs, sorted."""
    classes: defaultdict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in sorted(runs):
        kept = classes[run.step, run.start % run.step]
        if kept and run.start < kept[-1].stop + run.step:
            kept[-1] = Run(kept[-1].start, max(kept[-1].stop, run.stop), run.step)
        else:
            kept.append(run)
    return iter(sorted(run for kept in classes.values() for run in kept))
