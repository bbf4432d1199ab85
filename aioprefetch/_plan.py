"""The plan of one epoch: which positions, in which order; a pure function of its place.

A plan gives tasks one after another, each with its keys or items, and nothing more when it
is exhausted. What a plan cannot know in advance, that a stream has ended, it is told.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from . import _seeds
from ._errors import TaskError
from ._messages import NO_STREAM, Task
from ._payload import Live, Payload
from ._shuffle import Permutation

_BLOCK = 1024  # shuffled positions that are computed at once


_NOTHING = Live([])


class Planned(NamedTuple):
    """A task, the keys or items that go with it, or the error of reading them."""

    task: Task
    payload: Payload = _NOTHING
    error: TaskError | None = None


class Plan(Protocol):
    """What a window draws its tasks from."""

    @property
    def exhausted(self) -> bool:
        """Whether no task will come any more."""

    def take(self) -> Planned | None:
        """The next task, or None when there is none to be had now."""

    def want(self, room: int) -> None:
        """The window has room for so many tasks more: read no further ahead."""

    def left(self, task: Task) -> None:
        """The outcome of a task has left the window."""

    def ended(self, stream: int) -> None:
        """A stream has ended."""


class Pass(NamedTuple):
    """Which pass over the data a task belongs to."""

    run: int
    epoch: int
    seed: int


def num_batches(length: int, batch_size: int | None, drop_last: bool) -> int:
    """Batches in ``length`` items."""
    size = batch_size or 1
    return length // size if drop_last else -(-length // size)


class IndexPlan:
    """Every index of a map-style source once, in order or shuffled."""

    def __init__(
        self, pass_: Pass, length: int, batch_size: int | None, *, drop_last: bool, shuffle: bool
    ) -> None:
        self._pass = pass_
        self._length = length
        self._size = batch_size or 1
        self._batches = num_batches(length, batch_size, drop_last)
        self._seq = 0
        key = _seeds.key_of(pass_.seed, "shuffle", pass_.epoch, length)
        self._order = Permutation(length, key) if shuffle else None
        self._block = np.empty(0, np.int64)
        self._block_start = 0

    @property
    def exhausted(self) -> bool:
        return self._seq >= self._batches

    def take(self) -> Planned | None:
        seq = self._seq
        if seq >= self._batches:
            return None
        self._seq = seq + 1
        start = seq * self._size
        stop = min(start + self._size, self._length)
        task = Task(self._pass.run, self._pass.epoch, seq, start, stop - start, NO_STREAM, True)
        return Planned(task, Live(self._indices(start, stop)))

    def want(self, room: int) -> None:
        """Nothing is read: tasks are there to be taken."""

    def left(self, task: Task) -> None:
        """Nothing depends on it."""

    def ended(self, stream: int) -> None:
        raise RuntimeError(f"a plan without streams was told that stream {stream} ended")

    def _indices(self, start: int, stop: int) -> list[int]:
        if self._order is None:
            return list(range(start, stop))
        if stop > self._block_start + len(self._block):
            end = min(max(start + _BLOCK, stop), self._length)
            self._block = self._order(np.arange(start, end, dtype=np.int64))
            self._block_start = start
        indices: list[int] = self._block[
            start - self._block_start : stop - self._block_start
        ].tolist()
        return indices


class StreamPlan:
    """The next batch of one stream after another, until all have ended.

    Ordered, the streams take turns, and one that has ended drops out: a function of the
    streams alone. Unordered, the next request goes to the stream that has fewest out, so
    that a slow one holds up nobody.

    Parameters
    ----------
    limit
        Batches to request, or None for as long as a stream lives.
    """

    def __init__(
        self,
        pass_: Pass,
        num_streams: int,
        batch_size: int | None,
        *,
        ordered: bool,
        limit: int | None = None,
        seq: int = 0,
    ) -> None:
        self._pass = pass_
        self._live = list(range(num_streams))
        self._size = batch_size or 1
        self._ordered = ordered
        self._limit = limit
        self._seq = seq
        self._turn = 0  # of the stream that comes next, if it lives
        self._out = [0] * num_streams
        self._position = [0] * num_streams  # of the next item of each

    @property
    def exhausted(self) -> bool:
        return not self._live or (self._limit is not None and self._limit <= 0)

    def take(self) -> Planned | None:
        if self.exhausted:
            return None
        stream = self._next_in_turn() if self._ordered else self._least_busy()
        self._turn = stream + 1
        self._out[stream] += 1
        run, epoch, _ = self._pass
        task = Task(run, epoch, self._seq, self._position[stream], self._size, stream)
        self._seq += 1
        self._position[stream] += self._size
        if self._limit is not None:
            self._limit -= 1
        return Planned(task)

    def want(self, room: int) -> None:
        """Nothing is read: tasks are there to be taken."""

    def left(self, task: Task) -> None:
        self._out[task.stream] -= 1

    def ended(self, stream: int) -> None:
        if stream in self._live:
            self._live.remove(stream)

    def begin(self, pass_: Pass, limit: int | None) -> None:
        """A new epoch of replicas, which run on."""
        self._pass = pass_
        self._limit = limit
        self._seq = 0

    def _next_in_turn(self) -> int:
        return next((s for s in self._live if s >= self._turn), self._live[0])

    def _least_busy(self) -> int:
        after = [s for s in self._live if s >= self._turn]
        turn = after + [s for s in self._live if s < self._turn]
        return min(turn, key=lambda s: self._out[s])
