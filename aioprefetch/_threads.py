"""Threads of the parent: calls that may block, one after another, off the loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

log = logging.getLogger("aioprefetch")

_Calls = SimpleQueue[Callable[[], None] | None]


class Helper:
    """A daemon thread that runs calls in their order.

    `post` may be used anywhere, in a finalizer or inside any lock: the queue is reentrant
    and the thread has been there from the start.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def where(self) -> str:
        """The line of code that the thread is at, for a warning that it is stuck there."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "a call"
        code = frame.f_code
        return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"

    def post(self, function: Callable[..., None], *args: Any) -> None:
        self._calls.put(lambda: function(*args))

    def stop(self) -> None:
        """End the thread once the calls posted before are done."""
        self._stopped = True
        self._calls.put(None)

    def finish(self, timeout: float) -> None:
        """Wait for the end of a thread that is being stopped."""
        self._thread.join(timeout)

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a call; the future, of the running loop, takes whatever it returns or raises.

        Once the thread is stopped, the future is cancelled.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._stopped:
            future.cancel()
        else:
            self._calls.put(partial(_work, loop, future, function, args))
        return future


def _work(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    result, error = None, None
    try:
        result = function(*args)
    except BaseException as raised:
        error = raised
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_settle, future, result, error)
    # The traceback of an error leads to this frame, which must not lead back to the error.
    del future, function, args, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled by whoever waited
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # which a future refuses
        wrapped = RuntimeError("coroutine raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        try:
            call()
        except Exception:  # others wait for what comes after it
            log.exception("a call on a thread of its own failed")
        del call  # what it holds must not live until the next
