"""Prefetchers on a pool that is not theirs alone.

Each brings a program of its own, which is shipped once and which every worker takes in, also
one that comes later in a dead one's place. What is wrong with one guest ends that guest alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from ._dispatch import Dispatcher
from ._errors import PoolBroken, WorkerStartError, describe_error
from ._exceptions import unpack_error
from ._lane import Hang, Lane
from ._line import Line, Rules
from ._messages import Failed, Leave, Refused, Release, Settle, first_run
from ._meter import Meter
from ._payload import Payload
from ._program import Program, Terms
from ._request import Request
from ._source import Facts, Split
from ._threads import Helper

START_DEADLINE = 300.0  # seconds for all workers to take in a program


class Landlord(Protocol):
    """What guests need of the pool that they are on."""

    memory: int
    broken: PoolBroken | None
    dispatch: Dispatcher
    keeper: Helper

    @property
    def lanes(self) -> Sequence[Lane]:
        """Its workers."""

    def ship(self, program: Program) -> Any:
        """The program as it travels to all workers; takes its time."""

    def pack(self, values: Sequence[Any]) -> Payload:
        """Keys or items as they travel."""

    def store(self, payload: Payload) -> Payload:
        """Items where all workers find them."""

    def end(self, lane: Lane, why: Hang) -> None:
        """Kill a worker that does what nobody waits for; another takes its place."""

    def gone(self, guest: Guest) -> None:
        """A guest has left."""


class Guest:
    """One Prefetcher on a shared pool: what its window needs of workers."""

    def __init__(
        self,
        landlord: Landlord,
        number: int,
        program: Program,
        terms: Terms,
        rules: Rules,
        shutdown_timeout: float,
        meter: Meter,
    ) -> None:
        self.number = number
        self._broken: PoolBroken | None = None
        self._landlord = landlord
        self._program = program
        self._terms = terms
        self._shutdown_timeout = shutdown_timeout
        self._line = Line(rules, meter=meter)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._shipment: Any = None
        self._settled: Settle | None = None
        self._facts: Facts | None = None
        self._joining: set[Lane] = set()
        self._deaths = 0  # of workers that were taking in its program
        self._helper: Helper | None = None

    @property
    def broken(self) -> PoolBroken | None:
        return self._broken or self._landlord.broken

    @property
    def memory(self) -> int:
        return self._landlord.memory

    # Joining

    async def start(self) -> Facts | None:
        """Ship the program, and wait until every worker has taken it in.

        Raises
        ------
        SerializationError
            It cannot be pickled.
        WorkerStartError
            A worker could not load it.
        """
        self._shipment = await self._landlord.keeper.call(self._landlord.ship, self._program)
        self._landlord.dispatch.open(self._line)
        for lane in self._landlord.lanes:
            if lane.usable:
                self.join(lane)
        done, _ = await asyncio.wait([self._ready], timeout=START_DEADLINE)
        if not done:
            raise WorkerStartError(
                f"the pool's workers did not load the source in {START_DEADLINE:.0f} s: it hangs, "
                "or they are all busy with something else"
            )
        self._ready.result()
        return self._facts

    def join(self, lane: Lane) -> None:
        """Have a worker that is up take in the program."""
        if self._shipment is None or self._closing or self._broken is not None:
            return
        self._joining.add(lane)
        lane.joining.append(self.number)
        lane.admit(self.number, self._terms, self._shipment)
        if self._settled is not None:
            lane.say(self._settled)

    def joined(self, lane: Lane, facts: Facts | None) -> None:
        self._facts = self._facts or facts
        self._joining.discard(lane)
        if not self._joining and not self._ready.done():
            self._ready.set_result(None)
        self._check_shipment()

    def refused(self, lane: Lane, refused: Refused) -> None:
        """A worker could not load it."""
        cause = unpack_error(refused.error)
        error = WorkerStartError(
            f"worker {lane.number} failed while {refused.doing}: {describe_error(cause)}"
        )
        error.__cause__ = cause
        self._joining.discard(lane)
        self.fail(error)

    def lost(self, lane: Lane, death: BaseException) -> None:
        """A worker has died; if that came of the program, it is not tried for ever."""
        self._joining.discard(lane)
        if lane.joining[:1] == [self.number]:  # others wait behind it, and did nothing
            self._deaths += 1
            if self._deaths > self._line.rules.retries:
                self.fail(WorkerStartError(f"{death} while it loaded the source"))
        self._check_shipment()

    def fail(self, error: BaseException) -> None:
        """It cannot go on: everything that is not done fails, now and for good."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whoever starts may have gone
        if self._broken is None and not self._closing:
            self._broken = PoolBroken(f"the work on the shared pool has ended: {error}")
            self._broken.__cause__ = error
            for request in self._landlord.dispatch.drop(self._line):
                failure = PoolBroken(str(self._broken))
                failure.__cause__ = error
                request.settle(Failed(failure))

    # Work

    @property
    def first_run(self) -> int:
        return first_run(self.number)

    def settle(
        self, split: Split | None, num_streams: int, hold: int, window: int, *, is_async: bool
    ) -> None:
        self._landlord.dispatch.configure(self._line, hold, window, is_async=is_async)
        self._settled = Settle(split, num_streams, self.number)
        self._say(self._settled)

    @property
    def worth(self) -> int:
        return self._line.worth

    @property
    def busy(self) -> bool:
        return self._landlord.dispatch.busy(self._line)

    def pack(self, values: Sequence[Any]) -> Payload:
        return self._landlord.pack(values)

    def store(self, payload: Payload) -> Payload:
        return self._landlord.store(payload)

    def helper(self) -> Helper:
        if self._helper is None:
            self._helper = Helper("aioprefetch-reader")
        return self._helper

    def submit(self, request: Request) -> None:
        request.line = self._line
        request.timeout = self._line.rules.timeout
        self._landlord.dispatch.put(request)

    def feed(self) -> None:
        self._landlord.dispatch.feed()

    def forget(self, run: int) -> None:
        self._landlord.dispatch.forget(self._line, run)
        self._say(Release(run))

    def _say(self, message: Settle | Release | Leave) -> None:
        for lane in self._landlord.lanes:
            if lane.usable:
                lane.say(message)

    # Leaving

    def close(self) -> asyncio.Future[None]:
        """Leave: what is begun is finished, and its worker killed if that takes too long."""
        if not self._closing:
            self._closing = True
            self._line.emptied = self._check_left
            self._landlord.dispatch.shut(self._line)
            self._timer = self._loop.call_later(self._shutdown_timeout, self._end_workers)
            self._check_left()
        return self._closed

    def _check_left(self) -> None:
        if self._line.out or self._closed.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._say(Leave(self.number))
        self._landlord.gone(self)
        self._closed.set_result(None)
        self._check_shipment()

    def _check_shipment(self) -> None:
        """Nobody will open it any more."""
        if self._closed.done() and not self._joining and self._shipment is not None:
            self._landlord.keeper.post(self._shipment.close)
            self._shipment = None

    def _end_workers(self) -> None:
        why = Hang(None, "was at work for a Prefetcher that is closed", wanted=True)
        for lane in self._landlord.dispatch.at_work_for(self._line):
            self._landlord.end(lane, why)

    def release(self) -> None:
        if self._helper is not None:
            self._helper.stop()

    def kill(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._kill)

    def _kill(self) -> None:
        self.close()
        self._end_workers()
        self.release()

    def abandon(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave_alone)

    def _leave_alone(self) -> None:
        self.close()
        self.release()
