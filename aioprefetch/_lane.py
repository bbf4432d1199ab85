"""One worker as the parent sees it: start, send, receive, death, end.

    keeper thread        launch ──> worker
    event loop           messages ◄────────────────────────► messages
                         the news of its death
    keeper thread        bury: join it, read what it left, close everything

What the dead has written is read to its end before its death is told. Where workers come from
is a `Kind`'s business; each has its own lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from . import _codec
from ._arena import Reader
from ._errors import describe_exit
from ._exceptions import unpack_error
from ._logs import replay
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
    Logged,
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
from ._program import Program, Terms
from ._source import log
from ._threads import Helper
from ._wire import Frame, Segment

_MAX_CHUNK = 256


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

    last = False  # whether no other can take its place
    parting = "was killed"  # what becomes of it when it is ended
    answers_singly = True  # whether what is done is known of each task, not of many at once
    knows_hand = False  # whether it can be told what the worker is at work on

    def __init__(
        self, number: int, keeper: Helper, events: LaneEvents, incarnation: int = 0
    ) -> None:
        self.number = number
        self.incarnation = incarnation
        self.ready = False
        self.hang: Hang | None = None  # why it is being killed
        self.refusal: BaseException | None = None  # what it said instead of hello
        self.joining: list[int] = []  # tenants that it takes in, the one it is at first
        self.stacks = ""  # that it left behind
        self.dead = False
        self.buried = False
        self.exitcode: int | None = None
        self.hand: list[InHand] = []  # what it was at work on when it died
        self.reader: Reader | None = None  # of the memory that its results come in
        self._keeper = keeper
        self._events = events
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False  # told to end: then the end of its calls is no surprise

    @property
    def pid(self) -> int | None:
        """Of its process, where it has one of its own."""
        return None

    @property
    def who(self) -> str:
        """What to call it in messages."""
        return f"worker {self.number} (pid {self.pid})"

    @property
    def ended(self) -> str:
        """How it ended, in words, once it has."""
        return describe_exit(self.exitcode)

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
        """Start the worker; what fails is raised, with nothing left behind."""
        raise NotImplementedError

    def bury(self) -> None:
        """After the worker's death: whatever is to be waited for or read of it, and closed.

        All of it on the keeper, whether the loop runs or not.
        """
        if not self.buried:
            self.buried = True
            self._call_on_loop(self._let_go)

    def end_hung(self) -> None:
        """Kill it, having read where it is stuck."""
        self.kill()

    # On the loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch and to listen."""
        self._loop = loop

    def say(self, message: Settle | Release | Trim | Leave | Cancel) -> None:
        """Tell the worker."""
        self._send(_codec.message(message))

    def admit(self, tenant: int, terms: Terms, shipment: Any) -> None:
        """Have the worker take in one more program."""
        segments = shipment.segments if shipment.shipped is None else ()
        self._send([*_codec.message(Join(tenant, terms, shipment.shipped)), *segments])

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
        return False

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
        self._heard(message)

    def _heard(self, message: Any) -> None:
        """Tell what the worker has said."""
        if type(message) is Report:
            self._events.lane_reports(self, message)
        elif type(message) is Logged:
            replay(message)
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

    def _let_go(self) -> None:
        """It is dead, and everything is closed but what the loop watched."""
        if not self.dead:
            self._detach()
        self.close_watched()
        self._events.lane_dead(self)

    def _detach(self) -> None:
        """Leave the loop."""
        self.dead = True

    def _call_on_loop(self, function: Any, *args: Any) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(function, *args)

    # Anywhere

    def hang_up(self) -> None:
        """The worker is told that nobody listens; safe in any thread and inside any lock."""
        self._ending = True

    def kill(self) -> None:
        """End it now; returns at once, and does nothing to the dead."""
        raise NotImplementedError

    def wait(self, timeout: float | None) -> bool:
        """Wait for the death, off the loop."""
        raise NotImplementedError

    def close_watched(self) -> None:
        """Close what the loop watched, which is closed or has let go of it."""

    def free_at_exit(self) -> None:
        """At interpreter exit: nothing may keep it waiting."""


class Kind(Protocol):
    """Where workers come from, and how they are talked to."""

    in_process: bool  # whether they run in the user's own process
    frees: bool  # whether ending one in the middle of a call makes its place free

    def lane(self, number: int, keeper: Helper, events: LaneEvents, incarnation: int) -> Lane:
        """One worker, to be launched."""

    def check(self, num_proc: int) -> None:
        """Fail where so many cannot be had, before the first is launched."""

    def ship(self, program: Program) -> Any:
        """The program as it travels to all of them; takes its time."""

    def store(self) -> Store | None:
        """Memory for items on their way to any of them, if they can see it."""
