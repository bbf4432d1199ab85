"""What a worker with a loop is told, and what it says: tasks overlap, tenants come and go."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from ._host import Host
from ._messages import (
    Cancel,
    Do,
    Goodbye,
    Join,
    Joined,
    Leave,
    Order,
    Refused,
    Release,
    Settle,
    Trim,
    tenant_of,
)
from ._program import Program, drive
from ._report import Reporter
from ._wire import Segment
from ._worker import Worker

Load = Callable[[Join, Sequence[Segment]], Program]


class Conversation:
    """Hears messages, on the loop of the worker, until Goodbye.

    Parameters
    ----------
    load
        Gives the program of a tenant that joins.
    say
        Sends a message to the parent.
    """

    def __init__(
        self,
        worker: Worker | Host,
        reporter: Reporter,
        load: Load,
        say: Callable[[Joined | Refused], None],
    ) -> None:
        self._worker = worker
        self._reporter = reporter
        self._load = load
        self._say = say
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, asyncio.Task[None]] = {}  # by ticket
        self._pending: Counter[int] = Counter()  # of those, by tenant
        self._goodbye = asyncio.Event()
        self._reporting = False

    async def end(self) -> None:
        """Wait for Goodbye, and for what was begun before it."""
        await self._goodbye.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def hear(self, message: Any, segments: Sequence[Segment]) -> None:
        """A message has come."""
        worker = self._worker
        if type(message) is Do:
            self._take(message.orders, segments)
        elif type(message) is Cancel:
            if message.ticket in self._running:
                self._running[message.ticket].cancel()
        elif type(message) is Settle:
            worker.settle(*message)
        elif type(message) is Release:
            self._begin(worker.release(message.run))
        elif type(message) is Join:
            assert isinstance(worker, Host)
            self._begin(self._admit(worker.admit(message, partial(self._load, message, segments))))
        elif type(message) is Leave:
            assert isinstance(worker, Host)
            self._begin(worker.leave(message.tenant))
        elif type(message) is Trim:
            worker.trim()
        elif type(message) is Goodbye:
            self._goodbye.set()

    def _take(self, orders: Sequence[Order], segments: Sequence[Segment]) -> None:
        done = False
        for order in orders:
            ticket, (run, *_), *_ = order
            tenant = tenant_of(run)
            # What never suspends needs no task, unless others of its tenant are before it.
            if self._worker.is_sync(run) and not self._pending[tenant]:
                drive(self._reporter.run(order, segments))
                done = True
            else:
                self._pending[tenant] += 1
                self._running[ticket] = self._begin(self._run(ticket, tenant, order, segments))
        if done:
            self._reporter.send()

    async def _run(
        self, ticket: int, tenant: int, order: Order, segments: Sequence[Segment]
    ) -> None:
        try:
            await self._reporter.run(order, segments)
        finally:
            del self._running[ticket]
            self._pending[tenant] -= 1
        if not self._reporting:  # together with what else ends in this turn of the loop
            self._reporting = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._reporting = False
        self._reporter.send()

    async def _admit(self, work: Coroutine[Any, Any, Joined | Refused]) -> None:
        self._say(await work)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
