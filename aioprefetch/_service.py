"""A shared pool while it is open: its workers, its calls, and their common end."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from contextlib import suppress
from dataclasses import replace

from . import _seeds
from ._calls import Calls
from ._config import Staff
from ._errors import PoolBroken
from ._invoke import program_of_calls, terms_of_calls
from ._lane import Kind
from ._line import Rules
from ._meter import Meter
from ._pool import Crew, Supervisor
from ._stats import Setting, Stats

_CLOSED = "the pool was closed"


class Service:
    """The core of a public pool; it does not know the handle, which may be dropped."""

    def __init__(self, staff: Staff, kind: Kind, retries: int, shutdown_timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._shutdown_timeout = shutdown_timeout
        self._meter = Meter()  # of the pool itself
        self.supervisor = Supervisor(
            program_of_calls(staff.worker_init_fn),
            terms_of_calls(staff.num_proc, _seeds.draw_seed(), in_process=kind.in_process),
            Crew(
                kind,
                staff.num_proc,
                staff.worker_threads,
                shutdown_timeout,
                Rules("raise", retries),
                shared=True,
            ),
            self._meter,
        )
        self._num_proc = staff.num_proc
        self._opened = time.monotonic()
        supervisor = self.supervisor
        self.calls = Calls(
            supervisor.dispatch,
            supervisor.keeper,
            supervisor.store,
            supervisor.end,
            retries,
            in_process=kind.in_process,
            frees=kind.frees,
        )
        self.up = False
        self._starting = self.loop.create_task(self._start())
        self._starting.add_done_callback(_retrieve)
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait for the workers; the start itself goes on when this is cancelled."""
        if not self._starting.done():
            await asyncio.wait([self._starting])
        if self._starting.cancelled():
            raise RuntimeError("the pool was closed while its workers were starting")
        self._starting.result()

    async def _start(self) -> None:
        try:
            await self.supervisor.start()
            self.supervisor.settle("parent", 1, 2, 1, is_async=True)
        except BaseException:
            self.supervisor.kill()
            await self.supervisor.close()
            raise
        self.up = True

    def stats(self) -> Stats:
        """What its users came to, together."""
        available = self._num_proc * (time.monotonic() - self._opened)
        stats = self.supervisor.dispatch.ledger.stats(available)
        setting = Setting(num_proc=self._num_proc)
        return replace(stats, setting=setting, restarts=self._meter.restarts)  # each user counts

    def check_loop(self) -> None:
        """Raise where another loop than the one that opened it wants it."""
        if self.loop is not asyncio.get_running_loop():
            raise RuntimeError("a pool belongs to the event loop that opened it until it is closed")

    def check_open(self) -> None:
        """Raise when no more work can be given to it."""
        self.check_loop()
        if self.supervisor.broken is not None:
            raise PoolBroken(str(self.supervisor.broken)) from self.supervisor.broken.__cause__

    # The end

    def close(self) -> asyncio.Task[None]:
        """Begin to close; the task is done within the shutdown time-out."""
        if self._closing is None:
            self.up = False
            self._closing = self.loop.create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        deadline = self.loop.time() + self._shutdown_timeout
        if not self._starting.done():
            self.supervisor.kill()
            self._starting.cancel()
        try:
            self.supervisor.evict(_CLOSED)
            await self.calls.drain(self._shutdown_timeout)
            self.calls.fail(_CLOSED)
            await self.supervisor.close(max(0.0, deadline - self.loop.time()))
        except asyncio.CancelledError:  # the loop is being torn down
            self.supervisor.kill()
            raise
        self.supervisor.release()

    def kill(self) -> None:
        """End the workers now; any thread."""
        self._end("the pool was killed")
        self.supervisor.kill()

    def abandon(self) -> None:
        """As a finalizer may, in any thread and inside any lock: nobody will close this."""
        if os.getpid() != self._pid or self._closing is not None:
            return
        self._end("the pool was dropped")
        self.supervisor.abandon()
        warnings.warn(
            "a pool was dropped while it was open; its workers are ended. Use "
            "`async with`, or await its aclose()",
            ResourceWarning,
            stacklevel=2,
        )

    def _end(self, why: str) -> None:
        self.up = False
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._fail, why)

    def _fail(self, why: str) -> None:
        self.supervisor.evict(why)
        self.calls.fail(why)


def _retrieve(task: asyncio.Task[None]) -> None:
    # Whoever asked for the start may have gone; its error is then nobody's.
    if not task.cancelled():
        task.exception()
