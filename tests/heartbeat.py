"""A heartbeat of the event loop, by which it is told when something holds it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

BEAT = 0.005  # seconds
_SCHEDULER = Path("/proc/thread-self/schedstat")


def _own_clock() -> float:
    """The time in seconds, but for what this thread was kept waiting for a core.

    A machine with more to do than cores lets any loop wait: that is not being held.
    """
    with contextlib.suppress(OSError):  # elsewhere than on Linux that cannot be told
        return time.monotonic() - int(_SCHEDULER.read_text().split()[1]) / 1e9
    return time.monotonic()


class Heart:
    """Of a loop: ``longest`` is the most seconds between two beats."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def beat(self) -> None:
        last = _own_clock()
        while True:
            await asyncio.sleep(BEAT)
            now = _own_clock()
            self.longest = max(self.longest, now - last)
            last = now


@contextlib.asynccontextmanager
async def heartbeat() -> AsyncIterator[Heart]:
    """A heart that beats while the block runs."""
    heart = Heart()
    task = asyncio.create_task(heart.beat())
    await asyncio.sleep(0)
    try:
        yield heart
    finally:
        await asyncio.sleep(0)
        task.cancel()
