"""aioprefetch itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aioprefetch import Prefetcher

from . import Job


def make(job: Job) -> Prefetcher:
    return Prefetcher(
        job.dataset,
        batch_size=job.batch_size,
        num_proc=job.num_proc,
        mp_context=job.start,
        ordered=job.ordered,
        num_prefetch=job.window,
        **job.ours,
    )


@asynccontextmanager
async def stream(job: Job) -> AsyncIterator[Prefetcher]:
    async with make(job) as prefetcher:
        yield prefetcher


@asynccontextmanager
async def single(job: Job) -> AsyncIterator[Prefetcher]:
    """Without chunks: one task a message."""
    from aioprefetch import _line

    _line.CHUNK_SECONDS = 0
    async with make(job) as prefetcher:
        yield prefetcher


shared = stream  # the workload gives it a SharedList
