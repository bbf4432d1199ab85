"""How long until there is something: first batches, and many workers."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

from tests.benchmarks import drive
from tests.benchmarks.contenders import Contender, Job
from tests.benchmarks.data import Numbers, Table
from tests.benchmarks.meter import First

from .base import Figures, Goal, Metric, Workload


def first_batch(contender: Contender, quick: bool, *, start: str) -> Figures:
    dataset = Table(60_000, 200)  # 48 MB
    contender.load()  # its import in this process is not its start
    first = First()
    drive.consume(contender, Job(dataset, 64, start=start, nbytes=51_200), first)
    return {"first": first.seconds}


def many(contender: Contender, quick: bool) -> Figures:
    """Sixteen workers, each of which has answered; then one, for what each of them adds."""
    count = 4 if quick else 16
    contender.load()
    many, one = _crowd(contender, count), _crowd(contender, 1)
    descriptors, threads = (here - there for here, there in zip(many.held, one.held, strict=True))
    return {
        "up": many.seconds,
        "descriptors": descriptors / (count - 1),
        "threads": threads / (count - 1),
    }


def _crowd(contender: Contender, count: int) -> _Crowd:
    crowd = _Crowd(count)
    if contender.module == "ours":
        drive.run(contender, _start_ours(contender, count, crowd))
    else:
        drive.consume(contender, Job(Numbers(), None, num_proc=count, window=2), crowd)
    return crowd


class _Crowd:
    """A sink that stops when as many items have come as there are workers."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._start = time.perf_counter()
        self.seconds = 0.0
        self.held = (0, 0)

    def __call__(self, item: object) -> bool:
        self._count -= 1
        if self._count > 0:
            return False
        self.note()
        return True

    def note(self) -> None:
        self.seconds = time.perf_counter() - self._start
        self.held = _held()


async def _start_ours(contender: Contender, count: int, crowd: _Crowd) -> None:
    opened: Any = contender.open(Job(Numbers(), None, num_proc=count))
    async with opened:  # it is entered when every worker is up
        crowd.note()


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


_FIRST = Metric("first", "to the first batch", "s", "less")


def _first_batch(
    start: str, contenders: tuple[str, ...], quick: tuple[str, ...], left_out: dict[str, str]
) -> Workload:
    return Workload(
        f"first-{start}",
        f"The first batch, {start}",
        "From making the loader to its first batch, 2 workers, 48 MB of rows in one numpy "
        "array; the loader's own import in the parent is done before.",
        contenders,
        quick,
        (_FIRST,),
        partial(first_batch, start=start),
        (Goal("first", 1 / 3, "most", "torch"),),
        left_out=left_out,
    )


_FORKS = {
    "tensorpack": "starts its workers by fork only",
    "tensorpack-zmq": "starts its workers by fork only",
    "spdl": "its shared-memory pool works with fork only on Python 3.11",
}

WORKLOADS = (
    _first_batch(
        "spawn", ("ours", "torch", "nodes", "grain", "spdl-pool", "executor"), ("ours",), _FORKS
    ),
    _first_batch(
        "forkserver",
        ("ours", "torch", "nodes", "spdl-pool", "executor"),
        ("ours", "executor"),
        {**_FORKS, "grain": "starts its workers by spawn only"},
    ),
    Workload(
        "sixteen",
        "Sixteen workers",
        "By forkserver, until each has answered; what the parent holds for each more than one. "
        "(A quick run starts four.)",
        ("ours", "torch"),
        ("ours",),
        (
            Metric("up", "until all are up", "s", "less"),
            Metric("descriptors", "descriptors a worker", "", "less"),
            Metric("threads", "threads a worker", "", "less"),
        ),
        many,
        (
            Goal("up", 1, "most", full=True),
            Goal("descriptors", 12, "most", full=True),
            Goal("threads", 2, "most", full=True),
        ),
        left_out={"executor": "starts its workers one by one, when calls come"},
    ),
)
