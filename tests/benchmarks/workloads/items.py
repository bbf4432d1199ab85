"""Small items: what a message costs."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ProcessPoolExecutor

from aioprefetch import ProcessPool
from tests.benchmarks import drive
from tests.benchmarks.contenders import Contender, Job
from tests.benchmarks.data import Numbers
from tests.benchmarks.meter import Meter

from .base import Figures, Goal, Metric, Workload

COST = Metric("cost", "an item", "µs", "less")
CPU = Metric("cpu", "parent's CPU an item", "µs", "less")
ALL_CPU = Metric("all_cpu", "everyone's CPU an item", "µs", "less")


def numbers(contender: Contender, quick: bool) -> Figures:
    meter = Meter(0.4 if quick else 1.5, 0.3 if quick else 0.5, check=int)
    drive.consume(contender, Job(Numbers(), None), meter)
    return {
        "cost": 1e6 / meter.rate,
        "cpu": meter.cpu / meter.count * 1e6,
        "all_cpu": meter.all_cpu / meter.count * 1e6,
    }


def round_trip(contender: Contender, quick: bool) -> Figures:
    """One call at a time."""
    trip = _executor_trip if contender.module == "executor" else _our_trip
    return {"trip": drive.run(contender, trip(contender, 300 if quick else 2000)) * 1e6}


async def _our_trip(contender: Contender, count: int) -> float:
    async with ProcessPool(2) as pool:
        for _ in range(100):
            await pool.run(int, 1)
        start = time.perf_counter()
        for _ in range(count):
            await pool.run(int, 1)
        return (time.perf_counter() - start) / count


async def _executor_trip(contender: Contender, count: int) -> float:
    import multiprocessing

    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as pool:
        for _ in range(100):
            await loop.run_in_executor(pool, int, 1)
        start = time.perf_counter()
        for _ in range(count):
            await loop.run_in_executor(pool, int, 1)
        return (time.perf_counter() - start) / count


WORKLOADS = (
    Workload(
        "one-int",
        "One int an item",
        "`batch_size=None` over a dataset that gives back its index: the price of a message.",
        (
            "ours",
            "ours-single",
            "ours-uvloop",
            "torch",
            "nodes",
            "grain",
            "spdl",
            "tensorpack",
            "tensorpack-zmq",
            "executor",
        ),
        ("ours", "ours-single", "torch", "grain"),
        (COST, CPU, ALL_CPU),
        numbers,
        (
            Goal("cost", 1 / 100, "most", "torch"),
            Goal("cost", 1 / 20, "most", "grain"),
            Goal("cost", 1 / 30, "most", "torch", ours="ours-single"),
            Goal("cost", 1 / 5, "most", "grain", ours="ours-single"),
        ),
        left_out={"floor": "there is nothing to stack"},
    ),
    Workload(
        "round-trip",
        "A round trip",
        "`await pool.run(int, 1)`, one after the other, beside the same call by "
        "`loop.run_in_executor`.",
        ("ours", "ours-uvloop", "executor"),
        ("ours", "executor"),
        (Metric("trip", "there and back", "µs", "less"),),
        round_trip,
        (Goal("trip", 1 / 3, "most", "executor"),),
        left_out=dict.fromkeys(
            ("torch", "nodes", "grain", "spdl", "tensorpack", "tensorpack-zmq"),
            "a loader takes no single call",
        ),
    ),
)
