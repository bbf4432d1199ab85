"""What one writes without a library: run_in_executor on a ProcessPoolExecutor, a window ahead."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from tests.benchmarks.data import Fetch, Indices

from . import Job

_fetch: Fetch | None = None  # in a worker


def install(dataset: Any) -> None:
    global _fetch
    _fetch = Fetch(dataset)


def work(indices: Any) -> Any:
    assert _fetch is not None
    return _fetch(indices)


@asynccontextmanager
async def stream(job: Job) -> AsyncIterator[AsyncIterator[Any]]:
    context = multiprocessing.get_context(job.start)
    pool = ProcessPoolExecutor(job.num_proc, context, install, (job.dataset,))
    try:
        yield _results(pool, job)
    finally:
        pool.shutdown(cancel_futures=True)


@asynccontextmanager
async def loky(job: Job) -> AsyncIterator[AsyncIterator[Any]]:
    """The same on loky's executor."""
    from loky import ProcessPoolExecutor as Loky

    pool = Loky(job.num_proc, initializer=install, initargs=(job.dataset,))
    try:
        yield _results(pool, job)
    finally:
        pool.shutdown(wait=False, kill_workers=True)


async def _results(pool: Executor, job: Job) -> AsyncIterator[Any]:
    loop = asyncio.get_running_loop()
    window: deque[asyncio.Future[Any]] = deque()
    for indices in Indices(len(job.dataset), job.batch_size):
        window.append(loop.run_in_executor(pool, work, indices))
        if len(window) >= (job.window or 4 * job.num_proc):
            yield await _next(window, job.ordered)
    while window:
        yield await _next(window, job.ordered)


async def _next(window: deque[asyncio.Future[Any]], ordered: bool) -> Any:
    if ordered:
        return await window.popleft()
    done, _ = await asyncio.wait(window, return_when=asyncio.FIRST_COMPLETED)
    future = done.pop()
    window.remove(future)
    return await future
