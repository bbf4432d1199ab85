"""The plan of one epoch: which positions, in which order; a pure function of its place.

A plan gives tasks one after another, each with its keys or items, and nothing more when it
is exhausted. It begins where a record says that the epoch was left, and leaves out what has
been delivered. What a plan cannot know in advance, that a stream has ended, it is told.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np

from . import _seeds
from ._errors import TaskError
from ._messages import NO_STREAM, Progress, Task
from ._payload import Live, Payload
from ._record import Record
from ._shuffle import Permutation

_BLOCK = 1024  # positions that are computed at once
_MOST = 1 << 20  # of them, where none is found to be left
_NOTHING = Live([])


class Planned(NamedTuple):
    """A task, and the keys or items that go with it, or the error of reading them."""

    task: Task
    payload: Payload = _NOTHING
    error: TaskError | None = None
    span: tuple[int, int] | None = None  # of its sequence, delivered when it is
    progress: Progress | None = None  # how far the sequence was read for it, here
    resume: Progress | None = None  # where its worker goes on with its stream


class Plan(Protocol):
    """What a window draws its tasks from."""

    record: Record

    @property
    def run(self) -> int:
        """The pass that its tasks belong to."""

    @property
    def exhausted(self) -> bool:
        """Whether no task will come any more."""

    @property
    def seq(self) -> int:
        """The seq of the next task."""

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


class _Buffer:
    """This host's positions that are still to be delivered, and their keys, in their order."""

    def __init__(self, length: int, order: Permutation | None, record: Record) -> None:
        self._length = length
        self._order = order
        self._share = record.share
        self._delivered = record.whole.delivered
        self._count = record.share.count(length)
        self._next = self._delivered.begun  # ordinal among this host's
        self._block = _BLOCK
        self._keys: list[int] = []
        self._places: list[int] = []
        self._at = 0

    def left(self, enough: int) -> int:
        """How many there are; no more than ``enough`` need be true."""
        while len(self._keys) - self._at < enough and self._next < self._count:
            self._fill()
        return len(self._keys) - self._at

    def take(self, size: int) -> tuple[list[int], list[int]]:
        """The next positions, and their keys."""
        span = slice(self._at, self._at + size)
        self._at += size
        return self._places[span], self._keys[span]

    def ordinal(self) -> int:
        """One more than that of the last position taken; at the end, than of all there are."""
        rank, world_size, _ = self._share
        if self._at == len(self._keys) and self._next >= self._count:
            return self._count
        return (self._places[self._at - 1] - rank) // world_size + 1

    def _fill(self) -> None:
        rank, world_size, _ = self._share
        stop = min(self._next + self._block, self._count)
        ordinals = np.arange(self._next, stop, dtype=np.int64)
        ordinals = ordinals[~self._delivered.covers(ordinals)]
        self._block = _BLOCK if ordinals.size else min(2 * self._block, _MOST)
        places = ordinals * world_size + rank
        positions = places % self._length if self._share.tail == "pad" else places
        keys = positions if self._order is None else self._order(positions)
        self._next = stop
        self._places = self._places[self._at :] + places.tolist()
        self._keys = self._keys[self._at :] + keys.tolist()
        self._at = 0


class IndexPlan:
    """Every index of a map-style source once, in order or shuffled."""

    def __init__(
        self,
        pass_: Pass,
        record: Record,
        length: int,
        batch_size: int | None,
        *,
        drop_last: bool,
        shuffle: bool,
    ) -> None:
        self.record = record
        self.seq = record.settled
        self._pass = pass_
        self._size = batch_size or 1
        self._least = self._size if drop_last else 1
        key = _seeds.key_of(pass_.seed, "shuffle", pass_.epoch, length)
        self._buffer = _Buffer(length, Permutation(length, key) if shuffle else None, record)
        self._ordinal = record.whole.delivered.begun

    @property
    def run(self) -> int:
        return self._pass.run

    @property
    def exhausted(self) -> bool:
        return self._buffer.left(self._least) < self._least

    def take(self) -> Planned | None:
        size = min(self._buffer.left(self._size), self._size)
        if size < self._least:
            return None
        places, keys = self._buffer.take(size)
        first = places[0]
        apart = tuple(places) if places[-1] - first >= size else None
        run, epoch, _ = self._pass
        task = Task(run, epoch, self.seq, first, size, NO_STREAM, True, apart)
        span = self._ordinal, self._buffer.ordinal()
        self.seq, self._ordinal = self.seq + 1, span[1]
        return Planned(task, Live(keys), span=span)

    def want(self, room: int) -> None:
        """Nothing is read: tasks are there to be taken."""

    def left(self, task: Task) -> None:
        """Nothing depends on it."""

    def ended(self, stream: int) -> None:
        raise RuntimeError(f"a plan without streams was told that stream {stream} ended")


