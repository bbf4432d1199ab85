"""The kinds of source, who iterates which, and the streams that an iterable is read as."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ._errors import shorten

log = logging.getLogger("aioprefetch")

Kind = Literal["map", "iterable", "factory"]
Split = Literal["parent", "shard", "worker", "replicate"]

SPLITS: tuple[Split, ...] = ("parent", "shard", "worker", "replicate")

Call = Callable[..., Awaitable[Any]]  # calls a function of the user's where it belongs
At = Callable[[int], AbstractContextManager[None]]

_KINDS = (
    "a map-style dataset (__len__ and __getitem__), an iterable (__iter__), an async iterable "
    "(__aiter__), a generator function, or a function without arguments that returns one of these"
)


@dataclass(frozen=True)
class Facts:
    """What a source is, as far as can be told without reading it."""

    kind: Kind
    name: str
    is_async: bool = False  # its __getitem__ or its iterator is
    one_shot: bool = False  # an iterator: it can be read once
    is_torch: bool = False  # a torch IterableDataset: it splits itself by worker_info
    shardable: bool = False
    num_shards: int | None = None
    length: int | None = None


def is_async_function(function: Any) -> bool:
    """Whether calling it gives an awaitable: ``async def``, also behind partial or __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004 - which kind, not whether
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def describe(source: Any) -> Facts:
    """Recognise a source.

    Raises
    ------
    TypeError
        It is none of the kinds.
    """
    kind = type(source)
    name = getattr(source, "__qualname__", kind.__qualname__)
    if is_generator_function(source):
        return Facts("iterable", name, is_async=inspect.isasyncgenfunction(_unwrap(source)))
    is_torch = _is_torch_iterable(kind)
    if not is_torch and _has(kind, "__getitem__") and _has(kind, "__len__"):
        return _map_style(source, name)
    if is_torch or _has(kind, "__aiter__") or _has(kind, "__iter__"):
        return _iterable(source, name, is_torch)
    if callable(source) and _takes_nothing(source):
        return Facts("factory", name, is_async=is_async_function(source))
    raise TypeError(f"{name} is not a source: give {_KINDS}")


def _has(kind: type, method: str) -> bool:
    return getattr(kind, method, None) is not None


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_generator_function(source: Any) -> bool:
    function = _unwrap(source)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def is_async_iterable(iterable: Any) -> bool:
    """Whether it is read with ``async for``."""
    if is_generator_function(iterable):
        return inspect.isasyncgenfunction(_unwrap(iterable))
    return _has(type(iterable), "__aiter__")


def _is_torch_iterable(kind: type) -> bool:
    return any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("torch.utils.data")
        for base in kind.__mro__
    )


def _map_style(source: Any, name: str) -> Facts:
    methods = (type(source).__getitem__, getattr(type(source), "__getitems__", None))
    is_async = any(map(is_async_function, methods))
    return Facts("map", name, is_async=is_async, length=length_of(source))


def _iterable(source: Any, name: str, is_torch: bool) -> Facts:
    kind = type(source)
    is_async = _has(kind, "__aiter__")
    shardable = callable(getattr(source, "shard", None))
    shards = getattr(source, "num_shards", None) if shardable else None
    return Facts(
        "iterable",
        name,
        is_async=is_async,
        one_shot=_is_iterator(source, is_async),
        is_torch=is_torch,
        shardable=shardable,
        num_shards=shards if isinstance(shards, int) else None,
        length=length_of(source),
    )


def _is_iterator(source: Any, is_async: bool) -> bool:
    if is_async:
        return _has(type(source), "__anext__") and source.__aiter__() is source
    return _has(type(source), "__next__") and iter(source) is source


