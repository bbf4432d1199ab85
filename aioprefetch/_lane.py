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
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, Protocol

from . import _codec, _serve
from ._arena import Reader
from ._exceptions import unpack_error
from ._messages import (
    Again,
    Cancel,
    Do,
    Failed,
    Goodbye,
    Hello,
    Join,
    Joined,
    Leave,
    Made,
    Order,
    Refused,
    Release,
    Report,
    Settle,
    Task,
    Trim,
)
from ._page import InHand
from ._payload import Parcel, Payload, Store, sent
from ._process import WorkerProcess
from ._program import Terms
from ._source import log
from ._stack import is_stopped
from ._threads import Helper
from ._wire import Frame, Segment

OOM_SCORE_ADJ = "AIOPREFETCH_OOM_SCORE_ADJ"
_MAX_CHUNK = 256
_MANAGER_GRACE = 1.0  # seconds that the thread of a dead worker's executor may take to end


class Hang(NamedTuple):
    """Why a worker is given up that is not dead."""

    item: InHand | None  # what it took too long for, or None when it does not begin any
    text: str
    wanted: bool = False  # nobody waits for what it does


class LaneEvents(Protocol):
    """Whom a lane tells, always on the loop."""

    def lane_ready(self, lane: Lane, facts: Any) -> None: ...
    def lane_joined(self, lane: Lane, joined: Joined) -> None: ...
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

    ship: Any  # how the source travels to all workers
    store: Any  # and how items do; None where there is no way but messages

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
        self,
        terms: Terms,
        worker_threads: int | None,
        shipment: Any,
        store: Store | None,
        *,
        shared: bool,
    ) -> None:
        """Start the process; what fails is raised, with nothing left behind."""
        try:
            post = _serve.Post(
                self.number,
                self.incarnation,
                terms,
                worker_threads,
                shared,
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
        try:
            self.exitcode = self._process.join()
            self._close()
        finally:  # whatever failed, others wait for this
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

    def say(self, message: Settle | Release | Trim | Leave | Cancel) -> None:
        """Tell the worker."""
        self._send(_codec.message(message))

    def admit(self, tenant: int, terms: Terms, shipment: Any) -> None:
        """Have the worker take in one more program."""
        shipped = shipment.shipped()
        segments = shipment.segments if shipped is None else ()
        self._send([*_codec.message(Join(tenant, terms, shipped)), *segments])

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
        try:
            message = _codec.decode(frame[:1])
            if type(message) is Report:
                message = self._received(message, frame[1:])
        except Exception:  # what it holds runs again, where it is not to be believed
            log.exception("worker %d sent what is no message and is killed", self.number)
            self.kill()
            return
        if type(message) is Report:
            self._events.lane_reports(self, message)
        elif type(message) is Hello:
            self.ready = True
            self._events.lane_ready(self, message.facts)
        elif type(message) is Joined:
            self._events.lane_joined(self, message)
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