class _Course:
    """What of one stream is still to be requested."""

    def __init__(self, record: Record, number: int) -> None:
        sequel = record.stream(number)
        self._delivered = sequel.delivered
        self._resume = sequel.progress
        self.position, self._stop = self._delivered.gap(0)

    def take(self, size: int) -> tuple[int, int, tuple[int, int], Progress | None]:
        """Position and size of the next task, its span, and where the stream goes on."""
        start = self.position
        size = min(size, self._stop - start)
        self.position, self._stop = self._delivered.gap(start + size)
        resume, self._resume = self._resume, None
        return start, size, (start, self.position), resume


class StreamPlan:
    """The next batch of one stream after another, until all have ended.

    Ordered, the stream that is least far comes next, so that they take turns, and one that has
    ended drops out: a function of the streams alone. Unordered, the next request goes to the
    stream that has fewest out, so that a slow one holds up nobody.

    Parameters
    ----------
    limit
        Batches to request, or None for as long as a stream lives.
    """

    def __init__(
        self,
        pass_: Pass,
        record: Record,
        num_streams: int,
        batch_size: int | None,
        *,
        ordered: bool,
        limit: int | None = None,
    ) -> None:
        self.record = record
        self.seq = record.settled
        self._pass = pass_
        self._live = [number for number in range(num_streams) if not record.stream(number).ended]
        self._courses = {number: _Course(record, number) for number in self._live}
        self._size = batch_size or 1
        self._ordered = ordered
        self._limit = limit
        self._turns = [(self._courses[number].position, number) for number in self._live]
        heapify(self._turns)
        self._turn = 0  # unordered: of the stream that comes next among equals
        self._out = dict.fromkeys(self._live, 0)

    @property
    def run(self) -> int:
        return self._pass.run

    @property
    def exhausted(self) -> bool:
        return not self._live or (self._limit is not None and self._limit <= 0)

    def take(self) -> Planned | None:
        if self.exhausted:
            return None
        stream = self._next_in_turn() if self._ordered else self._least_busy()
        course = self._courses[stream]
        position, size, span, resume = course.take(self._size)
        if self._ordered:
            heappush(self._turns, (course.position, stream))
        self._out[stream] += 1
        run, epoch, _ = self._pass
        task = Task(run, epoch, self.seq, position, size, stream)
        self.seq += 1
        if self._limit is not None:
            self._limit -= 1
        return Planned(task, span=span, resume=resume)

    def want(self, room: int) -> None:
        """Nothing is read: tasks are there to be taken."""

    def left(self, task: Task) -> None:
        self._out[task.stream] -= 1

    def ended(self, stream: int) -> None:
        if stream in self._live:
            self._live.remove(stream)
            self._turns = [turn for turn in self._turns if turn[1] != stream]
            heapify(self._turns)

    def begin(self, pass_: Pass, record: Record, limit: int | None) -> None:
        """A new epoch of replicas, which run on."""
        self.record = record
        self._pass = pass_
        self._limit = limit
        self.seq = record.settled

    def _next_in_turn(self) -> int:
        return heappop(self._turns)[1]

    def _least_busy(self) -> int:
        after = [s for s in self._live if s >= self._turn]
        turn = after + [s for s in self._live if s < self._turn]
        stream = min(turn, key=lambda s: self._out[s])
        self._turn = stream + 1
        return stream
