"""Reading an iterable source: one pass over it, and the streams that a worker reads."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ._codec import plain_dumps
from ._digest import Digest
from ._errors import shorten
from ._messages import Progress
from ._source import (
    Split,
    is_async_iterable,
    is_generator_function,
    log,
    reset,
    start_epoch,
    was_cancelled,
)

Call = Callable[..., Awaitable[Any]]  # calls a function of the user's where it belongs
At = Callable[[int], AbstractContextManager[None]]


class End(NamedTuple):
    """Why a reading stopped: the data ended, or ``error`` was raised."""

    error: BaseException | None = None


class Reading:
    """One pass over an iterable, sync or async, that ends once.

    An iterator made here is closed here, and a generator always; any other iterator that the
    user made stays as it is.
    """

    def __init__(self, iterable: Any, state: Any = None) -> None:
        if is_generator_function(iterable):
            iterable = iterable()
        self.is_async = is_async_iterable(iterable)
        if state is not None and _keeps_state(iterable):
            iterable.load_state_dict(state)
        self._iterator = aiter(iterable) if self.is_async else iter(iterable)
        is_generator = inspect.isgenerator(self._iterator) or inspect.isasyncgen(self._iterator)
        self._ours = is_generator or self._iterator is not iterable
        self._keeper = next(filter(_keeps_state, (iterable, self._iterator)), None)
        if state is not None and self._keeper is not None and self._keeper is not iterable:
            self._keeper.load_state_dict(state)
        self.given = 0
        self.end: End | None = None

    @property
    def has_state(self) -> bool:
        """Whether the iterable, or its iterator, says where it is and can be put there again."""
        return self._keeper is not None

    def state(self) -> Any:
        assert self._keeper is not None
        return self._keeper.state_dict()

    async def take(self, call: Call) -> tuple[Any] | None:
        """The next item in a tuple, or None at the end; ``call`` runs a synchronous step."""
        if self.end is not None:
            return None
        taken = await (self._take_async() if self.is_async else call(self.take_sync))
        return taken

    def take_sync(self) -> tuple[Any] | None:
        if self.end is None:
            try:
                item = next(self._iterator)
            except StopIteration:
                self.end = End()
            except BaseException as error:
                self.end = End(error)
            else:
                self.given += 1
                return (item,)
        return None

    async def _take_async(self) -> tuple[Any] | None:
        try:
            item = await anext(self._iterator)
        except StopAsyncIteration:
            self.end = End()
        except BaseException as error:
            if was_cancelled(error):
                raise
            self.end = End(error)
        else:
            self.given += 1
            return (item,)
        return None

    async def close(self, call: Call) -> None:
        """Close the iterator, unless it has ended; what it raises then is logged."""
        if self.end is not None:
            return
        self.end = End()
        if self._ours:
            try:
                if self.is_async:
                    await (_call_if_there(self._iterator, "aclose") or _nothing())
                else:
                    await call(self.close_sync)
            except BaseException as error:
                if was_cancelled(error):
                    raise
                log.warning("closing %s raised", shorten(self._iterator), exc_info=True)

    def close_sync(self) -> None:
        self.end = End()
        _call_if_there(self._iterator, "close")


async def _nothing() -> None:
    """Stands in for an aclose() that is not there."""


def _call_if_there(thing: Any, method: str) -> Awaitable[None] | None:
    call = getattr(thing, method, None)
    return call() if callable(call) else None


def _keeps_state(thing: Any) -> bool:
    """Whether it has both of torchdata's methods."""
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods))


class Chunk(NamedTuple):
    """Consecutive items of a stream, the first with ordinal ``first``, and why it stopped."""

    first: int
    items: list[Any]
    end: End | None
    progress: Progress | None