def _takes_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def length_of(sized: Any) -> int | None:
    """``len(sized)``, or None when it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def choose_split(
    facts: Facts, split: Split | None, *, has_map: bool, num_proc: int, ordered: bool
) -> Split:
    """Who iterates an iterable source: what was asked for, or the first rule that holds.

    Raises
    ------
    ValueError
        The source cannot be split as asked, or no rule holds.
    """
    chosen = split or _first_rule(facts, has_map=has_map, num_proc=num_proc, ordered=ordered)
    if chosen is None:
        raise ValueError(
            f"{facts.name} is iterable and num_proc={num_proc}: say who iterates it. "
            "split='parent': this process reads it, workers map and collate; "
            "split='shard': each worker reads source.shard(num_shards=, index=); "
            "split='worker': each worker iterates a copy that divides itself by worker_info(); "
            "split='replicate' with ordered=False: independent copies, i.i.d. items"
        )
    if chosen == "shard" and not facts.shardable:
        raise ValueError(
            f"split='shard' needs a source with shard(num_shards=, index=); {facts.name} has none"
        )
    if facts.one_shot and chosen != "parent":
        raise ValueError(
            f"{facts.name} is an iterator, which can be read once and by this process alone: "
            f"use split='parent' instead of {chosen!r}, or give the function that makes it"
        )
    if chosen == "replicate" and ordered:
        raise ValueError(
            "split='replicate' gives items in no order: pass ordered=False, or choose another split"
        )
    return chosen


def _first_rule(facts: Facts, *, has_map: bool, num_proc: int, ordered: bool) -> Split | None:
    if facts.shardable:
        return "shard"
    if facts.one_shot or has_map:
        return "parent"
    if facts.is_torch or num_proc <= 1:
        return "worker"
    return None if ordered else "replicate"


def start_epoch(source: Any, epoch: int) -> None:
    """Tell a source, sampler or copy which epoch begins, if it wants to know."""
    tell = getattr(source, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def reset(source: Any) -> None:
    """Tell a copy, once, that it is one and in its place."""
    tell = getattr(source, "reset_state", None)
    if callable(tell):
        tell()


class End(NamedTuple):
    """Why a reading stopped: the data ended, or ``error`` was raised."""

    error: BaseException | None = None


class Reading:
    """One pass over an iterable, sync or async, that ends once.

    An iterator made here is closed here, and a generator always; any other iterator that the
    user made stays as it is.
    """

    def __init__(self, iterable: Any) -> None:
        if is_generator_function(iterable):
            iterable = iterable()
        self.is_async = _has(type(iterable), "__aiter__")
        self._iterator = aiter(iterable) if self.is_async else iter(iterable)
        is_generator = inspect.isgenerator(self._iterator) or inspect.isasyncgen(self._iterator)
        self._ours = is_generator or self._iterator is not iterable
        self.given = 0
        self.end: End | None = None

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


def was_cancelled(error: BaseException) -> bool:
    """Whether ``error`` is the cancellation of the running asyncio task, not the user's own."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop, nothing to cancel
        return False
    return task is not None and task.cancelling() > 0


class Chunk(NamedTuple):
    """Consecutive items of a stream, the first with ordinal ``first``, and why it stopped."""

    first: int
    items: list[Any]
    end: End | None


class Stream:
    """One stream in one pass; gives its items, then once what ended it.

    An endless stream, a replica, begins its copy anew whenever it has been read through.
    """

    def __init__(self, make_copy: Callable[[], Any], *, endless: bool) -> None:
        self._make_copy = make_copy
        self._endless = endless
        self._reading: Reading | None = None
        self._given = 0
        self._end: End | None = None
        self._lock = asyncio.Lock()

    async def read(self, size: int, call: Call, at: At) -> Chunk:
        """The next ``size`` items; fewer at the end, none after it.

        Parameters
        ----------
        call
            Calls a synchronous step where it belongs.
        at
            Surrounds the reading of the item with an ordinal.
        """
        async with self._lock:
            first = self._given
            items: list[Any] = []
            while self._end is None and len(items) < size:
                with at(self._given):
                    taken = await self._take(call)
                if taken is not None:
                    items.append(taken[0])
                    self._given += 1
            return Chunk(first, items, self._end if len(items) < size else None)

    def report_error(self) -> None:
        """The error that ended the stream has been told: from now on it has just ended."""
        self._end = End()

    async def close(self, call: Call) -> None:
        if self._reading is not None:
            await self._reading.close(call)

    async def _take(self, call: Call) -> tuple[Any] | None:
        try:
            if self._reading is None:
                self._reading = Reading(await call(self._make_copy))
            taken = await self._reading.take(call)
            if taken is None and self._goes_round():
                self._reading = Reading(await call(self._make_copy))
                taken = await self._reading.take(call)
        except BaseException as error:  # of shard(), set_epoch() or iter()
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

    def __init__(self, source: Any, split: Split, num_streams: int) -> None:
        self._source = source
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
            stream = self._streams[run, number] = Stream(make_copy, endless=endless)
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


def torch_worker_info(worker: int, num_workers: int, seed: int, source: Any) -> None:
    """Make ``torch.utils.data.get_worker_info()`` true in this worker, if torch is there."""
    module: Any = sys.modules.get("torch.utils.data._utils.worker")
    if module is not None:
        module._worker_info = module.WorkerInfo(
            id=worker, num_workers=num_workers, seed=seed, dataset=source
        )


def as_live(facts: Facts) -> Facts:
    """The facts of a source that a factory made, in its worker."""
    return replace(facts, name=f"{facts.name} (made by the function given)")
