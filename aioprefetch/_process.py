"""A worker's process: an executor of one, started, waited for, killed and joined.

The executor owns the process and does nothing else; the process has a pidfd, readable when
it is dead, whatever its descendants hold.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import _ResultItem
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from typing import Any

from ._memory import close_quietly

_start_lock = threading.Lock()


def _new_start_lock() -> None:
    global _start_lock
    _start_lock = threading.Lock()  # a forked worker was forked inside of it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_start_lock)


class PidFd:
    """A descriptor that is readable once its process is dead.

    A loop may still watch it when both are dropped: then it is closed without a word.
    """

    _fd = -1

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:  # dead, and collected by the executor or the fork server
            self._fd = os.eventfd(1)

    def fileno(self) -> int:
        return self._fd

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        close_quietly(fd)

    def __del__(self) -> None:
        self.close()


class _Context:
    """A multiprocessing context that remembers the process it made."""

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self.process: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        self.process = self._context.Process(*args, **kwargs)  # type: ignore[attr-defined]
        return self.process


class WorkerProcess:
    """One process, made by ``start`` and unmade by ``join``; both on the keeper thread."""

    def __init__(self, context: BaseContext) -> None:
        self._context: Any = _Context(context)
        self._executor: ProcessPoolExecutor | None = None
        self._manager: threading.Thread | None = None
        self._first: Future[Any] | None = None
        self._joined = False
        self._pid: int | None = None
        self.pidfd: PidFd | None = None

    @property
    def pid(self) -> int | None:
        process = self._context.process
        if process is not None:
            self._pid = process.pid
        return self._pid

    def start(self, initializer: Callable[..., None], kit: Any, call: Callable[[], Any]) -> None:
        """Start it, with a kit for the initializer and a first call to run."""
        executor = self._executor = ProcessPoolExecutor(
            1, mp_context=self._context, initializer=initializer, initargs=(kit,)
        )
        method = self._context.get_start_method()
        if method == "forkserver":
            _preload()
        with _starting(method):
            self._first = executor.submit(call)
        self._manager = getattr(executor, "_executor_manager_thread", None)
        if hasattr(os, "pidfd_open"):
            self.pidfd = PidFd(self._context.process.pid)

    @property
    def first(self) -> Future[Any]:
        """The future of the first call."""
        assert self._first is not None
        return self._first

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Another call, behind those before it."""
        assert self._executor is not None
        return self._executor.submit(function, *args)

    def release(self) -> None:
        """Its calls are done: let the process end by itself."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def join(self) -> int | None:
        """Wait for the executor's end; gives the exit code.

        The process is dead or has been released. Only now is its exit code known for sure.
        """
        executor, self._executor = self._executor, None
        if executor is not None:
            self._wake_manager(executor)
            executor.shutdown(wait=False)
            if self._manager is not None:
                self._manager.join()
        self._joined = True
        return self._forget_process()

    def _forget_process(self) -> int | None:
        # Its pipes, and the manager's queues, live as long as what refers to them.
        process, self._context.process = self._context.process, None
        self._manager = self._first = None
        exitcode: int | None = None
        with suppress(ValueError, AssertionError, AttributeError):
            exitcode = process.exitcode
            process.close()
        return exitcode

    def end_manager(self, timeout: float) -> None:
        """Free the executor's manager of a process that is dead, and see it end.

        At interpreter exit the stdlib wakes every manager, and stumbles over one that is just
        closing what it is woken by.
        """
        executor, manager = self._executor, self._manager  # the keeper may be joining it
        if executor is not None:
            self._wake_manager(executor)
        if manager is not None:
            manager.join(timeout)

    def _wake_manager(self, executor: ProcessPoolExecutor) -> None:
        # A grandchild that left the group holds the pipes open by which the manager learns of
        # the death; a made-up result wakes it.
        if self._first is not None and not self._first.done():
            with suppress(Exception):
                item = _ResultItem(0, exception=RuntimeError("the worker is dead"))
                executor._result_queue.put(item)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the death, off the loop."""
        if self._joined or self.pid is None:
            return True
        with suppress(OSError, ValueError):
            awaited: Any = self.pidfd or self._context.process.sentinel
            return bool(wait_for([awaited], timeout))
        return True

    def kill(self) -> None:
        """SIGKILL it and its group; returns at once."""
        if self._joined or self.pid is None:
            return
        self.kill_group()
        with suppress(OSError, ValueError, AttributeError):
            if self.pidfd is not None:
                self.pidfd.send_signal(signal.SIGKILL)
            else:
                self._context.process.kill()

    def kill_group(self) -> None:
        """SIGKILL what it has started and left in its group."""
        if self.pid is not None and hasattr(os, "killpg"):
            with suppress(OSError):  # not yet a group, or gone
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.pidfd is not None:
            self.pidfd.close()


def _preload() -> None:
    # What every worker imports is imported once, in the fork server, before it serves; unless
    # the user has said what to preload. (Its default, the main module, it does not import.)
    from multiprocessing import forkserver  # which not every platform has

    if forkserver._forkserver._preload_modules == ["__main__"]:  # type: ignore[attr-defined]
        forkserver.set_forkserver_preload(["aioprefetch._serve"])


@contextmanager
def _starting(method: str) -> Iterator[None]:
    """Around the start of a process: what the stdlib does there that does not suit us."""
    with ExitStack() as stack:
        stack.enter_context(_start_lock)
        stack.enter_context(_main_without_file())
        if method == "fork":
            # Our own warning has said it; the stdlib's would say it for each worker.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "This process.*multi-threaded", DeprecationWarning)
        yield


@contextmanager
def _main_without_file() -> Iterator[None]:
    # A child imports the parent's main module from its file. A script from standard input
    # names one that does not exist, and the child would fail on it.
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if main is None or file is None or os.path.exists(file):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file