class Stream:
    """One stream in one pass; gives its items, then once what ended it.

    A stream that another worker has read before goes on where that was: by its own state, or
    by being read again, and then it has to repeat itself. An endless one, a replica, begins
    its copy anew whenever it has been read through, and repeats nothing.

    Parameters
    ----------
    name
        For the error that says that it did not repeat itself.
    mortal
        Whether its worker may die, and so where it is has to be known elsewhere.
    """

    def __init__(
        self, make_copy: Callable[[], Any], name: str, *, endless: bool, mortal: bool
    ) -> None:
        self._make_copy = make_copy
        self._name = name
        self._endless = endless
        self._repeats = mortal and not endless
        self._reading: Reading | None = None
        self._given = 0
        self._digest: Digest | None = Digest() if self._repeats else None
        self._goal: Progress | None = None  # what was reported of it before
        self._state: Any = None  # to begin with
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
            Where the stream was when its worker died.
        """
        async with self._lock:
            if resume is not None and self._reading is None:
                self._resume(resume)
            if not self._endless:
                await self._advance(position, call, at)
            first = self._given
            items: list[Any] = []
            while self._end is None and len(items) < size:
                taken = await self._next(call, at)
                if taken is not None:
                    items.append(taken[0])
            end = self._end if len(items) < size else None
            return Chunk(first, items, end, await self._progress(call))

    def report_error(self) -> None:
        """The error that ended the stream has been told: from now on it has just ended."""
        self._end = End()

    async def close(self, call: Call) -> None:
        """Stop after the item that is being read, and close what was read."""
        self._end = self._end or End()
        async with self._lock:
            if self._reading is not None:
                await self._reading.close(call)

    async def _advance(self, position: int, call: Call, at: At) -> None:
        """Pass over what has been delivered."""
        if self._given > position and self._end is None:
            raise RuntimeError(
                f"{self._name} is at item {self._given}, and item {position} was asked for: its "
                "tasks came out of their order"
            )
        while self._end is None and self._given < position:
            await self._next(call, at)

    # Going on

    def _resume(self, resume: Progress) -> None:
        if not self._repeats:
            return
        if resume.state is None:
            self._goal = resume if resume.digest else None
        else:
            self._state = pickle.loads(resume.state)
            self._given = resume.position

    async def _progress(self, call: Call) -> Progress | None:
        reading = self._reading
        if not self._repeats or reading is None:
            return None
        if not reading.has_state:
            return Progress(self._given, self._digest.value() if self._digest else b"")
        self._digest = None
        try:
            return Progress(self._given, state=plain_dumps(await call(reading.state)))
        except BaseException as error:
            if was_cancelled(error):
                raise
            self._end = self._end or End(error)
            return None

    def _check(self) -> None:
        """Once it is where it was: have the same items come?"""
        goal, digest = self._goal, self._digest
        if goal is None or digest is None:
            return
        if self._given == goal.position and digest.value() == goal.digest:
            self._goal = None
        elif self._given >= goal.position or self._end is not None:
            self._goal = None
            self._end = End(
                RuntimeError(
                    f"{self._name} was read again after its worker had died, and its first "
                    f"{goal.position} items were others: a stream has to repeat itself, or have "
                    "state_dict() and load_state_dict()"
                )
            )

    async def _next(self, call: Call, at: At) -> tuple[Any] | None:
        with at(self._given):
            taken = await self._take(call)
        if taken is not None:
            self._given += 1
            if self._digest is not None:
                self._digest.add(taken[0])
        self._check()
        return taken if self._end is None or taken is None else None

    async def _take(self, call: Call) -> tuple[Any] | None:
        try:
            if self._reading is None:
                copy, state = await call(self._make_copy), self._state
                self._reading = Reading(copy, state)
            taken = await self._reading.take(call)
            if taken is None and self._goes_round():
                self._reading = Reading(await call(self._make_copy))
                taken = await self._reading.take(call)
        except BaseException as error:  # of shard(), set_epoch(), load_state_dict() or iter()
            if was_cancelled(error):
                raise
            self._end = End(error)
            return None
        if taken is None:
            self._end = self._reading.end
        return taken

    def _goes_round(self) -> bool:
        assert self._reading is not None
        assert self._reading.end is not None
        return self._endless and self._reading.end.error is None and self._reading.given > 0


class Streams:
    """The streams that this worker reads of an iterable source, in one pass after another."""

    def __init__(self, source: Any, split: Split, num_streams: int, *, mortal: bool) -> None:
        self._source = source
        self._mortal = mortal
        self._split = split
        self._num_streams = num_streams
        self._shards: dict[int, Any] = {}
        self._streams: dict[tuple[int, int], Stream] = {}

    def open(self, run: int, epoch: int, number: int) -> Stream:
        """The stream with a number in a pass."""
        stream = self._streams.get((run, number))
        if stream is None:
            make_copy = functools.partial(self._copy, number, epoch)
            endless = self._split == "replicate"
            name = f"stream {number} of {type(self._source).__qualname__}"
            stream = Stream(make_copy, name, endless=endless, mortal=self._mortal)
            self._streams[run, number] = stream
        return stream

    async def release(self, run: int | None, call: Call) -> None:
        """Close the streams of a pass that is over, or of all."""
        for key in [key for key in self._streams if run is None or key[0] == run]:
            await self._streams.pop(key).close(call)

    def _copy(self, number: int, epoch: int) -> Any:
        if self._split != "shard":
            return self._source
        shard = self._shards.get(number)
        if shard is None:
            shard = self._source.shard(num_shards=self._num_streams, index=number)
            reset(shard)
            self._shards[number] = shard
        start_epoch(shard, epoch)
        return shard
