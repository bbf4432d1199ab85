"""The window: the bounded set of futures between the plan and the consumer.

It is filled up to its limit and refilled when a request leaves it, by being delivered or
because it had nothing to deliver; when tasks are quick, as soon as there is room for a
message of them, and before the loop does anything else. Ordered, requests leave in the order
they were made; unordered, as they are settled.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from dataclasses import dataclass

from ._dispatch import Request
from ._engine import Pool
from ._messages import Ended, Failed, Made
from ._plan import Plan, Planned


@dataclass
class Sizes:
    """The bytes that a Prefetcher's batches may take, and take."""

    max_bytes: int
    largest: int = 0  # of the batches seen

    def room(self) -> int:
        """Batches as large as the largest that fit; at least one."""
        return max(1, self.max_bytes // self.largest) if self.largest else sys.maxsize


class Window:
    """At most ``limit`` requests made and not yet delivered.

    Parameters
    ----------
    sizes
        How many bytes they may be: each is taken for as large as the largest seen, and one is
        always let in.
    probe
        Requests made before the first is settled and their size is known; 0 for any number.
    """

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        limit: int,
        *,
        sizes: Sizes,
        probe: int,
        ordered: bool,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._limit = limit
        self._sizes = sizes
        self._probe = 0 if sizes.largest else probe
        self._ordered = ordered
        self._requests: deque[Request] = deque()  # ordered: all, in their order
        self._settled: deque[Request] = deque()  # unordered: as they were settled
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
    def finished(self) -> bool:
        """Whether nothing is left to come."""
        return self._size == 0 and self._plan.exhausted

    @property
    def broken(self) -> Exception | None:
        """Why nothing more can come, if workers are all gone."""
        return self._pool.broken

    def refill(self) -> None:
        """Request what there is room for."""
        self._left, self._refilling = 0, False
        if self._closed or self._pool.broken is not None:
            return
        most = self._most()
        while self._size < most:
            planned = self._plan.take()
            if planned is None:
                break
            self._request(planned)
        self._pool.feed()
        room = self._most() - self._size
        if room > 0 and not self._plan.exhausted:
            self._plan.want(room)

    def _most(self) -> int:
        """Requests that may be out."""
        return min(self._limit, self._probe or self._limit, self._sizes.room())

    def plan_has_more(self) -> None:
        """A plan that is read in this process has tasks, or has ended."""
        self.refill()
        self._wake()

    def pop(self) -> Request | None:
        """The next settled request to leave the window, if there is one; refills it."""
        settled = self._requests if self._ordered else self._settled
        if not settled or settled[0].outcome is None:
            return None
        request = settled.popleft()
        self._size -= 1
        self._plan.left(request.task)
        self._left += 1
        if self._left >= self._pool.worth:
            self.refill()
        elif not self._refilling:  # quick tasks, which are sent together
            self._refilling = True
            asyncio.get_running_loop().call_soon(self.refill)
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
        self._requests.clear()
        self._settled.clear()

    def reopen(self) -> None:
        """Go on with what is in it."""
        self._closed = False

    def _request(self, planned: Planned) -> None:
        request = Request(planned.task, planned.payload, self._take_in)
        self._size += 1
        if self._ordered:
            self._requests.append(request)
        if planned.error is not None:
            request.settle(Failed(planned.error))
        else:
            self._pool.submit(request)

    def _take_in(self, request: Request) -> None:
        """A request has its outcome."""
        outcome = request.outcome
        if type(outcome) is Ended or (type(outcome) is Failed and outcome.ends):
            self._plan.ended(request.task.stream)
        if type(outcome) is Made:
            self._sizes.largest = max(self._sizes.largest, outcome.payload.nbytes)
        if not self._ordered:
            self._settled.append(request)
        if self._probe:
            self._probe = 0
            self.refill()
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
