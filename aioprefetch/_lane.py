"""One worker as the parent sees it: start, send, receive, death, end.

    keeper thread        launch ──> process: serve()
    event loop           channel ◄──────── frames ────────────► channel
                         pidfd   ◄──────── readable: dead
    keeper thread        bury: join the process, read the exit code, close the descriptors

A worker is dead when its pidfd is readable, and only then. The end of `serve` or of the
channel without it means: kill the worker's process group, and wait for the pidfd. What the
dead has written is read to its end before its death is told.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, Protocol

from . import _codec, _plain, _serve
from ._arena import Reader, Space
from ._exceptions import unpack_error
from ._memory import Shipment
from ._messages import (
    Again,
    Do,
    Failed,
    Goodbye,
    Hello,
    Made,
    Order,
    Refused,
    Release,
    Report,
    Settle,
    Task,
    Trim,
)
from ._page import CLAIMS, InHand
from ._payload import Parcel, Payload, Store, sent
from ._process import WorkerProcess
from ._stack import ask_for_stacks, is_stopped, read_stacks
from ._threads import Helper
from ._wire import Channel, Frame, Segment
from ._worker import Terms

OOM_SCORE_ADJ = "AIOPREFETCH_OOM_SCORE_ADJ"
_MAX_CHUNK = 256
_RECORDS = 4  # of what is in hand, for each item that may be: batches are made beside them
_MANAGER_GRACE = 1.0  # seconds that the thread of a dead worker's executor may take to end


class Hang(NamedTuple):
    """Why a worker is given up that is not dead."""

    item: InHand | None  # what it took too long for, or None when it does not begin any
    text: str


class LaneEvents(Protocol):
    """Whom a lane tells, always on the loop."""

    def lane_ready(self, lane: Lane, facts: Any) -> None: ...
    def lane_refused(self, lane: Lane, refused: Refused) -> None: ...
    def lane_reports(self, lane: Lane, report: Report) -> None: ...
    def lane_dead(self, lane: Lane) -> None: ...


class Lane:
    """What every way of talking to a worker has in common.

    Launched on the keeper thread, watched on the loop, buried on the keeper.

    Parameters
    ----------
    events
        Told of everything, on the loop.
    incarnation
        How many workers of this number there were before.
    """

    ship: Any = Shipment  # how the source travels to all workers
    store: Any = Store  # and how items do; None where there is no way but messages

    knows_hand = False  # whether it can be told what the worker is at work on

    def __init__(
        self,
        number: int,
        context: BaseContext,
        keeper: Helper,
        events: LaneEvents,
        incarnation: int = 0,
    ) -> None:
        self.number = number
        self.incarnation = incarnation
        self.ready = False
        self.hang: Hang | None = None  # why it is being killed
        self.refusal: BaseException | None = None  # what it said instead of hello
        self.stacks = ""  # that it left behind
        self.dead = False  # its process is
        self.buried = False
        self.exitcode: int | None = None
        self.hand: list[InHand] = []  # what it was at work on when it died
        self._keeper = keeper
        self._events = events
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = WorkerProcess(context)
        self.reader: Reader | None = None  # of the memory that its results come in
        self._ending = False  # told to end: then the end of its calls is no surprise

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it may be given work."""
        return self.ready and not self.dead and self.hang is None

    # On the keeper thread

    def launch(
        self, terms: Terms, worker_threads: int | None, shipment: Any, store: Store | None
    ) -> None:
        """Start the process; what fails is raised, with nothing left behind."""
        try:
            post = _serve.Post(
                self.number,
                self.incarnation,
                terms,
                worker_threads,
                _serve.depth + 1,
                oom_score_adj(),
            )
            self._launch(post, shipment, store)
        except BaseException:
            self.kill()
            self._process.join()
            self._close()
            self.close_watched()
            raise

    def _launch(self, post: _serve.Post, shipment: Any, store: Store | None) -> None:
        raise NotImplementedError

    def bury(self) -> None:
        """After the worker's death: join the process, read the exit code, close everything.

        All of it on the keeper, whether the loop runs or not, but for the descriptors that the
        loop watches: it lets go of them first.
        """
        if self.buried:
            return
        self.exitcode = self._process.join()
        self._close()
        self.buried = True
        try:
            if self._loop is None:
                raise RuntimeError("never attached")
            self._loop.call_soon_threadsafe(self._let_go)
        except RuntimeError:  # no loop, or closed
            self.close_watched()

    def _close(self) -> None:
        """Close what the loop does not watch."""

    def end_hung(self) -> None:
        """Kill it, having read where it is stuck."""
        self.kill()

    def close_watched(self) -> None:
        """Close what the loop watched, which is closed or has let go of it."""
        self._process.close()

    # On the loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch and to listen."""
        self._loop = loop
        if self._process.pidfd is not None and watches_descriptors(loop):
            loop.add_reader(self._process.pidfd, self._exited)
        else:
            threading.Thread(target=self._watch, name="aioprefetch-watch", daemon=True).start()

    def say(self, message: Settle | Release | Trim) -> None:
        """Tell the worker."""
        self._send(_codec.message(message))

    largest_chunk = _MAX_CHUNK  # tasks that one message may carry

    def give(self, orders: list[tuple[int, Task, Payload, Again | None]]) -> None:
        """Send tasks with their keys or items, in as few messages as these allow."""
        chunk: list[Order] = []
        for ticket, task, payload, again in orders:
            if len(chunk) >= self.largest_chunk:
                self._give(chunk)
                chunk = []
            order: Order = ticket, tuple(task), sent(payload)
            if again is not None:
                order = *order[:3], again
            if isinstance(payload, Parcel) and payload.segments:
                self._give(chunk)
                self._give([order], payload.segments)
                chunk = []
            else:
                chunk.append(order)
        self._give(chunk)

    def _give(self, orders: list[Order], segments: Sequence[Segment] = ()) -> None:
        if orders:
            self.offer(orders)
            self._send([*_codec.message(Do(orders)), *segments])

    def offer(self, orders: list[Order]) -> None:
        """The tasks are about to be sent, and nobody has claimed them."""

    def withdraw(self, ticket: int) -> bool:
        """Take back a task that has not been begun; False when it has, or may have been."""
        return False

    def begun(self, ticket: int) -> bool:
        """Whether the worker, dead by now, had begun a task."""
        return True

    def in_hand(self) -> list[InHand]:
        """What the worker is at work on now."""
        return []

    def listen(self) -> None:
        """Hear what it has said, before it is judged by what it has not."""

    def is_stopped(self) -> bool:
        """Whether the worker's process has been stopped."""
        return is_stopped(self.pid)

    def say_goodbye(self) -> None:
        """Let the worker finish what it has in hand, then end."""
        if not self._ending:
            self._ending = True
            self._send(_codec.message(Goodbye()))

    def _send(self, frame: list[Segment]) -> None:
        raise NotImplementedError

    def _hear(self, frame: Frame) -> None:
        if self.buried:  # with nobody to wait for it
            return
        message = _codec.decode(frame[:1])
        if type(message) is Report:
            self._events.lane_reports(self, self._received(message, frame[1:]))
        elif type(message) is Hello:
            self.ready = True
            self._events.lane_ready(self, message.facts)
        else:
            self._events.lane_refused(self, message)

    def _received(self, report: Report, segments: Sequence[Segment]) -> Report:
        done = [(ticket, self._unpacked(outcome, segments)) for ticket, outcome in report.done]
        return report._replace(done=done)

    def _unpacked(self, outcome: Any, segments: Sequence[Segment]) -> Any:
        if type(outcome) is bytes:
            return Made(0, _codec.receive(outcome, (), None))
        if type(outcome) is Made:
            return outcome._replace(payload=_codec.receive(outcome.payload, segments, self.reader))
        if type(outcome) is Failed:
            return outcome._replace(error=unpack_error(outcome.error))
        return outcome

    def _call_on_loop(self, function: Any, *args: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _exited(self) -> None:
        """The process is dead."""
        if not self.dead:
            self._detach()
            self._process.kill_group()
            self._keeper.post(self.bury)

    def _detach(self) -> None:
        """Read what the dead has written, and leave the loop."""
        self.dead = True
        if self._process.pidfd is not None and self._loop is not None:
            with suppress(NotImplementedError):
                self._loop.remove_reader(self._process.pidfd)

    def _let_go(self) -> None:
        if not self.dead:
            self._detach()
        self.close_watched()
        self._events.lane_dead(self)

    def _watch(self) -> None:
        self._process.wait(None)
        self._call_on_loop(self._exited)

    # Anywhere

    def hang_up(self) -> None:
        """The worker is told that nobody listens; safe in any thread and inside any lock."""
        self._ending = True

    def kill(self) -> None:
        """SIGKILL the worker and its group; returns at once, and does nothing to the dead."""
        if not self.dead:
            self._process.kill()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the death, off the loop."""
        return self.buried or self._process.wait(timeout)

    def free_at_exit(self) -> None:
        """At interpreter exit: nothing may keep the executor's manager waiting."""
        self._process.end_manager(_MANAGER_GRACE)


class ChannelLane(Lane):
    """A worker with a private channel, a deadman and a page that says what it has in hand."""

    _ends: _ParentEnds | None = None
    _space: Space | None = None
    knows_hand = True
    _begun = b""  # what was claimed when it died
    _channel: Channel | None = None
    _serve_over = False

    def _launch(self, post: _serve.Post, shipment: Shipment, store: Store | None) -> None:
        assert store is not None
        ends = self._ends = _ParentEnds()
        space = self._space = Space.create(_RECORDS * post.terms.concurrency)
        kit = _serve.Kit(
            post,
            channel=_serve.Descriptor(ends.theirs.fileno()),
            deadman=_serve.Descriptor(ends.deadman_theirs),
            arena=_serve.Share(space),
            items=_serve.Share(store.space),
            source=_serve.Descriptor(shipment.fd),
            extents=shipment.extents,
        )
        self._process.start(_serve.equip, kit, _serve.serve)
        ends.close_theirs()
        space.close_fd()
        self.reader = Reader(space)

    def _close(self) -> None:
        if self._ends is not None:
            self._ends.close_theirs()
            self._ends.close_deadman()
        if self._space is not None:
            self.hand = self._space.page.read()
            self.stacks = read_stacks(self._space)
            self._begun = self._space.page.begun()
            self._space.close_fd()
            if self.reader is not None:
                self.reader.abandon()
            self._space = self.reader = None

    def close_watched(self) -> None:
        super().close_watched()
        if self._ends is not None:
            self._ends.sock.close()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._ends is not None
        self._channel = Channel(loop, self._ends.sock, self._hear, self._ended)
        super().attach(loop)
        self._process.first.add_done_callback(self._served)

    def _send(self, frame: list[Segment]) -> None:
        if self._channel is not None and not self.dead:
            self._channel.send(frame)

    def say_goodbye(self) -> None:
        if self._space is not None:
            self._space.page.shut()
        super().say_goodbye()

    def offer(self, orders: list[Order]) -> None:
        if self._space is None:  # buried
            return
        for ticket, *_ in orders:
            self._space.page.offer(ticket)

    def withdraw(self, ticket: int) -> bool:
        return self._space is not None and self._space.page.withdraw(ticket)

    def begun(self, ticket: int) -> bool:
        return bool(self._begun[ticket % CLAIMS])

    def in_hand(self) -> list[InHand]:
        return [] if self._space is None else self._space.page.read()

    def listen(self) -> None:
        if self._channel is not None and not self.dead:
            self._channel.drain()

    def end_hung(self) -> None:
        if self._space is not None and self._process.pidfd is not None and not self.is_stopped():
            ask_for_stacks(self._space, self._process.pidfd.send_signal)
        self.kill()

    def _served(self, _: Future[None]) -> None:
        self._serve_over = True
        self._call_on_loop(self._ended)

    def _ended(self) -> None:
        """`serve` or the channel ended: a worker that was told to end will, any other must."""
        if self.dead or self.buried:
            return
        if not self._ending:
            self.kill()
        elif self._serve_over:
            self._keeper.post(self._process.release)

    def _detach(self) -> None:
        if self._channel is not None:
            self._channel.drain()
            self._channel.detach()
        super()._detach()

    def hang_up(self) -> None:
        super().hang_up()
        if self._ends is not None:
            with suppress(OSError):
                self._ends.sock.shutdown(socket.SHUT_RDWR)


class SubmitLane(Lane):
    """The same where a loop cannot watch descriptors: every message is a call. Slower."""

    ship: Any = _plain.Copies
    store = None
    largest_chunk = 1  # a call has one answer

    def _launch(self, post: _serve.Post, shipment: _plain.Copies, store: Store | None) -> None:
        kit = _plain.PlainKit(post, shipment)
        self._process.start(_plain.equip, kit, _plain.open_up)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        super().attach(loop)
        self._process.first.add_done_callback(self._answered)

    def _send(self, frame: list[Segment]) -> None:
        if not self.dead:
            with suppress(RuntimeError):  # broken or shut down: its death is told
                portable = [bytearray(segment) for segment in frame]
                call = self._process.submit(_plain.answer, portable)
                call.add_done_callback(self._answered)

    def _answered(self, call: Future[Any]) -> None:
        if call.cancelled() or call.exception() is not None:  # the process broke down
            return
        if call.result() is None:
            self._keeper.post(self._process.release)
        elif call.result():
            self._call_on_loop(self._hear_alive, call.result())

    def _hear_alive(self, frame: Frame) -> None:
        if not self.dead:
            self._hear(frame)


def oom_score_adj() -> int | None:
    """What the environment asks workers to add to their chance of being killed first.

    Raises
    ------
    ValueError
        It is not a whole number from -1000 to 1000.
    """
    score = os.environ.get(OOM_SCORE_ADJ)
    if not score:
        return None
    try:
        number = int(score)
    except ValueError:
        number = 1001
    if not -1000 <= number <= 1000:
        raise ValueError(
            f"{OOM_SCORE_ADJ} must be a whole number from -1000 to 1000, not {score!r}"
        )
    return number


def watches_descriptors(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop has ``add_reader``; Windows' default one has not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            loop.add_reader(ours, lambda: None)
        except NotImplementedError:
            return False
        loop.remove_reader(ours)
    return True


class _Socket(socket.socket):
    """A socket that an event loop may still watch when both are dropped: closed without a word."""

    def __del__(self) -> None:
        self.close()


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
    # Closed, never shut down: a shutdown would reach the worker of the parent.
    for ends in list(_parent_ends):
        ends.sock.close()
        ends.close_deadman()
    _parent_ends.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
