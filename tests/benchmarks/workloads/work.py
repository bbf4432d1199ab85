"""Real work: photographs, records, requests, uneven items."""

from __future__ import annotations

import time

from tests.benchmarks import drive
from tests.benchmarks.contenders import Contender, Job
from tests.benchmarks.data import Photos, Records, Sleeps, ThreadedWaits, Waits, make_records
from tests.benchmarks.meter import Meter

from .base import Figures, Goal, Metric, Workload


def photos(contender: Contender, quick: bool) -> Figures:
    job = Job(Photos(), 32, nbytes=32 * 3 * 224 * 224 * 4)
    if contender.title == "floor":
        rate, cpu = contender.load().run(job, 0.8 if quick else 2.0, 4)
        return {"rate": rate * 32, "all_cpu": cpu * 1e3 / 32}
    meter = Meter(0.8 if quick else 2.0, 0.3)
    drive.consume(contender, job, meter)
    return {
        "rate": meter.rate * 32,
        "cpu": meter.cpu / meter.count * 1e3 / 32,
        "all_cpu": meter.all_cpu / meter.count * 1e3 / 32,
    }


def records(contender: Contender, quick: bool) -> Figures:
    """Each for itself, as many as time allows."""
    count = 50_000 if quick else 200_000
    contender.load()
    dataset = _shared(count) if contender.function == "shared" else Records(count)
    meter = Meter(0.4 if quick else 1.5, 0.2)
    drive.consume(contender, Job(dataset, None), meter)
    return {"first": meter.first, "cost": 1e6 / meter.rate}


def _shared(count: int) -> object:
    from aioprefetch import SharedList

    return SharedList(make_records(count))


def requests(contender: Contender, quick: bool) -> Figures:
    """Items that wait 10 ms each, 16 at once in each of two workers."""
    dataset = Waits(0.01) if contender.module == "ours" else ThreadedWaits(0.01)
    meter = Meter(0.5 if quick else 1.2, 0.3)
    drive.consume(contender, Job(dataset, 64, nbytes=512), meter)
    return {"rate": meter.rate * 64, "ideal": meter.rate * 64 / (32 / 0.01)}


def skew(contender: Contender, quick: bool) -> Figures:
    """How much longer than its ideal the work takes, from the 50th item on."""
    count, unit = (1000, 0.0005) if quick else (2000, 0.001)
    dataset = Sleeps(count, unit, 100 * unit, 100)
    spans = _Spans(count)
    drive.consume(contender, Job(dataset, None, ordered=False), spans)
    return spans.figures(workers=2)


class _Spans:
    """A sink of (start, end) pairs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._spans: list[tuple[float, float]] = []
        self._from = 0.0

    def __call__(self, span: tuple[float, float]) -> bool:
        self._spans.append((float(span[0]), float(span[1])))
        if len(self._spans) == 50:
            self._from = time.monotonic()
        return len(self._spans) >= self._count

    def figures(self, workers: int) -> Figures:
        makespan = time.monotonic() - self._from
        work = sum(max(0.0, end - max(start, self._from)) for start, end in self._spans)
        return {"makespan": makespan / (work / workers)}


WORKLOADS = (
    Workload(
        "skew",
        "One item in a hundred takes a hundred times longer",
        "2,000 items that sleep 1 ms, some 100 ms, `batch_size=None`, delivered as completed: "
        "the time they take over the time that two never idle workers would.",
        ("ours", "torch", "nodes", "grain", "executor"),
        ("ours",),
        (Metric("makespan", "over the ideal", "×", "less"),),
        skew,
        (Goal("makespan", 1.1, "most"),),
        left_out=dict.fromkeys(
            ("tensorpack", "tensorpack-zmq"),
            "runs independent copies: an epoch is not each item once",
        ),
    ),
    Workload(
        "photos",
        "Photographs",
        "JPEG files of scikit-image's photographs, decoded, cropped, resized to 224×224, "
        "flipped and scaled to float32, in batches of 32: the processor is the limit.",
        ("floor", "ours", "torch", "grain", "spdl"),
        (),
        (
            Metric("rate", "throughput", "images/s", "more"),
            Metric("cpu", "parent's CPU an image", "ms", "less"),
            Metric("all_cpu", "everyone's CPU an image", "ms", "less"),
        ),
        photos,
        (Goal("rate", 0.9, "least", "floor"),),
    ),
    Workload(
        "records",
        "200,000 small dicts",
        "A list of dicts as the source, each delivered by itself; 2 workers. "
        "(A quick run has 50,000.)",
        ("ours", "ours-shared", "torch", "grain", "executor"),
        ("ours",),
        (
            Metric("first", "to the first", "s", "less"),
            Metric("cost", "each after it", "µs", "less"),
        ),
        records,
    ),
    Workload(
        "requests",
        "Items that are awaited",
        "Each item waits 10 ms, as a request does; batches of 64, two workers with 16 items in "
        "flight each: `async def __getitem__` with us, `__getitems__` on 16 threads inside a "
        "worker with the others. 3,200 a second is the ideal.",
        ("ours", "torch", "executor"),
        ("ours",),
        (
            Metric("rate", "throughput", "items/s", "more"),
            Metric("ideal", "of the ideal", "×", "more"),
        ),
        requests,
        (Goal("rate", 1, "least", "torch"),),
    ),
)
