"""A worker that is reached through somebody's executor: each message is a call of ours there.

One call at a time is out; what there is to say meanwhile goes with the next. Nothing is asked of
the executor but ``submit`` and the future that it gives.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from typing import Any, NamedTuple

from . import _codec, _serve
from ._errors import describe_error
from ._lane import Lane, LaneEvents
from ._messages import Again, Cancel, Goodbye, Join, Leave, Release, Settle, Task, Trim
from ._payload import Payload, Store
from ._plain import Copies
from ._program import Program, Terms
from ._threads import Helper
from ._visit import Ask, Parcelled, Setup, visit
from ._wire import Frame, Segment


class Reach(NamedTuple):
    """How a worker is reached: how it is called, and how it is ended, where it can be."""

    submit: Callable[..., Future[Any]]
    end: Callable[[], None] = lambda: None
    may_block: bool = False  # whether to submit takes its time, to start a process say


class Journal:
    """What every worker is to know, in its order: for one that comes upon it late."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._entries: dict[tuple[Any, ...], tuple[int, Parcelled]] = {}
        self.version = 0

    def note(self, name: tuple[Any, ...], frame: Sequence[Segment]) -> int:
        """Note an entry, unless it is known by its name; gives its number."""
        if name not in self._entries:
            self.version = next(self._numbers)
            self._entries[name] = self.version, Parcelled([frame])
        return self._entries[name][0]

    def forget(self, tenant: int) -> None:
        """A tenant has left, and need not be told of any more."""
        for name in [name for name in self._entries if name[1] == tenant]:
            del self._entries[name]

    def entries(self, since: int = 0) -> list[tuple[int, Parcelled]]:
        """Those after one."""
        return [entry for entry in self._entries.values() if entry[0] > since]


class _Said(NamedTuple):
    """A message to be sent."""

    frame: Frame
    tickets: tuple[int, ...] = ()  # of the tasks in it
    alone: bool = False  # whether it goes by itself


class Executors:
    """Workers behind executors.

    Parameters
    ----------
    reach
        Gives, by a worker's number, how it is reached; on the keeper, which may wait.
    pinned
        Whether the same worker is reached each time.
    frees
        Whether ending one in the middle of a call makes its place free.
    """

    in_process = False

    def __init__(self, reach: Callable[[int], Reach], *, pinned: bool, frees: bool = False) -> None:
        self.reach = reach
        self.pinned = pinned
        self.frees = frees
        self.key = uuid.uuid4().hex
        self.journal = Journal()

    def lane(self, number: int, keeper: Helper, events: LaneEvents, incarnation: int) -> Lane:
        return RemoteLane(self, number, keeper, events, incarnation)

    def check(self, num_proc: int) -> None:
        """The executor has as many as it has."""

    def ship(self, program: Program) -> Copies:
        return Copies(_codec.encode_source(program))

    def store(self) -> Store | None:
        return None


