"""The work itself: fetch, map, collate; the same in a worker process and on a thread.

Where one of the user's functions is asynchronous a loop runs it, and up to ``concurrency`` items
are in flight.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from . import _seeds
from ._collate import allocate, default_collate
from ._errors import SkipItem, Stage, TaskError
from ._job import Desk, Job
from ._messages import NO_STREAM, Again, Ended, Failed, Lost, Made, Nothing, Outcome, Task
from ._page import Page
from ._place import Place, WorkerInfo, current
from ._program import Program, Terms, call_async, call_sync, checked, drive
from ._reading import Call
from ._source import (
    Facts,
    Split,
    describe,
    is_async_function,
    log,
    no_torch_worker_info,
    reset,
    start_epoch,
    torch_worker_info,
    was_cancelled,
)
from ._spans import Span, Spans
from ._streams import Streams


class Outbox(Protocol):
    """Where a worker's results go."""

    @property
    def empty(self) -> Callable[..., Any]:
        """Makes an uninitialised array of a shape and dtype for a batch."""

    def pack(self, result: Any) -> Any:
        """The payload of a result; raises SerializationError or MemoryError."""

    def discard(self) -> None:
        """Let go of arrays that were made and not packed."""

    def trim(self) -> None:
        """Give unused memory back."""


class _Left(NamedTuple):
    """An item that is left out of its batch, by on_error or by the user's SkipItem."""

    by_error: bool


class _Stop(Exception):
    """Carries the TaskError that a whole task ends with."""

    def __init__(self, error: TaskError) -> None:
        self.error = error
        self.skipped = 0  # items that on_error had left out before
        self.ends = False  # whether its stream ends with it


