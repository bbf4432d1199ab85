"""What workers cost that have little to do: many of them, or idle ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from tests.benchmarks import drive
from tests.benchmarks.contenders import Contender, Job
from tests.benchmarks.data import Numbers, Sleeps
from tests.benchmarks.meter import Meter, workers_nanoseconds

from .base import Figures, Goal, Metric, Workload

COUNTS = (1, 2, 4, 8, 16)


def growing(contender: Contender, quick: bool) -> Figures:
    """The parent's processor time a batch as workers are added."""
    figures: Figures = {}
    for count in (1, 16) if quick else COUNTS:
        meter = Meter(0.4 if quick else 0.8, warm=0.2)
        job = Job(Sleeps(10**9, 0.02), 1, num_proc=count, nbytes=16)
        drive.consume(contender, job, meter)
        figures[f"cpu_{count}"] = meter.cpu / meter.count * 1e6
    figures["growth"] = figures["cpu_16"] / figures["cpu_1"]
    return figures


def idle(contender: Contender, quick: bool) -> Figures:
    """Processor time of all processes while nothing is asked for."""
    seconds = 1.0 if quick else 2.0
    opened = contender.open(Job(Numbers(), None, window=8))
    if isinstance(opened, AbstractAsyncContextManager):
        share: float = drive.run(contender, _idle_on_loop(opened, seconds))
    else:
        share = _idle(opened, seconds)
    return {"share": share * 100}


async def _idle_on_loop(opened: AbstractAsyncContextManager[Any], seconds: float) -> float:
    async with opened as stream:
        iterator = aiter(stream)
        for _ in range(5):
            await anext(iterator)
        await asyncio.sleep(1)  # the window fills
        use = _Use()
        await asyncio.sleep(seconds)
        return use.seconds() / seconds


def _idle(opened: Any, seconds: float) -> float:
    with opened as stream:
        iterator = iter(stream)
        for _ in range(5):
            next(iterator)
        time.sleep(1)
        use = _Use()
        time.sleep(seconds)
        return use.seconds() / seconds


class _Use:
    """Processor time from its making on, without what measuring takes."""

    def __init__(self) -> None:
        self._workers = workers_nanoseconds()
        self._own = time.process_time()

    def seconds(self) -> float:
        own = time.process_time() - self._own
        return own + (workers_nanoseconds() - self._workers) / 1e9


def _curve() -> Iterator[Metric]:
    for count in COUNTS:
        yield Metric(f"cpu_{count}", f"parent's CPU a batch, num_proc={count}", "µs", "less")
    yield Metric("growth", "from 1 worker to 16", "×", "less")


WORKLOADS = (
    Workload(
        "idle",
        "An idle pool",
        "Two workers, five items taken, a second later: processor time of all processes, as a "
        "share of one core.",
        ("ours", "torch", "nodes", "spdl", "executor"),
        ("ours",),
        (Metric("share", "of a core", "%", "less"),),
        idle,
        (Goal("share", 0.1, "most"),),
        left_out=dict.fromkeys(
            ("tensorpack", "tensorpack-zmq"),
            "its workers run on until its queues are full, and it has no close",
        ),
    ),
    Workload(
        "growing-pool",
        "As workers are added",
        "Tasks that sleep 20 ms, 1 to 16 workers: the parent's CPU for each batch.",
        ("ours", "executor"),
        ("ours",),
        tuple(_curve()),
        growing,
        (Goal("growth", 1.25, "most"),),
        axis="workers",
        left_out={"torch": "starting 16 workers that import torch takes half a minute here"},
    ),
)
