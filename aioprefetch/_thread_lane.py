"""A worker that is a thread of this process: nothing is pickled, and nothing can be killed.

What it is told comes through its loop, what it says through a queue that the parent's loop is
woken for. A thread that is ended in the middle of a call is left behind: it is told to begin
nothing more, nobody listens to it, and another takes its place.
"""

from __future__ import annotations

import asyncio
import copy
import mmap
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ._conversation import Conversation
from ._exceptions import pack_error
from ._host import Host
from ._lane import Lane, LaneEvents
from ._live import Here, LiveReporter
from ._messages import Again, Do, Goodbye, Hello, Join, Order, Refused, Task
from ._page import CLAIMS, InHand, Page
from ._payload import Payload, Store
from ._program import Program, Terms
from ._serve import OPENING, new_loop
from ._threads import Helper
from ._wire import Segment
from ._worker import Worker

_RECORDS = 4  # of what is in hand, for each item that may be


class Threads:
    """Threads of this process."""

    frees = True
    in_process = True

    def lane(self, number: int, keeper: Helper, events: LaneEvents, incarnation: int) -> Lane:
        return ThreadLane(number, keeper, events, incarnation)

    def check(self, num_proc: int) -> None:
        """There is always another thread."""

    def ship(self, program: Program) -> Here:
        return Here(program)

    def store(self) -> Store | None:
        return None


class ThreadLane(Lane):
    """One thread."""

    knows_hand = True
    parting = "was left behind"
    _thread: _WorkerThread | None = None

    def __init__(
        self, number: int, keeper: Helper, events: LaneEvents, incarnation: int = 0
    ) -> None:
        super().__init__(number, keeper, events, incarnation)
        self._said: SimpleQueue[Any] = SimpleQueue()  # by the thread, and not yet heard
        self._over = False  # nobody listens to it any more

    @property
    def who(self) -> str:
        return f"worker {self.number}"

    @property
    def ended(self) -> str:
        return "ended"

    def launch(
        self,
        terms: Terms,
        worker_threads: int | None,
        shipment: Any,
        store: Store | None,
        *,
        shared: bool,
    ) -> None:
        records = _RECORDS * terms.concurrency
        page = self._page = Page(mmap.mmap(-1, Page.nbytes(records)), records)
        self._thread = _WorkerThread(self.number, shipment.program, terms, page, self._hear_later)
        self._thread.start()

    def _hear_later(self, message: Any) -> None:
        self._said.put(message)
        self._call_on_loop(self._hear_all)

    def _hear_all(self) -> None:
        while not self._said.empty():
            message = self._said.get()
            if self.dead:
                continue
            if message is None:
                self.dead = True
                self.hand = self.hand or self._page.read()
                self._begun = self._page.begun()
                self._keeper.post(self.bury)
            elif not self._over:
                self._heard(message)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        super().attach(loop)
        loop.call_soon(self._hear_all)  # once this lane is known to whoever is told

    # On the loop

    def say(self, message: Any) -> None:
        if self._thread is not None:
            self._thread.tell(message)

    def admit(self, tenant: int, terms: Terms, shipment: Any) -> None:
        self.say(Join(tenant, terms, shipment.program))

    def give(self, orders: list[tuple[int, Task, Payload, Again | None]]) -> None:
        for ticket, *_ in orders:
            self._page.offer(ticket)
        self.say(Do([_order(*order) for order in orders]))

    def withdraw(self, ticket: int) -> bool:
        return self._page.withdraw(ticket)

    def begun(self, ticket: int) -> bool:
        return bool(self._begun[ticket % CLAIMS])

    def in_hand(self) -> list[InHand]:
        return self._page.read()

    def listen(self) -> None:
        self._hear_all()

    def say_goodbye(self) -> None:
        if not self._ending:
            self._ending = True
            self._page.shut()
            self.say(Goodbye())

    # Anywhere

    def end_hung(self) -> None:
        if self._thread is not None:
            self.stacks = self._thread.stack()
        self.kill()

    def hang_up(self) -> None:
        super().hang_up()
        if self._thread is not None:
            self._page.shut()
            self._thread.tell(Goodbye())

    def kill(self) -> None:
        if not self.dead and not self._over:
            self.hang_up()
            self.hand = self._page.read()
            self._over = True
            self._hear_later(None)

    def wait(self, timeout: float | None) -> bool:
        if self._thread is not None and not self._over:
            self._thread.join(timeout)
        return self._over or self._thread is None or not self._thread.is_alive()


def _order(ticket: int, task: Task, payload: Payload, again: Again | None) -> Order:
    return (ticket, task, payload) if again is None else (ticket, task, payload, again)


class _WorkerThread(threading.Thread):
    """The thread, from its first line to its last."""

    def __init__(self, number: int, program: Program, terms: Terms, page: Page, say: Any) -> None:
        super().__init__(name=f"aioprefetch-worker-{number}", daemon=True)
        self._number = number
        self._page = page
        self._say = say
        self._loop = new_loop()
        own = self._make(own_copy(program, terms, number), terms)
        self._worker = Host(own, terms, self._make)
        reporter = LiveReporter(self._worker, page, say)
        self._conversation = Conversation(self._worker, reporter, self._load, say)

    def _make(self, program: Program, terms: Terms, state: Any = None) -> Worker:
        return Worker(
            own_copy(program, terms, self._number),
            terms,
            self._number,
            outbox=LiveReporter.outbox,
            page=self._page,
            closing=self._page.is_shut,
            state=state,
        )

    @staticmethod
    def _load(join: Join, _: Sequence[Segment]) -> Program:
        program: Program = join.shipped
        return program

    def tell(self, message: Any) -> None:
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._conversation.hear, message, ())

    def stack(self) -> str:
        frame = sys._current_frames().get(self.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._converse())
        finally:
            self._say(None)

    async def _converse(self) -> None:
        try:
            facts = await self._worker.make_source()
            await self._worker.open()
        except BaseException as error:
            self._say(Refused(pack_error(error), OPENING))
            return
        self._say(Hello(facts))
        await self._conversation.end()
        await self._worker.close()


def own_copy(program: Program, terms: Terms, number: int) -> Program:
    """The program with what of its source threads must not share.

    What they iterate each moves for itself; what is told of epochs is told once a copy.
    """
    source = program.source
    if number and terms.split in ("worker", "replicate"):
        return program._replace(source=copy.deepcopy(source))
    if number and (hasattr(source, "set_epoch") or hasattr(source, "reset_state")):
        return program._replace(source=copy.copy(source))
    return program
