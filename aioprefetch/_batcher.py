"""Micro-batching: many callers with an item each, one function that takes lists.

    batcher(item) ──> waiting ──when full, or the oldest has waited──> running ──> each its own
                                                                                  answer

Items gather while as many batches run as may, so that under load batches are as large as they
may be, and without it no item waits longer than the time-out.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from ._config import check_number, check_seconds
from ._shared_pool import SharedPool
from ._source import is_async_function
from ._threads import Helper

Item = TypeVar("Item")
Answer = TypeVar("Answer")


_Batch = Sequence[tuple[asyncio.Future[Any], Any]]


class _Waiting(NamedTuple):
    item: Any
    due: float  # the loop's time at which it has waited long enough


class _Asker:
    """How the function is called. It does not know the batcher, which may be dropped."""

    def __init__(self, fn: Callable[[list[Any]], Any], pool: SharedPool | None) -> None:
        self._fn = fn
        self._pool = pool
        self._helper: Helper | None = None

    async def __call__(self, items: list[Any]) -> Any:
        if self._pool is not None:
            return await self._pool.run(self._fn, items)
        if is_async_function(self._fn):
            return await self._fn(items)
        if self._helper is None:
            self._helper = Helper("aioprefetch-batcher")
        answers = await self._helper.call(self._fn, items)
        return await answers if inspect.isawaitable(answers) else answers

    def stop(self) -> None:
        if self._helper is not None:
            self._helper.stop()


class Batcher(Generic[Item, Answer]):
    """Answers callers one by one, and asks a function for many at once.

    ``await batcher(item)`` gives what ``fn`` has at that item's place. A batch begins when
    ``batch_size`` items wait, or the oldest has waited for ``batch_timeout``, and fewer than
    ``concurrency`` batches run. A caller that is cancelled before its batch has begun is left out
    of it; one that is cancelled later loses its own answer alone.

    It may be used without being opened. ``async with`` and `aclose` answer those who wait, and
    then refuse more. It belongs to the event loop that uses it first.

    Parameters
    ----------
    fn
        Given a list of items, returns a list of as many answers; an exception in the place of
        one goes to its caller alone, one that is raised goes to all. Async, or else called on a
        thread of its own.
    batch_size
        Items a batch, at most.
    batch_timeout
        Seconds that an item waits for others, at most, while a batch may begin.
    concurrency
        Batches that may run at once. More than 1 needs an async ``fn`` or a pool.
    pool
        An open pool whose workers run ``fn``.

    Raises
    ------
    TypeError, ValueError
        An argument that cannot be meant.
    """

    def __init__(
        self,
        fn: Callable[
            [list[Item]],
            Collection[Answer | BaseException] | Awaitable[Collection[Answer | BaseException]],
        ],
        *,
        batch_size: int = 32,
        batch_timeout: float = 0.005,
        concurrency: int = 1,
        pool: SharedPool | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be a function of a list, not {fn!r}")
        if pool is not None and not isinstance(pool, SharedPool):
            raise TypeError(f"pool must be a pool of this package, or None, not {pool!r}")
        check_number("batch_size", batch_size, 1)
        check_seconds("batch_timeout", batch_timeout)
        check_number("concurrency", concurrency, 1)
        if concurrency > 1 and pool is None and not is_async_function(fn):
            raise ValueError(
                f"concurrency={concurrency} needs an async fn or a pool: one that is neither "
                "runs on one thread, batch after batch"
            )
        self._batch_size = batch_size
        self._batch_timeout = batch_timeout
        self._concurrency = concurrency
        self._asker = _Asker(fn, pool)
        # Batches begin in the middle of whichever call fills them, and are not that caller's.
        self._context = contextvars.copy_context()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: OrderedDict[asyncio.Future[Answer], _Waiting] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._finalizer = weakref.finalize(self, self._asker.stop)
        self._finalizer.atexit = False

    async def __call__(self, item: Item) -> Answer:
        """The answer to one item.

        Raises
        ------
        Exception
            What ``fn`` raised, or gave in this item's place.
        TypeError, ValueError
            ``fn`` did not return a list of as many answers as it was given items.
        RuntimeError
            The batcher is closed, or belongs to another event loop.
        """
        loop = self._on_its_loop()
        if self._closed:
            raise RuntimeError("the Batcher is closed, and takes no more items")
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting[answer] = _Waiting(item, loop.time() + self._batch_timeout)
        if len(self._waiting) in (1, self._batch_size):
            self._arrange()
        try:
            return await answer
        finally:
            answer.cancel()  # nobody waits, should the coroutine have been closed
            self._waiting.pop(answer, None)
            del answer  # an error knows this frame: it must not lead from there to itself

    def _on_its_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(
                "a Batcher belongs to the event loop that used it first: make one for each loop"
            )
        return loop

    def _arrange(self, now: float = 0.0) -> None:
        """Begin what is full or due by ``now``, and come back when the next will be.

        While something waits and a batch may begin there is a timer, set for the oldest or for
        one that has gone.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._running) < self._concurrency:
            due = next(iter(self._waiting.values())).due
            if due > now and len(self._waiting) < self._batch_size and not self._closed:
                assert self._loop is not None
                # It is told that time: the loop's clock may be a little behind its timers.
                self._timer = self._loop.call_at(due, self._arrange, due)
                break
            self._begin()

    def _begin(self) -> None:
        batch: list[tuple[asyncio.Future[Any], Any]] = []
        while self._waiting and len(batch) < self._batch_size:
            answer, waiting = self._waiting.popitem(last=False)
            batch.append((answer, waiting.item))
        assert self._loop is not None
        task = self._loop.create_task(_run(self._asker, batch), context=self._context.copy())
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its callers have it
        assert self._loop is not None
        self._arrange(self._loop.time())

    async def aclose(self) -> None:
        """Answer those who wait, and take no more items.

        Cancelling it ends the wait alone: batches go on, and their callers are answered.
        """
        self._on_its_loop()
        self._closed = True
        self._arrange()
        while self._running:
            await asyncio.wait(self._running)
        self._finalizer()

    async def __aenter__(self) -> Self:
        self._on_its_loop()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


