"""A pool: workers, and who of them does what.

    window ──submit──> queue ──give──> lane ──> worker
       ▲                                 │
       └────────settle── request <──done─┘

The loop alone touches the queues. The keeper thread ships the source, starts, joins and
reaps. A request is settled exactly once: with its outcome, or with its worker's death.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.process  # noqa: F401  # its hook at the end has to precede ours
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ._arena import Loans, Reader
from ._dispatch import Dispatcher
from ._errors import PoolBroken, TaskTimeout, WorkerDied, WorkerStartError, describe_error
from ._exceptions import unpack_error
from ._guards import GUARD_HINT, refuse_to_start_in_a_starting_worker
from ._guests import Guest
from ._lane import Hang, Kind, Lane
from ._line import Line, Rules
from ._memory import SOME_MEMORY, total
from ._messages import FIRST_GUEST, Ended, Failed, Joined, Refused, Release, Report, Settle, Trim
from ._meter import Meter
from ._payload import Live, Payload, encode_values
from ._program import Program, Terms
from ._request import Request
from ._restarts import Restarts
from ._source import Facts, Split, log
from ._threads import Helper
from ._verdict import charge, describe_death, guilty
from ._watch import Watch

START_DEADLINE = 300.0  # seconds for all workers to load the source and say hello
_HELD_SHARE = 2  # a warning names what is held when it is half of the memory there is
GRACE = 0.3  # seconds for workers to end by themselves when nobody waits for them


@dataclass(frozen=True)
class Crew:
    """How many workers, of which kind."""

    kind: Kind
    num_proc: int
    worker_threads: int | None
    shutdown_timeout: float
    rules: Rules
    shared: bool = False  # whether guests may join


class Supervisor:
    """Worker processes, one lane each."""

    def __init__(self, program: Program, terms: Terms, crew: Crew, meter: Meter) -> None:
        refuse_to_start_in_a_starting_worker()
        self.broken: PoolBroken | None = None
        self._program = program
        self._terms = terms
        self._crew = crew
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self.keeper = Helper("aioprefetch-keeper")
        self._helper: Helper | None = None
        self._shipment: Any = None
        self._kind = crew.kind
        self.lanes: list[Lane] = [
            self._kind.lane(n, self.keeper, self, 0) for n in range(crew.num_proc)
        ]
        self._store = self._kind.store()
        self.memory = SOME_MEMORY  # bytes that there are, as is learnt off the loop
        self._loans = Loans(self.memory // _HELD_SHARE, self._readers)
        self.dispatch = Dispatcher(
            self.lanes, self._loop, on_work=self._on_work, on_idle=self._trim
        )
        self._watch = Watch(
            self._loop, self.dispatch.at_work, self.dispatch.held_by, self._hangs, self.keeper
        )
        self._restarts = Restarts(crew.num_proc, crew.rules.retries, forgiving=crew.shared)
        self._guests: dict[int, Guest] = {}
        self._numbers = itertools.count(FIRST_GUEST)
        self._line = Line(crew.rules, meter=meter)  # of its own program
        self.dispatch.open(self._line)
        self._replacing: set[int] = set()  # numbers of workers
        self._delays: dict[int, asyncio.TimerHandle] = {}  # of those that wait for it
        self._reaped = False  # the keeper ends everything, whether the loop runs or not
        self._settled: Settle | None = None  # what workers are told once they are up
        self._facts: Facts | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        _pools.add(self)

    # Starting

    async def start(self) -> Facts | None:
        """Ship the source, start every worker, wait for their hellos.

        Raises
        ------
        SerializationError
            The source or a function cannot be pickled.
        WorkerStartError
            A worker did not come up.
        """
        try:
            self.memory = await self.keeper.call(total) or SOME_MEMORY
            self._loans = Loans(self.memory // _HELD_SHARE, self._readers)
            await self.keeper.call(self._launch)
            if self._closing:  # the keeper is ending them, and they are not to be watched
                raise WorkerStartError("closed while the workers were starting")
            for lane in self.lanes:
                lane.attach(self._loop)
            await self._all_ready()
        except BaseException:
            self.kill()
            raise
        return self._facts

    def _launch(self) -> None:
        crew = self._crew
        launched: list[Lane] = []
        try:
            self._kind.check(crew.num_proc)
            self._shipment = self.ship(self._program)
            for lane in self.lanes:
                if self._closing:
                    raise WorkerStartError("closed while the workers were starting")
                self._start_lane(lane)
                launched.append(lane)
        except BaseException as error:
            self.lanes = launched
            for lane in launched:
                lane.kill()
                lane.wait(None)
                lane.bury()
            if isinstance(error, OSError):
                raise WorkerStartError(
                    f"worker {len(launched)} of {crew.num_proc} could not be started: {error}"
                ) from error
            raise

    def _start_lane(self, lane: Lane) -> None:
        crew = self._crew
        lane.launch(
            self._terms, crew.worker_threads, self._shipment, self._store, shared=crew.shared
        )

    def ship(self, program: Program) -> Any:
        return self._kind.ship(program)

    async def _all_ready(self) -> None:
        if not self.lanes:
            return
        done, _ = await asyncio.wait([self._ready], timeout=START_DEADLINE)
        if not done:
            waiting = [lane.number for lane in self.lanes if not lane.ready]
            raise WorkerStartError(
                f"workers {waiting} were not ready after {START_DEADLINE:.0f} s: loading the "
                f"source, or worker_init_fn, hangs or takes too long. {GUARD_HINT}"
            )
        self._ready.result()

    def lane_ready(self, lane: Lane, facts: Facts | None) -> None:
        if self._settled is not None:
            lane.say(self._settled)
            for guest in self._guests.values():
                guest.join(lane)
            self.dispatch.feed()
        self._facts = self._facts or facts
        up = all(lane.ready and not lane.dead for lane in self.lanes)
        if up and not self._ready.done():
            self._ready.set_result(None)

    def lane_joined(self, lane: Lane, joined: Joined) -> None:
        lane.joining.remove(joined.tenant)
        if joined.tenant in self._guests:
            self._guests[joined.tenant].joined(lane, joined.facts)

    def lane_refused(self, lane: Lane, refused: Refused) -> None:
        if refused.tenant:
            lane.joining.remove(refused.tenant)
            if refused.tenant in self._guests:
                self._guests[refused.tenant].refused(lane, refused)
            return
        cause = unpack_error(refused.error)
        error = WorkerStartError(
            f"worker {lane.number} failed while {refused.doing}: {describe_error(cause)}"
        )
        error.__cause__ = cause
        lane.refusal = error
        if self._started:
            lane.kill()
        else:
            self._fail_start(error)

    def _fail_start(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whoever starts may have gone

    def settle(
        self, split: Split | None, num_streams: int, hold: int, window: int, *, is_async: bool
    ) -> None:
        self.dispatch.configure(self._line, hold, window, is_async=is_async)
        self._settled = Settle(split, num_streams)
        for lane in self.lanes:
            if lane.ready:
                lane.say(self._settled)

    @property
    def _started(self) -> bool:
        return self._ready.done()

    # Guests

    def admit(
        self, program: Program, terms: Terms, rules: Rules, shutdown_timeout: float, meter: Meter
    ) -> Guest:
        """A place for one more program on these workers."""
        number = next(self._numbers)
        guest = Guest(self, number, program, terms, rules, shutdown_timeout, meter)
        self._guests[number] = guest
        return guest

    def evict(self, why: str) -> None:
        """The pool ends, and with it what its guests have not done."""
        for guest in list(self._guests.values()):
            guest.fail(RuntimeError(why))

    def gone(self, guest: Guest) -> None:
        self._guests.pop(guest.number, None)

    def end(self, lane: Lane, why: Hang) -> None:
        if lane.usable:
            lane.hang = why
            self.keeper.post(lane.end_hung)

    # Work

    first_run = 0

    @property
    def worth(self) -> int:
        return self._line.worth

    @property
    def busy(self) -> bool:
        return self.dispatch.busy(self._line)

    def pack(self, values: Sequence[Any]) -> Payload:
        return Live(values) if self._kind.in_process else encode_values(values)

    def store(self, payload: Payload) -> Payload:
        store = self._store  # which closing takes away
        return payload if store is None else store.put(payload)

    def helper(self) -> Helper:
        if self._helper is None:
            self._helper = Helper("aioprefetch-reader")
        return self._helper

    def submit(self, request: Request) -> None:
        request.line = self._line
        request.timeout = self._line.rules.timeout
        self.dispatch.put(request)

    def feed(self) -> None:
        self.dispatch.feed()

    def forget(self, run: int) -> None:
        self.dispatch.forget(self._line, run)
        for lane in self.lanes:
            lane.say(Release(run))

    def lane_reports(self, lane: Lane, report: Report) -> None:
        if self.broken is not None:
            return
        self._loans.check()
        try:
            settled = self.dispatch.settle(lane, report)
        except RuntimeError as error:  # it is not to be believed any more
            log.error("%s: it is killed", error)
            lane.kill()
            return
        if settled:
            self._restarts.progress(len(settled))
            settled[0][0].line.meter.report(lane.number, report)
        if not self._closing:
            for request, outcome in settled:
                if not (request.line.closed or request.cancelled):
                    request.settle(outcome)

    def _readers(self) -> list[Reader]:
        return [lane.reader for lane in self.lanes if lane.reader is not None]

    def _on_work(self, request: Request) -> None:
        self._watch.wake(request.timeout)

    def _trim(self) -> None:
        """Nothing has been done for a while: memory is given back."""
        for lane in self.lanes:
            lane.say(Trim())
        if self._store is not None:
            self.keeper.post(self._store.trim)

    # Death

    def lane_dead(self, lane: Lane) -> None:
        """The lane is buried: its exit code is known and its descriptors are closed."""
        if not self._closing:
            self._lost(lane)
        self._check_closed()

    def _lost(self, lane: Lane) -> None:
        if self.broken is not None:
            return
        death = describe_death(lane)
        if not (lane.ready or self._started):
            self._lost_in_start(lane, death)
            return
        for guest in list(self._guests.values()):
            guest.lost(lane, death)
        again = self._judge(lane, death)
        delay = self._delay(lane)
        if delay is None:
            self._break(lane.refusal or death, again, last=lane.last)
            return
        if lane.hang is not None and lane.hang.wanted:
            log.info("%s; another takes its place", death)
        elif lane.refusal is None:
            log.warning("%s; another takes its place", death)
        else:
            log.warning("a worker was to take a dead one's place: %s", lane.refusal)
        self.dispatch.tell_meters(lane, death, again)
        self.dispatch.put_back(again)
        self._replace(lane, delay)
        self.dispatch.feed()

    def _delay(self, lane: Lane) -> float | None:
        """Seconds until another is started, or None when that makes no more sense."""
        if lane.last:
            return None
        if lane.hang is not None and lane.hang.wanted:
            return 0.0
        return self._restarts.delay(self._loop.time(), came_up=lane.ready)

    def _lost_in_start(self, lane: Lane, death: Exception) -> None:
        # What kills itself will do so again; what was killed may have had bad luck.
        killed = lane.exitcode is not None and lane.exitcode < 0
        if killed and lane.incarnation < self._crew.rules.retries and not self._ready.done():
            log.warning("%s before it was ready; another takes its place", death)
            self._replace(lane, 0.0)
        else:
            self._fail_start(WorkerStartError(f"{death} before it was ready. {GUARD_HINT}"))

    def _judge(self, lane: Lane, death: WorkerDied | TaskTimeout) -> list[Request]:
        """Settle what is given up; gives what is to run again."""
        held = self.dispatch.lose(lane)
        charged = guilty(lane, held)
        again = []
        for ticket, request in held.items():
            if request.cancelled or request.line.closed:
                continue
            failure = charge(request, charged.get(ticket, []), death)
            if failure is None:
                again.append(request)
                continue
            self.dispatch.note(request, failure)
            request.settle(failure)
        ended = self.dispatch.take_ended(again)
        for request in ended:
            request.settle(Ended(request.task.stream))
        return [request for request in again if request.outcome is None]

    def _break(self, death: BaseException, left: list[Request], *, last: bool) -> None:
        """Workers die one after another: everything that is not done fails, now and for good."""
        self.broken = _broken(death, last=last)
        self._fail_start(self.broken)
        for lane in self.lanes:
            lane.kill()
        for request in left + self.dispatch.take_all():
            request.settle(Failed(_broken(death, last=last)))

    def _hangs(self, lane: Lane) -> None:
        self.keeper.post(lane.end_hung)

    # Replacing

    def _replace(self, lane: Lane, delay: float) -> None:
        self._replacing.add(lane.number)
        successor = self._kind.lane(lane.number, self.keeper, self, lane.incarnation + 1)
        self._delays[lane.number] = self._loop.call_later(delay, self._begin_relaunch, successor)

    def _begin_relaunch(self, lane: Lane) -> None:
        self._delays.pop(lane.number)
        self.keeper.post(self._relaunch, lane)

    def _relaunch(self, lane: Lane) -> None:
        """On the keeper: start a worker in a dead one's place, unless nobody waits for it."""
        try:
            if self._closing or self.broken is not None:
                raise WorkerStartError("closed before it was started")
            self._start_lane(lane)
        except BaseException as error:
            lane.refusal = error
        else:
            self.lanes[lane.number] = lane  # from now on whatever ends the others ends it too
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._adopt, lane)

    def _adopt(self, lane: Lane) -> None:
        """A worker has been started in a dead one's place, or could not be."""
        self._replacing.discard(lane.number)
        if self._reaped:  # by the keeper, whatever became of it
            return
        if lane is self.lanes[lane.number]:
            lane.attach(self._loop)
            self.dispatch.replace(lane)
            if self._closing or self.broken is not None:
                lane.kill()
            else:
                self._loop.call_later(START_DEADLINE, self._give_up_start, lane)
        elif not self._closing and self.broken is None:
            self._lost(lane)
        self._check_closed()

    def _give_up_start(self, lane: Lane) -> None:
        """A worker that took a dead one's place has had its time to come up."""
        if not (lane.ready or lane.dead or self._closing):
            lane.refusal = WorkerStartError(
                f"worker {lane.number} was not ready after {START_DEADLINE:.0f} s: loading the "
                "source, or worker_init_fn, hangs or takes too long"
            )
            lane.kill()

    # Closing

    def close(self, timeout: float | None = None) -> asyncio.Future[None]:
        if not self._closing:
            self._begin_closing()
            for lane in self.lanes:
                lane.say_goodbye()
            patience = self._crew.shutdown_timeout if timeout is None else timeout
            self._timer = self._loop.call_later(patience, self._kill_lanes)
            self._check_closed()
        return self._closed

    def release(self) -> None:
        if self._helper is not None:
            self._helper.stop()

    def kill(self) -> None:
        self._begin_closing()
        self._reaped = True
        self._kill_lanes()
        self.keeper.post(self._reap)

    def abandon(self) -> None:
        if os.getpid() != self._pid:  # a fork of the process that the workers belong to
            return
        self._begin_closing()
        self._reaped = True
        for lane in self.lanes:
            lane.hang_up()
        self.keeper.post(self._reap)

    def _begin_closing(self) -> None:
        self._closing = True
        self.dispatch.halt()

    def _kill_lanes(self) -> None:
        for lane in self.lanes:
            lane.hang_up()
            lane.kill()

    def _check_closed(self) -> None:
        if not self._closing:
            return
        self._watch.stop()
        for number, timer in self._delays.items():
            timer.cancel()
            self._replacing.discard(number)
        self._delays.clear()
        starting = self._replacing and not self._reaped
        if starting or not all(lane.buried for lane in self.lanes):
            return
        self.keeper.post(self._let_go)
        self.dispatch.stop()
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed.done():
            self._closed.set_result(None)

    def _let_go(self) -> None:
        if self._shipment is not None:
            self._shipment.close()
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self.keeper.stop()
        _pools.discard(self)

    def _reap(self) -> None:
        """On the keeper, whether the loop runs or not: a short grace, then SIGKILL."""
        self._end_lanes()
        for lane in self.lanes:
            lane.bury()
        told = threading.Event()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._check_closed)
            self._loop.call_soon_threadsafe(told.set)
            told.wait(GRACE)
        if self._loop.is_closed():  # without having run what would have let go of them
            for lane in self.lanes:
                lane.close_watched()
        self.release()
        self._let_go()

    def _end_lanes(self) -> None:
        deadline = time.monotonic() + GRACE
        for lane in self.lanes:
            lane.wait(max(0.0, deadline - time.monotonic()))
        for lane in self.lanes:
            lane.kill()
        for lane in self.lanes:
            lane.wait(1.0)

    def end_at_exit(self) -> None:
        """The interpreter is about to join every thread: nothing of ours may keep it."""
        if os.getpid() != self._pid:
            return
        for lane in self.lanes:
            lane.hang_up()
        self._end_lanes()
        for lane in self.lanes:
            lane.free_at_exit()
        if self._reaped:  # a thread cut off in the middle of it would leave semaphores behind
            self.keeper.finish(GRACE + 1.0)


def _broken(death: BaseException, *, last: bool) -> PoolBroken:
    text = f"workers die faster than they do anything, and are not replaced any more: {death}"
    if last:
        text = f"no worker is left, and none can take a place: {death}"
    error = PoolBroken(text)
    error.__cause__ = death
    return error


_pools: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _end_all_at_exit() -> None:
    for pool in list(_pools):
        pool.end_at_exit()


# Later hooks (atexit, finalizers) come after the executors' threads are joined: too late for
# a worker that is stuck.
threading._register_atexit(_end_all_at_exit)  # type: ignore[attr-defined]