class RemoteLane(Lane):
    """One worker, or where any will do, one of the calls that are out at a time."""

    parting = "was given up"
    _alone = False  # of what is being sent
    _offered: tuple[int, ...] = ()
    answers_singly = False

    def __init__(
        self,
        office: Executors,
        number: int,
        keeper: Helper,
        events: LaneEvents,
        incarnation: int = 0,
    ) -> None:
        super().__init__(number, keeper, events, incarnation)
        self._office = office
        # Where any worker will do, all lanes are one worker in as many places.
        self._key = f"{office.key} {number} {incarnation}" if office.pinned else office.key
        self._journal = Journal() if office.pinned else office.journal
        self._reach: Reach | None = None
        self._said: deque[_Said] = deque()  # to be said
        self._tickets: set[int] = set()  # of the tasks that are out
        self._questions: list[int] = []
        self._call: Future[Any] | None = None  # the last
        self._is_out = False  # whether it is
        self._asked: Ask | None = None  # by it
        self._known = 0  # version of the journal that its worker, or one of them, has
        self._is_up = False
        self._ended = "ended"

    @property
    def who(self) -> str:
        return f"worker {self.number}"

    @property
    def ended(self) -> str:
        return self._ended

    def launch(
        self,
        terms: Terms,
        worker_threads: int | None,
        shipment: Any,
        store: Store | None,
        *,
        shared: bool,
    ) -> None:
        self._reach = self._office.reach(self.number)
        self._program = Parcelled([shipment.segments])
        self._post = _serve.Post(
            self.number, self.incarnation, terms, None, shared, _serve.depth + 1, None
        )

    # On the loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        super().attach(loop)
        self._questions.append(0)
        self._go()

    def say(self, message: Settle | Release | Trim | Leave | Cancel) -> None:
        frame = _codec.message(message)
        if isinstance(message, Settle):
            self._journal.note(("settle", *reversed(message)), frame)
        elif isinstance(message, Leave):
            self._journal.forget(message.tenant)
            self._send(frame)
        elif isinstance(message, Release):
            self._send(frame)

    def admit(self, tenant: int, terms: Terms, shipment: Any) -> None:
        frame = [*_codec.message(Join(tenant, terms, None)), *shipment.segments]
        self._questions.append(self._journal.note(("join", tenant), frame))
        self._go()

    def say_goodbye(self) -> None:
        if not self._ending:
            self._ending = True
            self._said.clear()  # what is not begun is dropped
            self._send(_codec.message(Goodbye()))

    def give(self, orders: list[tuple[int, Task, Payload, Again | None]]) -> None:
        for order in orders:
            self._alone = order[3] is not None and order[3].alone
            self._offered = (order[0],)
            super().give([order])
        self._alone, self._offered = False, ()

    def withdraw(self, ticket: int) -> bool:
        for said in self._said:
            if said.tickets == (ticket,):  # not sent yet
                self._said.remove(said)
                return True
        return False

    def begun(self, ticket: int) -> bool:
        return ticket in self._tickets

    def _send(self, frame: list[Segment]) -> None:
        self._said.append(_Said(frame, self._offered, self._alone))
        self._go()

    def _go(self) -> None:
        """Say what there is to say, if nothing is being said."""
        if self._is_out or self.dead or self._loop is None:
            return
        if self._said or self._questions:
            since, self._known = self._known, self._journal.version
            news, said = self._journal.entries(since), self._next()
            frames = Parcelled([each.frame for each in said])
            self._tickets = {ticket for each in said for ticket in each.tickets}
            self._asked = Ask(self._key, since, news, self._questions, frames)
            self._questions = []
            self._visit(self._asked)

    def _next(self) -> list[_Said]:
        """What there is to say, up to what goes by itself."""
        said: list[_Said] = []
        while self._said and not (said and self._said[0].alone):
            said.append(self._said.popleft())
            if said[-1].alone:
                break
        return said

    def _visit(self, *args: Any) -> None:
        assert self._reach is not None
        self._is_out = True
        if self._reach.may_block:
            self._keeper.post(self._submit, *args)
        else:
            self._submit(*args)

    def _submit(self, *args: Any) -> None:
        assert self._reach is not None
        try:
            self._call = self._reach.submit(visit, *args)
        except Exception as error:  # it is shut down, or broken
            self.last = not self._office.pinned
            self._call_on_loop(self._give_up, error)
            return
        self._call.add_done_callback(self._answered)

    def _answered(self, call: Future[Any]) -> None:
        self._call_on_loop(self._take, call)

    def _take(self, call: Future[Any]) -> None:
        if self.dead or call is not self._call:
            return
        try:
            answer = call.result()
        except BaseException as error:  # whatever the executor says, a cancellation too
            self._give_up(error)
            return
        if answer is None:  # it is not there, or not up to date
            if self._office.pinned and self._is_up:
                self._give_up(RuntimeError("the worker has lost what it knew"))
                return
            setup = Setup(self._post, self._program, self._journal.entries())
            self._visit(self._asked, setup)
            return
        self._is_out = False
        self._is_up = True
        self._tickets.clear()
        for frame in answer.frames:
            self._hear(frame)
        if self._ending and not self._said:
            self._exited()
        self._go()

    def _give_up(self, error: BaseException) -> None:
        self.last = self.last or isinstance(error, BrokenExecutor)
        self._ended = f"is lost: its executor says {describe_error(error)}"
        self._exited()

    def _exited(self) -> None:
        if not self.dead:
            self.dead = True
            self._keeper.post(self.bury)

    # Anywhere

    def kill(self) -> None:
        if not self.dead:
            call = self._call
            if call is not None:
                with suppress(Exception):  # not every executor's future can be cancelled
                    call.cancel()
            if self._reach is not None:
                self._keeper.post(self._reach.end)
            self._call_on_loop(self._exited)

    def wait(self, timeout: float | None) -> bool:
        return True
