"""What several test files need: running, collecting, waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import pytest
import uvloop

T = TypeVar("T")
Loop = Callable[[], asyncio.AbstractEventLoop]

LOOPS: tuple[Loop, ...] = (asyncio.new_event_loop, uvloop.new_event_loop)
START_METHODS = ("fork", "spawn", "forkserver")


def plain(batch: Any) -> Any:
    """A batch with lists in place of arrays, to be compared."""
    return batch.tolist() if isinstance(batch, (np.ndarray, np.generic)) else batch


async def collect(batches: AsyncIterable[Any]) -> list[Any]:
    return [plain(batch) async for batch in batches]


def run(work: Coroutine[Any, Any, T], loop: Loop, timeout: float = 30.0) -> T:
    """Run a coroutine on a loop of its own; for tests that draw their loop."""

    async def in_time() -> T:
        async with asyncio.timeout(timeout):
            return await work

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(in_time())


def warns(method: str) -> AbstractContextManager[Any]:
    """Around the making of a Prefetcher with this start method."""
    if method == "fork":
        return pytest.warns(RuntimeWarning, match="fork")
    return nullcontext()


async def until(holds: Callable[[], bool], seconds: float = 2.0) -> bool:
    """Wait for a condition; whether it held in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True
