"""The pool of ``num_proc=0``: the same work on one background thread of this process.

For debuggers and tiny jobs. Synchronous functions run on the thread; asynchronous ones are
awaited on the caller's loop. Nothing is pickled, and errors keep the live original.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import warnings
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ._errors import PoolBroken, WorkerStartError, describe_error
from ._live import LiveOutbox
from ._memory import SOME_MEMORY, total
from ._messages import Again, Outcome, Task
from ._meter import Meter
from ._payload import Live, Payload
from ._program import Program, Terms, drive
from ._request import Request
from ._source import Facts, Split, is_async_function, was_cancelled
from ._threads import Helper
from ._worker import Worker


class InlinePool:
    """One worker, in this process.

    Parameters
    ----------
    shutdown_timeout
        Seconds that closing waits for the call that the thread is in.
    """

    def __init__(
        self, program: Program, terms: Terms, shutdown_timeout: float, meter: Meter
    ) -> None:
        self.broken: PoolBroken | None = None
        self.first_run = 0
        self.memory = SOME_MEMORY
        self.worth = 1
        self._hold = 1
        self._shutdown_timeout = shutdown_timeout
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._thread = Helper("aioprefetch-worker")
        self._context = contextvars.copy_context()
        hop = self._hop if terms.is_async else None
        self._worker = Worker(
            program, terms, 0, outbox=LiveOutbox(), call=hop, closing=self._is_closing
        )
        self._queue: deque[Request] = deque()
        self._active = 0  # tasks that drain the queue
        self._running: set[asyncio.Task[None]] = set()
        self._closing = False
        self._closed: asyncio.Task[None] | None = None

    async def start(self) -> Facts | None:
        self.memory = await self._thread.call(total) or SOME_MEMORY
        try:
            facts: Facts | None = await self._do(self._worker.make_source())
            if self._worker.is_async:
                self._worker.call_through(self._hop)
            await self._do(self._worker.open())
            return facts
        except BaseException as error:
            if was_cancelled(error):
                raise
            raise WorkerStartError(
                "the background thread failed while running the source's function, reset_state() "
                f"or worker_init_fn: {describe_error(error)}"
            ) from error

    def settle(
        self, split: Split | None, num_streams: int, hold: int, window: int, *, is_async: bool
    ) -> None:
        self._hold = max(1, hold - 1) if self._worker.is_async else 1
        self._worker.settle(split, num_streams)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    def pack(self, values: Sequence[Any]) -> Payload:
        return Live(values)

    def store(self, payload: Payload) -> Payload:
        return payload

    def helper(self) -> Helper:
        return self._thread

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def forget(self, run: int) -> None:
        kept = [request for request in self._queue if request.task.run != run]
        self._queue.clear()
        self._queue.extend(kept)
        if not self._closing:
            self._spawn(self._release(run))

    def close(self) -> asyncio.Future[None]:
        if self._closed is None:
            self._closing = True
            self._queue.clear()
            self._closed = self._loop.create_task(self._end())
        return self._closed

    def release(self) -> None:
        self._thread.stop()

    def _is_closing(self) -> bool:
        return self._closing

    def kill(self) -> None:
        self._closing = True
        self._queue.clear()
        self._thread.stop()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def abandon(self) -> None:
        self.kill()

    def _cancel(self) -> None:
        for task in self._running:
            task.cancel()

    def feed(self) -> None:
        if not self._closing:
            for _ in range(min(len(self._queue), self._hold - self._active)):
                self._active += 1
                self._spawn(self._drain())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _drain(self) -> None:
        # One task for many requests: a loop that ends cancels the tasks it finds, and one that
        # was made by the end of another would be left.
        try:
            while self._queue and not self._closing:
                await self._run(self._queue.popleft())
                await asyncio.sleep(0)  # a function that awaits nothing must not keep the loop
        finally:
            self._active -= 1

    async def _run(self, request: Request) -> None:
        values, resume = request.payload.open(), request.planned.resume
        again = None if resume is None else Again({}, False, resume)
        try:
            outcome: Outcome = await self._do(self._timed(request.task, values, again))
        except asyncio.CancelledError as error:  # by the loop's end, or by the user's function
            self._settle(request, self._worker.failed(request.task, values, error))
            raise
        self._settle(request, outcome)

    async def _timed(self, task: Task, values: Sequence[Any], again: Again | None) -> Outcome:
        began = time.monotonic()
        try:
            return await self._worker.run(1, task, values, again)
        finally:
            self._meter.work(time.monotonic() - began, 1)

    def _settle(self, request: Request, outcome: Outcome) -> None:
        if not self._closing:
            if self._meter.trace is not None:
                self._meter.trace.worked(0, self._worker.take_spans() or [])
            request.settle(outcome)

    async def _release(self, run: int) -> None:
        await self._do(self._worker.release(run))

    async def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a step of the worker: here when it awaits, on the thread when it does not."""
        if self._worker.is_async:
            return await work
        done = self._thread.call(self._context.run, drive, work)
        if done.cancelled():  # the thread has been stopped
            work.close()
        return await done

    async def _hop(self, function: Any, *args: Any) -> Any:
        """Call a function of the user's where it belongs: the loop, or the thread."""
        if is_async_function(function):
            return await function(*args)
        context = contextvars.copy_context()
        return await self._thread.call(context.run, function, *args)

    async def _end(self) -> None:
        """Let what runs finish, then the worker's second half; warn of what is stuck."""
        if self._worker.is_async:
            self._cancel()
        ending = self._loop.create_task(self._finish())
        done, _ = await asyncio.wait([ending], timeout=self._shutdown_timeout)
        if not done:
            ending.cancel()
            warnings.warn(
                f"the background thread is still in {self._thread.where()} after "
                f"{self._shutdown_timeout} s; it is left behind",
                ResourceWarning,
                stacklevel=2,
            )

    async def _finish(self) -> None:
        if self._running:
            await asyncio.wait(self._running)
        with suppress(asyncio.CancelledError):  # killed
            await self._do(self._worker.close())
