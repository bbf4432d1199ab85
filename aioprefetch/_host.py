"""A worker of a pool that several share: its own program, and those that join and leave.

It does what a `Worker` does and finds the tenant by the number of the pass. What one tenant
brings, a program that cannot be loaded say, fails that tenant alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ._errors import describe_error
from ._exceptions import pack_error
from ._invoke import invoke
from ._messages import SYNC_CALLS, Again, Join, Joined, Outcome, Refused, Task, tenant_of
from ._program import Program, Terms
from ._source import Facts, Split
from ._spans import Span
from ._worker import Worker

MakeWorker = Callable[[Program, Terms, Any], Worker]


class Host:
    """The tenants of one worker process.

    Parameters
    ----------
    own
        What the process was started with.
    terms
        Its terms.
    make
        Makes another worker in it, of a program, its terms, and the value of the pool's
        ``worker_init_fn``.
    """

    is_async = True  # whatever its tenants are, they come while it runs

    def __init__(self, own: Worker, terms: Terms, make: MakeWorker) -> None:
        self._own = own
        self._terms = terms
        self._calls: Worker | None = None  # of sync functions, which need no loop
        self._make = make
        self._guests: dict[int, asyncio.Future[Worker]] = {}
        self._latest = 0  # tenant that was at work

    async def make_source(self) -> Facts | None:
        return await self._own.make_source()

    async def open(self) -> None:
        await self._own.open()
        terms = replace(self._terms, is_async=False)
        self._calls = self._make(Program(None, invoke), terms, self._own.state)
        await self._calls.open()

    async def close(self) -> None:
        """End every tenant, the own program last."""
        for tenant in list(self._guests):
            await self.leave(tenant)
        await self._own.close()

    # Tenants

    def admit(
        self, join: Join, load: Callable[[], Program]
    ) -> Coroutine[Any, Any, Joined | Refused]:
        """Take in a tenant; from now on its tasks wait for that."""
        worker = self._guests[join.tenant] = asyncio.get_running_loop().create_future()
        return self._take_in(join, load, worker)

    async def _take_in(
        self, join: Join, load: Callable[[], Program], worker: asyncio.Future[Worker]
    ) -> Joined | Refused:
        doing = "loading the source and functions"
        try:
            guest = self._make(load(), join.terms, self._own.state)
            doing = "running the source's function or its reset_state()"
            facts = await guest.make_source()
            await guest.open()
        except BaseException as error:
            worker.set_exception(RuntimeError(f"it failed while {doing}: {describe_error(error)}"))
            worker.exception()  # nobody may come for it
            return Refused(pack_error(error), doing, join.tenant)
        worker.set_result(guest)
        return Joined(join.tenant, facts)

    async def leave(self, tenant: int) -> None:
        """A tenant is gone."""
        guest = self._guests.pop(tenant, None)
        if guest is not None and guest.done() and guest.exception() is None:
            await guest.result().close()

    def settle(self, split: Split | None, num_streams: int, tenant: int = 0) -> None:
        """Learn how a tenant's source is read."""

        def tell(guest: asyncio.Future[Worker]) -> None:
            if guest.exception() is None:
                guest.result().settle(split, num_streams)

        if tenant == 0:
            self._own.settle(split, num_streams)
        elif self._guests[tenant].done():
            tell(self._guests[tenant])
        else:
            self._guests[tenant].add_done_callback(tell)

    async def release(self, run: int | None) -> None:
        """A pass is over."""
        with suppress(RuntimeError):  # its tenant has left, and with it all that it had
            await (await self._worker_of(run or 0)).release(run)

    def trim(self) -> None:
        self._own.trim()  # the memory is all tenants'

    def take_spans(self, tenant: int) -> list[Span] | None:
        """What was done for a tenant, where it draws a timeline."""
        guest = self._guests.get(tenant)
        if guest is None or not guest.done() or guest.exception() is not None:
            return None
        return guest.result().take_spans()

    # Tasks

    async def run(
        self, ticket: int, task: Task, values: Sequence[Any], again: Again | None = None
    ) -> Outcome:
        """Do a task of whichever tenant it is."""
        try:
            worker = await self._worker_of(task.run)
        except RuntimeError as error:
            return self._own.failed(task, values, error)
        if tenant_of(task.run) != self._latest:
            self._latest = tenant_of(task.run)
            worker.return_to(task)
        return await worker.run(ticket, task, values, again)

    def is_sync(self, run: int) -> bool:
        """Whether the tasks of a pass never suspend."""
        tenant = tenant_of(run)
        if tenant == SYNC_CALLS:
            return True
        guest = self._guests.get(tenant)
        if guest is None or not guest.done() or guest.exception() is not None:
            return False
        return not guest.result().is_async

    def failed(self, task: Task, values: Sequence[Any], error: BaseException) -> Outcome:
        return self._own.failed(task, values, error)

    async def _worker_of(self, run: int) -> Worker:
        tenant = tenant_of(run)
        if tenant == 0:
            return self._own
        if tenant == SYNC_CALLS:
            assert self._calls is not None
            return self._calls
        guest = self._guests.get(tenant)
        if guest is None:
            raise RuntimeError("its Prefetcher has left the pool")
        if not guest.done():
            await asyncio.wait([guest])  # which a waiter that is cancelled does not cancel
        return guest.result()
