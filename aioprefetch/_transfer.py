"""The consumer's own last step with a batch, one batch ahead of it and off the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ._messages import Made
from ._meter import Meter
from ._request import Request
from ._threads import Helper


class Transfer:
    """Calls ``transfer`` with each batch, on a thread of its own."""

    def __init__(self, function: Callable[[Any], Any], meter: Meter) -> None:
        self._function = function
        self._meter = meter
        self._thread = Helper("aioprefetch-transfer")
        self._running: asyncio.Future[Any] | None = None

    def begin(self, request: Request) -> asyncio.Future[Any]:
        """Begin with the batch of a request that was made."""
        self._running = self._thread.call(self._do, request)
        self._running.add_done_callback(self._done)
        return self._running

    def _done(self, future: asyncio.Future[Any]) -> None:
        if future is self._running:
            self._running = None  # what it gave is the consumer's alone
        if not future.cancelled():
            future.exception()  # whoever was to get it may have gone

    def _do(self, request: Request) -> Any:
        outcome = request.outcome
        assert type(outcome) is Made
        began = time.monotonic()
        try:
            return self._function(outcome.payload.open())
        finally:
            self._meter.transfer(began)

    def stop(self) -> None:
        """End the thread after the call that runs; any thread."""
        self._thread.stop()

    async def finish(self) -> None:
        """Wait for the call that runs."""
        if self._running is not None:
            await asyncio.wait([self._running])

    def where(self) -> str:
        """The line of code that the thread is at."""
        return self._thread.where()