class Worker:
    """One worker's copy of the program, and how a task is done with it.

    Parameters
    ----------
    number
        The worker's id.
    outbox
        Where batches are made, and what turns one into the payload that travels.
    call
        Calls a function of the user's; by default here and now.
    page
        Where to note the items in hand, for a parent that may find this worker dead.
    closing
        Whether to finish the item in hand and begin no other.
    incarnation
        How many workers of this number there were before.
    state
        What ``worker_info().state`` is without a ``worker_init_fn``.
    """

    def __init__(
        self,
        program: Program,
        terms: Terms,
        number: int,
        *,
        outbox: Outbox,
        call: Call | None = None,
        page: Page | None = None,
        closing: Callable[[], bool] = lambda: False,
        incarnation: int = 0,
        state: Any = None,
    ) -> None:
        self._program = program
        self._state = state
        self._terms = terms
        self._outbox = outbox
        self._closing = closing
        self._spans = Spans() if terms.traces else None
        self._source = program.source
        self._map_fn = self._around("map", program.map_fn)
        self._collates = terms.batched or program.collate_fn is not None
        collate = self._in_place(program.collate_fn or default_collate)
        self._collate_fn = self._around("collate", collate)
        self._fetch: Any = None  # its __getitem__
        self._groups = False  # whether batches are fetched by its __getitems__
        self._number = number
        info = WorkerInfo(number, max(1, terms.num_proc), terms.seed, 0, -1, None, None)
        self._desk = Desk(info, number, False, False, page, incarnation, terms.origin)
        self._desks: dict[int, Desk] = {}  # by stream
        self._told_torch: tuple[WorkerInfo, int] | None = None
        self._call: Call = call or (call_async if terms.is_async else call_sync)
        self.is_async = terms.is_async
        self._slots: asyncio.Semaphore | None = None
        self._streams: Streams | None = None
        self._began: tuple[int, int] | None = None
        self._beginning = asyncio.Lock()
        self._beginners = 0  # tasks that hold the lock or wait for it
        self._running = 0  # tasks of the epoch that has begun
        self._idle = asyncio.Event()  # set when there are none
        self._second_half: Any = None

    async def make_source(self) -> Facts | None:
        """Call a source that is a function; gives the facts of what it made, else None."""
        if self._source is None or describe(self._source).kind != "factory":
            return None
        self._source = await self._call(self._source)
        facts = describe(self._source)
        if facts.kind == "factory":
            raise TypeError(f"the function given as the source returned another, {facts.name}")
        self.is_async = self.is_async or facts.is_async
        return facts

    def call_through(self, call: Call) -> None:
        """Call the user's functions this way from now on."""
        self._call = call

    async def open(self) -> None:
        """Tell the source that it is in its place, and run ``worker_init_fn``."""
        terms = self._terms
        if self.is_async:
            self._slots = asyncio.Semaphore(terms.concurrency)
            self._call = call_async if self._call is call_sync else self._call
        seeds_globals = not (terms.in_process or self.is_async)
        self._desk = replace(self._desk, seeds_globals=seeds_globals)
        self._fetch = self._around("fetch", getattr(self._source, "__getitem__", None))
        if self._spans is not None:
            self._spans.overlap = self.is_async
        self._groups = terms.batched and hasattr(self._source, "__getitems__")
        self._inform(source=self._source)
        self._tell_torch(self._desk.info, 0)
        if terms.split == "replicate":
            self._differ()
        if terms.split != "shard":
            await self._call(reset, self._source)
        if not terms.in_process:
            place = self._desk.incarnation, self._number
            _seeds.seed_globals(_seeds.key_of(terms.seed, "worker", *place))
        self._inform(state=await self._first_half())

    def settle(self, split: Split | None, num_streams: int, tenant: int = 0) -> None:
        """Learn how the source is read, before the first task."""
        if split not in (None, "worker") and not self._terms.in_process:
            no_torch_worker_info()  # it was there for a source that nobody knew yet
        self._terms = replace(self._terms, split=split, num_streams=num_streams)
        self._desk = replace(self._desk, replicates=split == "replicate")
        self._desks.clear()
        if self._streams is not None:
            self._streams.resize(num_streams)
        elif split is not None:
            self._streams = Streams(self._source, split, num_streams, self._terms.share)

    async def close(self) -> None:
        """Close the streams and run the second half of ``worker_init_fn``."""
        await self.release(None)
        try:
            if inspect.isgenerator(self._second_half):
                await self._call(next, self._second_half, None)
            elif self._second_half is not None:
                await anext(self._second_half, None)
        except BaseException as error:
            if was_cancelled(error):
                raise
            log.warning("the second half of worker_init_fn raised", exc_info=True)

    async def release(self, run: int | None) -> None:
        """A pass is over, or all are: close its streams."""
        if self._streams is not None:
            await self._streams.release(run, self._call)

    @property
    def state(self) -> Any:
        """The value of ``worker_init_fn``."""
        return self._desk.info.state

    def trim(self) -> None:
        """Give unused memory back."""
        self._outbox.trim()

    async def run(
        self, ticket: int, task: Task, values: Sequence[Any], again: Again | None = None
    ) -> Outcome:
        """Do a task; what the user's functions raise is in the outcome, never raised.

        ``again`` says what is known of a task that another worker has had.
        """
        try:
            desk = self._desk if task.stream == NO_STREAM else self._desk_of(task.stream)
        except BaseException as error:  # of the user's __deepcopy__
            return self.failed(task, values, error)
        job = Job(desk, ticket, task, values, again)
        try:
            if self._began != (task.run, task.epoch) or self._beginners:
                await self._begin_epoch(job)
            return await self._do(job)
        except _Stop as stop:
            return Failed(stop.error, stop.ends, stop.skipped, job.progress)
        except BaseException as error:  # asyncio's, where a function cancels its own task
            if was_cancelled(error):
                raise
            return self.failed(task, values, error)

    async def _do(self, job: Job) -> Outcome:
        self._running += 1
        began = 0.0 if self._spans is None else self._spans.begin(job.task.seq)
        try:
            if job.task.stream != NO_STREAM:
                return await self._run_stream(job)
            return await self._finish(job, await self._gather(job))
        finally:
            if self._spans is not None:
                self._spans.end(began)
            self._running -= 1
            if not self._running:
                self._idle.set()

    def failed(self, task: Task, values: Sequence[Any], error: BaseException) -> Outcome:
        """The outcome of a task that could not be run as tasks are."""
        return Failed(Job(self._desk, 0, task, values).error("fetch", error))

    def take_spans(self, tenant: int = 0) -> list[Span] | None:
        """What it did since the last time, where a timeline is drawn."""
        return None if self._spans is None else self._spans.take()

    def _around(self, name: str, function: Any) -> Any:
        """The same function, which is seen in the timeline where one is drawn."""
        if self._spans is None or function is None:
            return function
        return self._spans.around(name, function)

    # Opening

    def _inform(self, **changes: Any) -> None:
        info = replace(self._desk.info, **changes)
        self._desk = replace(self._desk, info=info)
        self._desks.clear()
        current.set(Place(info, 0, -1, info.seed))

    def is_sync(self, run: int) -> bool:
        """Whether the tasks of a pass never suspend."""
        return not self.is_async

    def return_to(self, task: Task) -> None:
        """Another worker has run in this process, which has one answer for torch's datasets."""
        self._told_torch = None
        self._tell_torch(self._desk.info, task.epoch)

    def _tell_torch(self, info: WorkerInfo, epoch: int) -> None:
        """Have torch's datasets see where they are."""
        if self._terms.in_process or self._terms.split not in (None, "worker"):
            return
        told = self._told_torch
        if told is None or told[0] is not info or told[1] != epoch:
            # As torch has it, another in each worker and each epoch.
            seed = _seeds.key_of(info.seed, "worker", epoch, info.id) >> 65
            torch_worker_info(info.id, info.num_proc, seed, info.source)
            self._told_torch = info, epoch

    def _desk_of(self, stream: int) -> Desk:
        """What the tasks of a stream have in common."""
        desk = self._desks.get(stream)
        if desk is None:
            assert self._streams is not None
            number, source = self._streams.number(stream), self._source
            if self._terms.split == "worker":
                source = self._streams.copy_of(number)
            info = replace(
                self._desk.info, id=number, num_proc=self._terms.num_streams, source=source
            )
            desk = self._desks[stream] = replace(self._desk, info=info, stream=number)
        return desk

    def _differ(self) -> None:
        """A replica that is a Prefetcher itself must not draw what its siblings draw."""
        draw_anew = getattr(self._source, "_become_replica", None)
        if draw_anew is not None:
            rank, world_size, _ = self._terms.share
            number = rank + world_size * self._number
            replica = replace(self._desk, stream=number).replica
            draw_anew(_seeds.key_of(self._terms.seed, "replica", *replica))

    async def _first_half(self) -> Any:
        init = self._program.worker_init_fn
        if init is None:
            return self._state
        if inspect.isgeneratorfunction(init):
            self._second_half = init(self._number)
            return await self._call(next, self._second_half, None)
        if inspect.isasyncgenfunction(init):
            self._second_half = init(self._number)
            return await anext(self._second_half, None)
        return await self._call(init, self._number)

    async def _begin_epoch(self, job: Job) -> None:
        began = (job.task.run, job.task.epoch)
        self._beginners += 1
        try:
            async with self._beginning:  # tasks pass in their order, the first having told
                if self._began != began:
                    while self._running:  # items of the epoch before, which are awaited
                        self._idle.clear()
                        await self._idle.wait()
                    self._tell_torch(job.desk.info, job.task.epoch)
                    await self._call(start_epoch, self._source, job.task.epoch)
                    self._began = began
        except BaseException as error:
            stop = _stop(job, "iterate", error)
            if isinstance(stop, _Stop):
                stop.ends = self._terms.split in ("shard", "worker")
            raise stop from None
        finally:
            self._beginners -= 1

    # Items

    async def _run_stream(self, job: Job) -> Outcome:
        task = job.task
        assert self._streams is not None
        stream = self._streams.open(task.run, task.epoch, task.stream)
        self._tell_torch(job.desk.info, task.epoch)
        resume = None if job.again is None else job.again.resume
        read = self._around("iterate", stream.read)
        chunk = await read(task.position, task.size, self._call, job.reading, resume)
        job.task = task._replace(position=chunk.first)
        job.values = items = chunk.items
        job.progress = chunk.progress
        if chunk.end is None or (items and not self._terms.drop_last):
            outcome = await self._finish(job, await self._gather(job))
            return outcome._replace(progress=chunk.progress)  # type: ignore[call-arg]
        if chunk.end.error is None:
            return Ended(task.stream)
        stream.report_error()
        job.values = ()
        ordinal = chunk.first + len(items)
        return Failed(job.error("iterate", chunk.end.error, ordinal), ends=True)

    async def _gather(self, job: Job) -> list[Any]:
        """The items of a batch, fetched and mapped, as many at once as the terms allow."""
        values = job.without_lost(job.values)
        if self._groups and job.fetches and (job.again is None or not job.again.singly):
            values = await self._fetch_many(job, values)
        if self._call is call_sync:
            return [self._item_now(job, offset, value) for offset, value in enumerate(values)]
        if self._slots is None:
            return [await self._item(job, offset, value) for offset, value in enumerate(values)]
        items = [self._in_slot(job, offset, value) for offset, value in enumerate(values)]
        if len(items) == 1:
            return [await items[0]]
        return await _all_or_none(items)

    async def _in_slot(self, job: Job, offset: int, value: Any) -> Any:
        assert self._slots is not None
        async with self._slots:
            return await self._item(job, offset, value)

    async def _item(self, job: Job, offset: int, value: Any) -> Any:
        self._check_open(job)
        stage: Stage = "fetch"
        with job.item(offset):
            if type(value) is Lost:
                return await self._failed(job, _lost(job, offset, value.error))
            try:
                if job.fetches:
                    value = await self._call(self._fetch, value)
                stage = "map"
                if self._map_fn is not None:
                    value = await self._call(self._map_fn, value)
                return value
            except SkipItem:
                return _Left(by_error=False)
            except BaseException as error:
                if was_cancelled(error):
                    raise
                return await self._failed(job, job.error(stage, error, job.key(offset)))

    def _item_now(self, job: Job, offset: int, value: Any) -> Any:
        """The same where nothing suspends: a coroutine an item is what quick ones would feel."""
        self._check_open(job)
        stage: Stage = "fetch"
        with job.item(offset):
            if type(value) is Lost:
                return drive(self._failed(job, _lost(job, offset, value.error)))
            try:
                if job.fetches:
                    value = checked(self._fetch, self._fetch(value))
                stage = "map"
                if self._map_fn is not None:
                    value = checked(self._map_fn, self._map_fn(value))
                return value
            except SkipItem:
                return _Left(by_error=False)
            except BaseException as error:
                return drive(self._failed(job, job.error(stage, error, job.key(offset))))

    def _check_open(self, job: Job) -> None:
        if self._closing():
            raise _Stop(job.error("fetch", RuntimeError("the Prefetcher is being closed")))

    async def _fetch_many(self, job: Job, keys: Sequence[Any]) -> Sequence[Any]:
        """What ``__getitems__`` gives for the batch; else the keys, to be fetched one by one."""
        if any(type(key) is Lost for key in keys):
            return keys
        fetch_many = self._around("fetch", self._source.__getitems__)
        with job.batch("group"):
            try:
                items = list(await self._call(fetch_many, list(keys)))
                self._check_count(items, keys)
            except BaseException as error:
                if self._program.on_error == "raise" or was_cancelled(error):
                    raise _stop(job, "fetch", error) from None
                return keys
        job.fetches = False
        return items

    def _check_count(self, items: Sequence[Any], keys: Sequence[Any]) -> None:
        if len(items) != len(keys):
            raise ValueError(
                f"__getitems__ of {type(self._source).__qualname__} gave {len(items)} results "
                f"for {len(keys)} keys: give exactly one for each, in their order"
            )

    async def _failed(self, job: Job, error: TaskError) -> Any:
        """What stands in for a failed item, as ``on_error`` says."""
        policy = self._program.on_error
        if policy == "raise":
            raise _Stop(error)
        if policy == "skip":
            return _Left(by_error=True)
        try:
            return await self._call(policy, error)
        except SkipItem:
            return _Left(by_error=True)
        except BaseException as raised:
            raise _stop(job, "on_error", raised, error.index) from None

    # The batch

    async def _finish(self, job: Job, items: list[Any]) -> Outcome:
        kept = [item for item in items if type(item) is not _Left]
        skipped = 0
        if len(kept) < len(items):
            skipped = sum(item.by_error for item in items if type(item) is _Left)
        if not kept:
            return Nothing(skipped)
        try:
            batch = await self._collate(job, kept) if self._collates else kept[0]
            try:
                return Made(skipped, self._outbox.pack(batch))
            except BaseException as error:
                if was_cancelled(error):
                    raise
                return await self._unshippable(job, skipped, error)
        except _Stop as stop:
            stop.skipped = skipped
            raise
        finally:
            if self._collates:
                self._outbox.discard()

    async def _collate(self, job: Job, items: list[Any]) -> Any:
        try:
            if self._program.collate_fn is None:
                return self._collate_fn(items)
            with job.batch("batch"):
                collated = items if self._terms.batched else items[0]
                return await self._call(self._collate_fn, collated)
        except BaseException as error:
            raise _stop(job, "collate", error) from None

    def _in_place(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same function, which finds the memory that the batch is delivered in."""
        if is_async_function(collate):  # while it waits, another batch discards what is not sent
            return collate

        @functools.wraps(collate)
        def collate_in_place(items: Any) -> Any:
            token = allocate.set(self._outbox.empty)
            try:
                return collate(items)
            finally:
                allocate.reset(token)

        return collate_in_place

    async def _unshippable(self, job: Job, skipped: int, error: BaseException) -> Outcome:
        if self._terms.batched or self._program.on_error == "raise":
            raise _stop(job, "result", error, None if self._terms.batched else job.key(0))
        other = await self._failed(job, job.error("result", error, job.key(0)))
        if type(other) is _Left:
            return Nothing(skipped + 1)
        try:
            return Made(skipped, self._outbox.pack(other))
        except BaseException as again:
            raise _stop(job, "on_error", again, job.key(0)) from None


def _stop(job: Job, stage: Stage, error: BaseException, index: Any = None) -> BaseException:
    """What to raise for an error that ends the task: our own cancellation passes as it is."""
    return error if was_cancelled(error) else _Stop(job.error(stage, error, index))


def _lost(job: Job, offset: int, error: BaseException) -> TaskError:
    return error if isinstance(error, TaskError) else job.error("fetch", error, job.key(offset))


async def _all_or_none(items: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all at once; when one raises, cancel the rest and wait for their end."""
    tasks = [asyncio.ensure_future(item) for item in items]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
