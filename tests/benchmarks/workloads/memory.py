"""What is held in memory: datasets that are shipped, and thousands of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil

from tests.benchmarks import drive
from tests.benchmarks.contenders import Contender, Job
from tests.benchmarks.data import Arrays, Sums
from tests.benchmarks.meter import family, pss

from .base import Figures, Goal, Metric, Workload


def shipped(contender: Contender, quick: bool) -> Figures:
    """One dataset in four spawned workers that read all of it."""
    dataset = Sums(100_000 if quick else 200_000, 1000)
    contender.load()
    parent = psutil.Process()
    before = pss(parent)  # the original is in it
    job = Job(dataset, 1000, num_proc=4, start="spawn")
    at_end = _AtCount(len(dataset) // 1000, lambda: pss(parent) - before + sum(map(pss, family())))
    drive.consume(contender, job, at_end)
    return {
        "copies": at_end.value / dataset.nbytes,
        "bytes": at_end.value / 1e6,
    }


class _AtCount:
    """A sink that looks at something when so many items have come."""

    def __init__(self, count: int, look: Any) -> None:
        self._left = count
        self._look = look
        self.value = 0.0

    def __call__(self, item: object) -> bool:
        self._left -= 1
        if self._left == 0:
            self.value = self._look()
        return self._left == 0


def flat(contender: Contender, quick: bool) -> Figures:
    """How memory grows over thousands of batches, after the first tenth."""
    count = 2000 if quick else 10_000
    samples = _Samples(count)
    drive.consume(contender, Job(Arrays((64, 64)), 16, nbytes=2**18), samples)
    return samples.figures()


class _Samples:
    """A sink that notes the memory of the family a hundred times on its way."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen = 0
        self._at: list[tuple[int, int, int]] = []

    def __call__(self, item: object) -> bool:
        self._seen += 1
        if self._seen % (self._count // 100) == 0:
            workers = sum(process.memory_info().rss for process in family())
            self._at.append((self._seen, psutil.Process().memory_info().rss, workers))
        return self._seen >= self._count

    def figures(self) -> Figures:
        seen, parent, workers = np.array(self._at[10:], float).T
        return {
            "parent": float(np.polyfit(seen, parent, 1)[0]),
            "workers": float(np.polyfit(seen, workers, 1)[0]),
            "grown": (parent[-1] - parent[0] + workers[-1] - workers[0]) / 1e6,
        }


WORKLOADS = (
    Workload(
        "shipped",
        "A dataset of 800 MB in four workers",
        "A numpy array shipped to 4 spawned workers that read every byte. Counted is the "
        "memory (PSS) of all workers and whatever the parent has more than its own original. "
        "(A quick run has 400 MB: there the Python processes themselves weigh twice as much.)",
        ("ours", "torch", "executor"),
        ("ours",),
        (
            Metric("copies", "memory", "× one copy", "less"),
            Metric("bytes", "memory", "MB", "less"),
        ),
        shipped,
        (Goal("copies", 1.15, "most", full=True),),
        left_out=dict.fromkeys(("tensorpack", "tensorpack-zmq"), "starts its workers by fork only"),
    ),
    Workload(
        "flat",
        "Memory over 10,000 batches",
        "Batches of 256 KiB; the slope of a line through 90 samples of memory (RSS) after the "
        "first tenth. (A quick run takes 2,000.)",
        ("ours",),
        ("ours",),
        (
            Metric("parent", "parent grows", "bytes a batch", "less"),
            Metric("workers", "workers grow", "bytes a batch", "less"),
            Metric("grown", "all in all", "MB", "less"),
        ),
        flat,
        (Goal("parent", 100, "most"), Goal("workers", 200, "most")),
    ),
)
