"""The window: the bounded set of futures between the plan and the consumer.

It is filled up to its limit and refilled when a request leaves it, by being delivered or
because it had nothing to deliver; when tasks are quick, as soon as there is room for a
message of them, and before the loop does anything else. Ordered, requests leave in the order
they were made; unordered, as they are settled.

Once a plan is exhausted the next epoch's is drawn from, while the last batches of this one
are consumed. Epochs never mix: all of one has left before the next begins to.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ._engine import Pool
from ._messages import Ended, Failed, Made, Nothing
from ._meter import Meter
from ._plan import Plan, Planned
from ._request import Request


@dataclass
class Sizes:
    """The bytes that a Prefetcher's batches may take, and take."""

    max_bytes: int
    largest: int = 0  # of the batches seen

    def room(self) -> int:
        """Batches as large as the largest that fit; at least one."""
        return max(1, self.max_bytes // self.largest) if self.largest else sys.maxsize


class _Leg:
    """What of one epoch's plan is in the window."""

    def __init__(self, plan: Plan, *, ordered: bool) -> None:
        self.plan = plan
        self.begun = plan.seq
        self.ordered = ordered
        self.requests: deque[Request] = deque()  # ordered: all, in their order
        self.settled: deque[Request] = deque()  # unordered: as they were settled
        self.size = 0

    @property
    def front(self) -> Request | None:
        """The request that leaves next, if it is settled."""
        queue = self.requests if self.ordered else self.settled
        return queue[0] if queue and queue[0].outcome is not None else None

    @property
    def ready(self) -> int:
        """Requests that are settled and have not left."""
        if self.ordered:
            return sum(request.outcome is not None for request in self.requests)
        return len(self.settled)

    def pop(self) -> Request:
        self.size -= 1
        return (self.requests if self.ordered else self.settled).popleft()

    @property
    def finished(self) -> bool:
        return self.size == 0 and self.plan.exhausted


class Window:
    """At most ``limit`` requests made and not yet delivered.

    Parameters
    ----------
    following
        Gives the plan of the next epoch, or None when there is none.
    sizes
        How many bytes they may be: each is taken for as large as the largest seen, and one is
        always let in.
    probe
        Requests made before the first is settled and their size is known; 0 for any number.
    prepare
        What is begun with the batch that leaves next, as soon as it is there; it leaves when
        that is done.
    meter
        What is told of requests that come and go.
    """

    def __init__(
        self,
        plan: Plan,
        following: Callable[[], Plan | None],
        pool: Pool,
        limit: int,
        *,
        sizes: Sizes,
        probe: int,
        ordered: bool,
        prepare: Callable[[Request], asyncio.Future[object]] | None = None,
        meter: Meter,
    ) -> None:
        self._legs = deque([_Leg(plan, ordered=ordered)])
        self._following = following
        self._pool = pool
        self._limit = limit
        self._sizes = sizes
        self._probe = 0 if sizes.largest else probe
        self._ordered = ordered
        self._prepare = prepare
        self._meter = meter
        self._size = 0
        self._left = 0  # since the last refill
        self._refilling = False  # at the next turn of the loop
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests made and not yet delivered."""
        return self._size

    @property
    def ready(self) -> int:
        """Of these, settled."""
        return sum(leg.ready for leg in self._legs)

    @property
    def plan(self) -> Plan:
        """Of the epoch that is being delivered."""
        return self._legs[0].plan

    @property
    def runs(self) -> list[int]:
        """The passes that are in it, or were begun."""
        return [leg.plan.run for leg in self._legs]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to come of this epoch."""
        return self._legs[0].finished

    @property
    def broken(self) -> Exception | None:
        """Why nothing more can come, if workers are all gone."""
        return self._pool.broken

    def turn(self) -> bool:
        """This epoch is finished: go on to the next; False when there is none."""
        if len(self._legs) == 1 and not self._begin_next():
            return False
        self._legs.popleft()
        self.refill()
        self._prepare_front()
        return True

    def refill(self) -> None:
        """Request what there is room for."""
        self._left, self._refilling = 0, False
        if self._closed or self._pool.broken is not None:
            return
        most, before = self._most(), self._size
        while self._size < most:
            leg = self._legs[-1]
            planned = leg.plan.take()
            if planned is not None:
                self._request(leg, planned)
            # After an epoch without batches the next waits for its turn: there may be no end.
            elif not leg.plan.exhausted or leg.plan.seq == leg.begun or not self._begin_next():
                break
        self._tell(self._size - before)
        self._pool.feed()
        room, plan = self._most() - self._size, self._legs[-1].plan
        if room > 0 and not plan.exhausted:
            plan.want(room)

    def _tell(self, requested: int) -> None:
        now, meter = time.monotonic(), self._meter
        meter.ask(requested, now)
        if meter.trace is not None:
            meter.trace.depth(now, self)

    def _begin_next(self) -> bool:
        plan = self._following()
        if plan is None:
            return False
        self._legs.append(_Leg(plan, ordered=self._ordered))
        return True

    def _most(self) -> int:
        """Requests that may be out."""
        return min(self._limit, self._probe or self._limit, self._sizes.room())

    def plan_has_more(self) -> None:
        """A plan that is read in this process has tasks, or has ended."""
        self.refill()
        self._wake()

    def pop(self) -> Request | None:
        """The next settled request to leave the window, if there is one; refills it."""
        leg = self._legs[0]
        request = leg.front
        if request is None or not _is_ready(request):
            return None
        leg.pop()
        self._size -= 1
        leg.plan.left(request.task)
        self._left += 1
        if self._left >= self._pool.worth:
            self.refill()
        elif not self._refilling:  # quick tasks, which are sent together
            self._refilling = True
            asyncio.get_running_loop().call_soon(self.refill)
        if self._prepare is not None:
            self._prepare_front()
        return request

    async def changed(self) -> None:
        """Wait for something to be settled, or for the end. Cancelling it loses nothing."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        """Request no more, and wake whoever waits."""
        self._closed = True
        self._wake()

    def drop(self) -> None:
        """Let go of what will not be delivered."""
        for leg in self._legs:
            leg.requests.clear()
            leg.settled.clear()

    def reopen(self) -> None:
        """Go on with what is in it."""
        self._closed = False

    def _request(self, leg: _Leg, planned: Planned) -> None:
        request = Request(planned, partial(self._take_in, leg))
        self._size += 1
        leg.size += 1
        if self._ordered:
            leg.requests.append(request)
        if planned.error is not None:
            request.settle(Failed(planned.error))
        else:
            self._pool.submit(request)

    def _take_in(self, leg: _Leg, request: Request) -> None:
        """A request has its outcome."""
        outcome = request.outcome
        if type(outcome) is Made:
            nbytes = outcome.payload.nbytes
            self._meter.bytes += nbytes
            if nbytes > self._sizes.largest:
                self._sizes.largest = nbytes
                self._meter.see(nbytes)
            if outcome.skipped:
                self._meter.skipped += outcome.skipped
        elif type(outcome) is Nothing or type(outcome) is Failed:
            self._meter.skipped += outcome.skipped
        if type(outcome) is Ended or (type(outcome) is Failed and outcome.ends):
            leg.plan.ended(request.task.stream)
        if not self._ordered:
            leg.settled.append(request)
        if self._probe:
            self._probe = 0
            self.refill()
        if self._prepare is not None:
            self._prepare_front()
        if self._waiters:
            self._wake()

    def _prepare_front(self) -> None:
        if self._prepare is None or self._closed:
            return
        request = self._legs[0].front
        if request is not None and request.ready is None and type(request.outcome) is Made:
            request.ready = self._prepare(request)
            request.ready.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _is_ready(request: Request) -> bool:
    return request.ready is None or request.ready.done()
