"""Whether the event loop notices that data streams through it."""

from __future__ import annotations

import asyncio

from tests.benchmarks import drive
from tests.benchmarks.contenders import Contender, Job
from tests.benchmarks.data import Arrays
from tests.benchmarks.meter import Heartbeat, Meter

from .base import Figures, Goal, Metric, Workload


def lateness(contender: Contender, quick: bool) -> Figures:
    seconds = 1.0 if quick else 2.0
    work = _idle if contender.title == "idle loop" else _streaming
    heart = drive.run(contender, work(contender, seconds))
    return {
        "p99": heart.percentile(99) * 1e3,
        "median": heart.percentile(50) * 1e3,
        "worst": max(heart.late) * 1e3,
    }


async def _idle(contender: Contender, seconds: float) -> Heartbeat:
    async with Heartbeat() as heart:
        await asyncio.sleep(seconds)
    return heart


async def _streaming(contender: Contender, seconds: float) -> Heartbeat:
    """The heart's beats while items stream; those of the start are left out."""
    meter = Meter(seconds)
    async with Heartbeat() as heart:
        opened = contender.open(Job(Arrays((512, 512)), None, nbytes=2**20))

        def sink(item: object) -> bool:
            warming = meter.count == 0
            enough = meter(item)
            if warming:
                heart.late.clear()
            return enough

        await drive.consume_on_loop(opened, sink)
        return heart


WORKLOADS = (
    Workload(
        "lateness",
        "How late the event loop is",
        "A task sleeps 2 ms again and again and notes how late it is woken, while 1 MiB arrays "
        "stream as fast as they come. Loaders that are not asynchronous are asked in a thread "
        "for each item. `idle` is a loop with nothing else to do.",
        ("idle", "ours", "torch", "grain", "executor"),
        ("idle", "ours"),
        (
            Metric("p99", "99th percentile", "ms", "less"),
            Metric("median", "median", "ms", "less"),
            Metric("worst", "worst", "ms", "less"),
        ),
        lateness,
        (Goal("p99", 2.0, "most", "idle", difference=True),),
    ),
)
