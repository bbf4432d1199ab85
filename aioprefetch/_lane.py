"""One worker as the parent sees it: start, send, receive, death, end.

    keeper thread        launch ──> executor of one worker ──> process: serve()
    event loop           channel ◄──────── frames ────────────► channel
                         pidfd   ◄──────── readable: dead
    keeper thread        bury: join the executor, read the exit code, close the descriptors

A worker is dead when its pidfd is readable, and only then. The end of `serve` or of the
channel without it means: kill the worker's process group, and wait for the pidfd. What the
dead has written is read to its end before its death is told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import _ResultItem
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait as wait_for
from multiprocessing.context import BaseContext
from typing import Any, Protocol

from . import _codec, _serve
from ._arena import InHand, Page, Shipment
from ._messages import Do, Done, Goodbye, Hello, Made, Refused, Release, Settle, Task
from ._threads import Helper
from ._wire import Channel, Frame
from ._worker import Terms


class LaneEvents(Protocol):
    """Whom a lane tells, always on the loop."""

    def lane_ready(self, lane: Lane, facts: Any) -> None: ...
    def lane_refused(self, lane: Lane, refused: Refused) -> None: ...
    def lane_done(self, lane: Lane, ticket: int, outcome: Any) -> None: ...
    def lane_dead(self, lane: Lane) -> None: ...


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


class _Socket(socket.socket):
    """A socket that an event loop may still watch when both are dropped: closed without a word."""

    def __del__(self) -> None:
        self.close()


class _PidFd:
    """The same of a pidfd."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


_start_lock = threading.Lock()
_parent_ends: weakref.WeakSet[_ParentEnds] = weakref.WeakSet()


