"""The order of indices: what it costs to shuffle very many."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

from tests.benchmarks import drive
from tests.benchmarks.contenders import Contender, Job
from tests.benchmarks.data import Numbers

from .base import Figures, Goal, Metric, Workload

SIZES = (3, 5, 7, 9)  # powers of ten


def trillion(contender: Contender, quick: bool) -> Figures:
    """What the first batch costs the parent when workers are up."""
    planned: dict[str, float] = drive.run(contender, _first_of_a_trillion(contender))
    return planned


async def _first_of_a_trillion(contender: Contender) -> Figures:
    with_shuffle = await _first_in_order(contender, 10**12, shuffle=True)
    without = await _first_in_order(contender, 10**12, shuffle=False)
    tracemalloc.start()
    await _first_in_order(contender, 10**12, shuffle=True)
    _, peak = tracemalloc.get_traced_memory()
    return {
        "cpu": with_shuffle[1] * 1e3,
        "more": (with_shuffle[1] - without[1]) * 1e3,
        "first": with_shuffle[0] * 1e3,
        "peak": peak / 1e6,
    }


async def _first_in_order(
    contender: Contender, length: int, *, shuffle: bool
) -> tuple[float, float]:
    """Seconds and processor seconds from the call of aiter to the first batch."""
    opened: Any = contender.open(Job(Numbers(length), 64, ours={"shuffle": shuffle}))
    async with opened as stream:
        tracemalloc.reset_peak()
        start, cpu = time.perf_counter(), time.process_time()
        await anext(aiter(stream))
        return time.perf_counter() - start, time.process_time() - cpu


def growing(contender: Contender, quick: bool) -> Figures:
    """The first batch and the ones after it, for datasets of 10^3 to 10^9."""
    figures: Figures = {}
    drive.consume(contender, Job(Numbers(1000), 64), _Cost(1))  # what only the first start costs
    for power in SIZES:
        if contender.module == "torch_loader" and power > 7:
            continue  # torch.randperm(10**9).tolist() takes 40 GB
        cost = _Cost(8 if quick else 15)
        job = Job(Numbers(10**power), 64, ours={"shuffle": True})
        drive.consume(contender, job, cost)
        figures[f"first_{power}"] = cost.first * 1e3
        figures[f"batch_{power}"] = cost.each * 1e6
    return figures


class _Cost:
    """A sink: processor time of the parent up to the first batch, and for each after it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._start = time.process_time()
        self._seen = 0
        self.first = self.each = 0.0

    def __call__(self, item: object) -> bool:
        self._seen += 1
        if self._seen == 1:
            self.first = time.process_time() - self._start
            self._start = time.process_time()
        self.each = (time.process_time() - self._start) / self._count
        return self._seen > self._count


def _curves() -> Iterator[Metric]:
    for power in SIZES:
        yield Metric(f"first_{power}", f"10^{power}: parent's CPU to the first batch", "ms", "less")
    for power in SIZES:
        yield Metric(f"batch_{power}", f"10^{power}: a batch", "µs", "less")


WORKLOADS = (
    Workload(
        "trillion",
        "10^12 shuffled indices",
        "The parent's CPU and memory (tracemalloc's peak) from `aiter` to the first batch of "
        "64, workers being up; and how much of that is more than without shuffling.",
        ("ours",),
        ("ours",),
        (
            Metric("more", "CPU for shuffling", "ms", "less"),
            Metric("cpu", "parent's CPU", "ms", "less"),
            Metric("first", "to the first batch", "ms", "less"),
            Metric("peak", "memory", "MB", "less"),
        ),
        trillion,
        (Goal("cpu", 10, "most"), Goal("peak", 1, "most")),
        left_out={
            "torch": "RandomSampler holds all indices: it asks for 8 TB",
            "grain": "shuffles lazily too; its first batch cannot be told from its workers' start",
        },
    ),
    Workload(
        "growing-dataset",
        "As the dataset grows",
        "Shuffled batches of 64 ints out of 10^3 to 10^9: the parent's CPU up to the first "
        "batch (starting workers included), and for each of the following. torch's sampler "
        "would take 40 GB for 10^9.",
        ("ours", "torch"),
        ("ours",),
        tuple(_curves()),
        growing,
        axis="indices",
    ),
)