async def _run(ask: _Asker, batch: _Batch) -> None:
    """Ask for the answers to a batch, and give each caller its own."""
    answers: list[Any] = []
    try:
        answers = _checked(await ask([item for _, item in batch]), len(batch))
    except BaseException as error:
        answers = [error] * len(batch)
        if not isinstance(error, Exception):
            raise
    finally:
        for (waiting, _), answer in zip(batch, answers, strict=True):
            _settle(waiting, answer)
        del batch, answers, waiting, answer  # an error knows this frame too


def _checked(answers: Any, count: int) -> list[Any]:
    if isinstance(answers, (str, bytes, Mapping, Set)) or not hasattr(answers, "__len__"):
        kind = type(answers).__name__
        raise TypeError(f"fn must return a list of as many answers as items, not {kind}")
    if len(answers) != count:
        raise ValueError(
            f"fn gave {len(answers)} answers to {count} items: give exactly one for each, in "
            "their order"
        )
    return list(answers)


def _settle(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():  # its caller has gone
        return
    if isinstance(answer, BaseException):
        waiting.set_exception(_own(answer))
    else:
        waiting.set_result(answer)


def _own(error: BaseException) -> BaseException:
    """An exception for one caller: whoever shares one shares what others add to it."""
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        told = RuntimeError(f"fn raised {type(error).__name__}")  # which means something else here
        told.__cause__ = error
        return told
    try:
        other = copy.copy(error)
    except Exception:  # what cannot be copied is shared
        return error
    return _alike(other, error) if type(other) is type(error) else error


def _alike(other: Exception, error: Exception) -> Exception:
    """Give a copy what a copy leaves out, or what its ``__init__`` has made of it."""
    other.args = error.args
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    other.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        other.__notes__ = list(error.__notes__)
    return other.with_traceback(error.__traceback__)