class _ParentEnds:
    """The parent's side of a lane; a forked child must not hold it."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.sock = _Socket(fileno=ours.detach())
        self.deadman, self.deadman_theirs = os.pipe()
        _parent_ends.add(self)

    def close_theirs(self) -> None:
        self.theirs.close()
        if self.deadman_theirs >= 0:
            os.close(self.deadman_theirs)
            self.deadman_theirs = -1

    def close_deadman(self) -> None:
        if self.deadman >= 0:
            os.close(self.deadman)
            self.deadman = -1


def _leave_to_parent() -> None:
    global _start_lock
    _start_lock = threading.Lock()  # a forked worker was forked inside of it
    # Closed, never shut down: a shutdown would reach the worker of the parent.
    for ends in list(_parent_ends):
        ends.sock.close()
        with suppress(OSError):
            os.close(ends.deadman)
        ends.deadman = -1
    _parent_ends.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


class Lane:
    """One worker: launched on the keeper thread, watched on the loop, buried on the keeper.

    Parameters
    ----------
    events
        Told of everything, on the loop.
    """

    def __init__(self, number: int, keeper: Helper, events: LaneEvents) -> None:
        self.number = number
        self.ready = False
        self.dead = False  # its pidfd is readable
        self.buried = False
        self.exitcode: int | None = None
        self._keeper = keeper
        self._events = events
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends: _ParentEnds | None = None
        self._page: Page | None = None
        self._pidfd: _PidFd | None = None
        self._process: Any = None
        self._executor: ProcessPoolExecutor | None = None
        self._manager: threading.Thread | None = None
        self._serving: Future[None] | None = None
        self._channel: Channel | None = None
        self._ending = False  # told to end: then the end of serve or channel is no surprise
        self.hand: list[InHand] = []  # what it was at work on when it died

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    # On the keeper thread

    def launch(
        self, context: BaseContext, terms: Terms, worker_threads: int | None, shipment: Shipment
    ) -> None:
        """Start the process; what fails is raised, with nothing left behind."""
        recording = _Context(context)
        try:
            self._ends = _ParentEnds()
            self._page = Page.create(terms.concurrency)
            kit = _serve.Kit(
                number=self.number,
                terms=terms,
                worker_threads=worker_threads,
                depth=_serve.depth + 1,
                channel=_serve.descriptor(self._ends.theirs.fileno()),
                deadman=_serve.descriptor(self._ends.deadman_theirs),
                page=_serve.descriptor(self._page.fd),
                page_records=self._page.records,
                source=_serve.descriptor(shipment.fd),
                extents=shipment.extents,
            )
            self._start(recording, kit)
            self._pidfd = _open_pidfd(self._process.pid)
        except BaseException:
            self._process = recording.process
            self.kill()
            self._join()
            self._close()
            self.close_watched()
            raise
        self._ends.close_theirs()

    def _start(self, recording: _Context, kit: _serve.Kit) -> None:
        context: Any = recording
        self._executor = ProcessPoolExecutor(
            1, mp_context=context, initializer=_serve.equip, initargs=(kit,)
        )
        with _starting(recording.get_start_method()):
            self._serving = self._executor.submit(_serve.serve)
        self._process = recording.process
        self._manager = getattr(self._executor, "_executor_manager_thread", None)

    def bury(self) -> None:
        """After the worker's death: join the executor, read the exit code, close everything.

        All of it on the keeper, whether the loop runs or not, but for the two descriptors that
        the loop watches: it lets go of them first.
        """
        if self.buried:
            return
        self._join()
        self._close()
        self.buried = True
        try:
            if self._loop is None:
                raise RuntimeError("never attached")
            self._loop.call_soon_threadsafe(self._let_go)
        except RuntimeError:  # no loop, or closed
            self.close_watched()

    def _join(self) -> None:
        executor, self._executor = self._executor, None
        if executor is None:
            return
        self._free_manager(executor)
        executor.shutdown(wait=False)
        if self._manager is not None:
            self._manager.join()
        if self._process is not None:
            with suppress(ValueError, AssertionError):
                self.exitcode = self._process.exitcode

    def _free_manager(self, executor: ProcessPoolExecutor) -> None:
        # A grandchild that left the group holds the pipes open by which the executor's
        # manager learns of the death; a made-up result wakes it.
        if self._serving is not None and not self._serving.done():
            with suppress(Exception):
                item = _ResultItem(0, exception=RuntimeError("the worker is dead"))
                executor._result_queue.put(item)

    def _close(self) -> None:
        if self._ends is not None:
            self._ends.close_theirs()
            self._ends.close_deadman()
        if self._page is not None:
            self.hand = self._page.read()
            self._page.close()

    def close_watched(self) -> None:
        """Close what the loop watched, which is closed or has let go of it."""
        if self._ends is not None:
            self._ends.sock.close()
        if self._pidfd is not None:
            self._pidfd.close()

    # On the loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch and to listen."""
        assert self._ends is not None
        assert self._serving is not None
        self._loop = loop
        self._channel = Channel(loop, self._ends.sock, self._hear, self._ended)
        if self._pidfd is not None:
            loop.add_reader(self._pidfd, self._exited)
        else:
            threading.Thread(target=self._watch, name="aioprefetch-watch", daemon=True).start()
        self._serving.add_done_callback(self._served)

    def say(self, message: Settle | Release) -> None:
        self._send(_codec.encode(message))

    def give(self, ticket: int, task: Task, payload: _codec.Payload) -> None:
        """Send a task with its keys or items."""
        segments = payload.segments if isinstance(payload, _codec.Parcel) else ()
        self._send([*_codec.encode(Do(ticket, task)), *segments])

    def say_goodbye(self) -> None:
        """Let the worker finish what it has in hand, then end."""
        if not self._ending:
            self._ending = True
            self._send(_codec.encode(Goodbye()))

    def _send(self, frame: Frame) -> None:
        if self._channel is not None and not self.dead:
            self._channel.send(frame)

    def _hear(self, frame: Frame) -> None:
        message = _codec.decode(frame[:1])
        if type(message) is Done:
            outcome = message.outcome
            if type(outcome) is Made:
                outcome = outcome._replace(payload=_codec.Parcel(frame[1:]))
            self._events.lane_done(self, message.ticket, outcome)
        elif type(message) is Hello:
            self.ready = True
            self._events.lane_ready(self, message.facts)
        else:
            self._events.lane_refused(self, message)

    def _served(self, _: Future[None]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        """`serve` or the channel ended: a worker that was told to end will, any other must."""
        if self.dead:
            return
        if not self._ending:
            self.kill()
        elif self._serving is not None and self._serving.done():
            self._keeper.post(self._release)

    def _release(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _exited(self) -> None:
        """The pidfd is readable."""
        if not self.dead:
            self._detach()
            self._kill_group()
            self._keeper.post(self.bury)

    def _detach(self) -> None:
        """The worker is dead: read what it has written, and leave the loop."""
        assert self._loop is not None
        assert self._channel is not None
        self.dead = True
        self._channel.drain()
        self._channel.detach()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)

    def _let_go(self) -> None:
        if not self.dead:
            self._detach()
        self.close_watched()
        self._events.lane_dead(self)

    def _watch(self) -> None:
        wait_for([self._process.sentinel])
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._exited)

    # Anywhere

    def hang_up(self) -> None:
        """The worker reads the end of its channel; safe in any thread and inside any lock."""
        self._ending = True
        if self._ends is not None:
            with suppress(OSError):
                self._ends.sock.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """SIGKILL the worker and its group; returns at once, and does nothing to the dead."""
        if self.dead or self.buried or self._process is None:
            return
        self._kill_group()
        with suppress(OSError, ValueError, AttributeError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd.fileno(), signal.SIGKILL)
            else:
                self._process.kill()

    def _kill_group(self) -> None:
        pid = self.pid
        if pid is not None and hasattr(os, "killpg"):
            with suppress(OSError):  # not yet a group, or gone
                os.killpg(pid, signal.SIGKILL)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the death, off the loop."""
        if self.buried or self._process is None:
            return True
        with suppress(OSError, ValueError):
            awaited: Any = self._pidfd or self._process.sentinel
            return bool(wait_for([awaited], timeout))
        return True

    def free_at_exit(self) -> None:
        """At interpreter exit: nothing may keep the executor's manager waiting."""
        if self._executor is not None:
            self._free_manager(self._executor)


def _open_pidfd(pid: int) -> _PidFd | None:
    return _PidFd(pid) if hasattr(os, "pidfd_open") else None


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
