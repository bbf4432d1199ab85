"""Micro-batching: many callers with an item each, one function that takes lists.

    batcher(item) ──> waiting ──when full, or the oldest has waited──> running ──> each its own
                                                                                  answer

Items gather while a batch runs, so that under load batches are as large as they may be, and
without it no item waits longer than the time-out.
"""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from ._config import check_number, check_seconds
from ._shared_pool import SharedPool
from ._source import is_async_function
from ._threads import Helper

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Answers callers one by one, and asks a function for many at once.

    ``await batcher(item)`` gives what ``fn`` has at that item's place. Batches run one after
    another; a batch begins when ``batch_size`` items wait, or the oldest has waited for
    ``batch_timeout``, and none is running. A caller that is cancelled before its batch has begun
    is left out of it.

    Parameters
    ----------
    fn
        Given a list of items, returns a list of as many answers; an exception in the place of
        one goes to its caller alone, one that is raised goes to all. Async, or else called on a
        thread of its own.
    batch_size
        Items a batch, at most.
    batch_timeout
        Seconds that an item waits for others, at most, while no batch runs.
    pool
        An open pool whose workers run ``fn``.

    Raises
    ------
    TypeError, ValueError
        An argument that cannot be meant.
    """

    def __init__(
        self,
        fn: Callable[[list[Item]], Sequence[Answer | BaseException]]
        | Callable[[list[Item]], Awaitable[Sequence[Answer | BaseException]]],
        *,
        batch_size: int = 32,
        batch_timeout: float = 0.005,
        pool: SharedPool | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a function of a list, not {fn!r}")
        if pool is not None and not isinstance(pool, SharedPool):
            raise TypeError(f"pool must be a pool of this package, or None, not {pool!r}")
        check_number("batch_size", batch_size, 1)
        check_seconds("batch_timeout", batch_timeout)
        self._fn: Any = fn
        self._batch_size = batch_size
        self._batch_timeout = batch_timeout
        self._pool = pool
        self._loop: asyncio.AbstractEventLoop | None = None
        self._helper: Helper | None = None
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def __call__(self, item: Item) -> Answer:
        """The answer to one item.

        Raises
        ------
        Exception
            What ``fn`` raised, or gave in this item's place.
        RuntimeError
            The batcher is closed, or belongs to another event loop.
        """
        loop = self._check_loop()
        if self._closed:
            raise RuntimeError("the Batcher is closed, and takes no more items")
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, answer))
        if len(self._waiting) >= self._batch_size:
            self._begin()
        elif self._timer is None and self._running is None:
            self._timer = loop.call_later(self._batch_timeout, self._begin)
        return await answer

    def _check_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("a Batcher belongs to the event loop that used it first")
        return loop

    def _begin(self) -> None:
        """Begin a batch of what waits, unless one is running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running is not None:
            return
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self._batch_size:
            item, answer = self._waiting.popleft()
            if not answer.done():  # its caller has not gone
                batch.append((item, answer))
        if batch:
            assert self._loop is not None
            self._running = self._loop.create_task(self._run(batch))
            self._running.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running = None
        if self._waiting:  # they have waited as long as a batch took
            self._begin()

    async def _run(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        items = [item for item, _ in batch]
        try:
            answers = self._checked(await self._ask(items), items)
        except BaseException as error:
            _fail([answer for _, answer in batch], error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, waiting), answer in zip(batch, answers, strict=True):
            if waiting.done():
                continue
            if isinstance(answer, BaseException):
                waiting.set_exception(_raisable(answer))
            else:
                waiting.set_result(answer)

    async def _ask(self, items: list[Item]) -> Any:
        if self._pool is not None:
            return await self._pool.run(self._fn, items)
        if is_async_function(self._fn):
            return await self._fn(items)
        if self._helper is None:
            self._helper = Helper("aioprefetch-batcher")
            weakref.finalize(self, self._helper.stop).atexit = False
        return await self._helper.call(self._fn, items)

    @staticmethod
    def _checked(answers: Any, items: list[Item]) -> Sequence[Answer | BaseException]:
        try:
            count = len(answers)
        except TypeError:
            raise TypeError(
                f"fn must return a list of as many answers as items, not {type(answers).__name__}"
            ) from None
        if count != len(items):
            raise ValueError(
                f"fn gave {count} answers to {len(items)} items: give exactly one for each, in "
                "their order"
            )
        return cast(Sequence[Answer | BaseException], answers)

    async def aclose(self) -> None:
        """Answer those who wait, and take no more items; it takes as long as ``fn`` does."""
        self._check_loop()
        self._closed = True
        self._begin()
        while self._running is not None:
            await asyncio.wait([self._running])
            await asyncio.sleep(0)  # the next begins when the last has been let go of
        if self._helper is not None:
            self._helper.stop()

    async def __aenter__(self) -> Self:
        self._check_loop()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _fail(answers: list[asyncio.Future[Any]], error: BaseException) -> None:
    """Give all callers the error, each one of its own: a traceback grows where it is raised."""
    for answer in answers:
        if not answer.done():
            answer.set_exception(_raisable(_copied(error)))


def _copied(error: BaseException) -> BaseException:
    try:
        other = copy.copy(error)
    except Exception:  # what cannot be copied is shared
        return error
    if type(other) is not type(error):
        return error
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__suppress_context__ = error.__suppress_context__
    return other.with_traceback(error.__traceback__)


def _raisable(error: BaseException) -> BaseException:
    """The error, or what says it in words where it would be mistaken for another thing."""
    if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)) and not isinstance(
        error, StopIteration
    ):
        return error
    told = RuntimeError(f"fn raised {type(error).__name__}")
    told.__cause__ = error
    return told
