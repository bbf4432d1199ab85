"""The streams that a worker reads of an iterable source."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ._delivered import Share
from ._messages import Progress
from ._reading import Call, End, Sequence
from ._source import Split, reset, start_epoch

At = Callable[[int], AbstractContextManager[None]]


class Chunk(NamedTuple):
    """Consecutive items of a stream, the first with ordinal ``first``, and why it stopped."""

    first: int
    items: list[Any]
    end: End | None
    progress: Progress | None


class Stream:
    """One stream in one pass; gives its items, then once what ended it.

    A stream that has been read before, by a worker that died or in another run, goes on where
    that was. An endless one, a replica, begins its copy anew whenever it has been read through,
    and repeats nothing.
    """

    def __init__(self, make_copy: Callable[[], Any], name: str, *, endless: bool) -> None:
        self._make_copy = make_copy
        self._name = name
        self._endless = endless
        self._sequence: Sequence | None = None
        self._given = 0  # of an endless one, by the copies before
        self._end: End | None = None
        self._lock = asyncio.Lock()

    async def read(
        self, position: int, size: int, call: Call, at: At, resume: Progress | None
    ) -> Chunk:
        """The ``size`` items from ``position`` on; fewer at the end, none after it.

        Parameters
        ----------
        call
            Calls a synchronous step where it belongs.
        at
            Surrounds the reading of the item with an ordinal.
        resume
            Where the stream has been before.
        """
        async with self._lock:
            if self._sequence is None:
                self._sequence = self._begin(None if self._endless else resume)
            if not self._endless:
                await self._advance(self._sequence, position, call, at)
            first = self._ordinal()
            items: list[Any] = []
            while self._end is None and len(items) < size:
                taken = await self._next(call, at)
                if taken is not None:
                    items.append(taken[0])
            progress = None
            if not self._endless:
                progress = await self._sequence.progress(call)
                self._end = self._end or self._sequence.end
            end = self._end if len(items) < size else None
            return Chunk(first, items, end, progress)

    def report_error(self) -> None:
        """The error that ended the stream has been told: from now on it has just ended."""
        self._end = End()

    async def close(self, call: Call) -> None:
        """Stop after the item that is being read, and close what was read."""
        self._end = self._end or End()
        async with self._lock:
            if self._sequence is not None:
                await self._sequence.close(call)

    def _begin(self, resume: Progress | None) -> Sequence:
        return Sequence(self._make_copy, self._name, resume=resume, tells=not self._endless)

    def _ordinal(self) -> int:
        return self._given + (self._sequence.given if self._sequence is not None else 0)

    async def _advance(self, sequence: Sequence, position: int, call: Call, at: At) -> None:
        """Pass over what has been delivered."""
        if sequence.given > position and self._end is None:
            raise RuntimeError(
                f"{self._name} is at item {sequence.given}, and item {position} was asked for: "
                "its tasks came out of their order"
            )
        while self._end is None and sequence.given < position:
            await self._next(call, at)

    async def _next(self, call: Call, at: At) -> tuple[Any] | None:
        assert self._sequence is not None
        with at(self._ordinal()):
            taken = await self._sequence.take(call)
            if taken is None and self._goes_round(self._sequence):
                self._given += self._sequence.given
                self._sequence = self._begin(None)
                taken = await self._sequence.take(call)
        if taken is None:
            self._end = self._end or self._sequence.end
        return taken

    def _goes_round(self, sequence: Sequence) -> bool:
        ended = sequence.end is not None and sequence.end.error is None
        return self._endless and ended and sequence.given > 0 and self._end is None


class Streams:
    """The streams that this worker reads of an iterable source, in one pass after another.

    A stream has a number among those of its host, and one among those of all.
    """

    def __init__(self, source: Any, split: Split, num_streams: int, share: Share) -> None:
        self._source = source
        self._split = split
        self._num_streams = num_streams  # of all hosts
        self._share = share
        self._copies: dict[int, Any] = {}  # by number
        self._streams: dict[tuple[int, int], Stream] = {}

    def resize(self, num_streams: int) -> None:
        """From the next pass on there are so many."""
        if num_streams != self._num_streams:
            self._num_streams = num_streams
            self._copies.clear()

    def number(self, stream: int) -> int:
        """The number among those of all hosts."""
        return self._share.rank + self._share.world_size * stream

    def open(self, run: int, epoch: int, stream: int) -> Stream:
        """A stream of this host, by its number, in a pass."""
        opened = self._streams.get((run, stream))
        if opened is None:
            number = self.number(stream)
            make_copy = functools.partial(self._copy, number, epoch)
            endless = self._split == "replicate"
            name = f"stream {number} of {type(self._source).__qualname__}"
            opened = self._streams[run, stream] = Stream(make_copy, name, endless=endless)
        return opened

    async def release(self, run: int | None, call: Call) -> None:
        """Close the streams of a pass that is over, or of all."""
        for key in [key for key in self._streams if run is None or key[0] == run]:
            await self._streams.pop(key).close(call)

    def _copy(self, number: int, epoch: int) -> Any:
        """What a stream is read from; its worker has told the source itself of the epoch."""
        made = self.copy_of(number)
        if made is not self._source:
            start_epoch(made, epoch)
        return made

    def copy_of(self, number: int) -> Any:
        """What a stream is read from, by its number among all."""
        made = self._copies.get(number)
        if made is None:
            made = self._copies[number] = self._make(number)
        return made

    def _make(self, number: int) -> Any:
        if self._split == "shard":
            shard = self._source.shard(num_shards=self._num_streams, index=number)
            reset(shard)
            return shard
        # Streams that one worker reads must not move each other.
        return copy.deepcopy(self._source) if self._copies else self._source
