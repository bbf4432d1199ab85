"""Batches and arrays by the gigabyte: what a byte costs on its way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from tests.benchmarks import drive
from tests.benchmarks.contenders import FLOOR, Contender, Job
from tests.benchmarks.data import Arrays, Dicts
from tests.benchmarks.meter import Meter

from .base import Figures, Goal, Metric, Workload

IMAGE = (3, 224, 224)
ALL = (
    "floor",
    "ours",
    "torch",
    "nodes",
    "grain",
    "spdl",
    "tensorpack",
    "tensorpack-zmq",
    "executor",
)
RATE = Metric("rate", "throughput", "GB/s", "more")
CPU = Metric("cpu", "parent's CPU a batch", "ms", "less")
ALL_CPU = Metric("all_cpu", "everyone's CPU a batch", "ms", "less")
ONE_BUFFER = Metric("one_buffer", "floor with one buffer a worker", "GB/s", "more")


def images(contender: Contender, quick: bool, *, batch_size: int) -> Figures:
    return stream(contender, quick, Job(Arrays(IMAGE), batch_size, nbytes=_size(batch_size)))


def arrays(contender: Contender, quick: bool, *, side: int) -> Figures:
    return stream(contender, quick, Job(Arrays((side, side)), None, nbytes=side * side * 4))


def dicts(contender: Contender, quick: bool) -> Figures:
    nbytes = _size(32) + 32 * (224 * 224 + 168)
    job = Job(Dicts(IMAGE), 32, nbytes=nbytes)
    return stream(contender, quick, job, key="image")


def _size(batch_size: int) -> int:
    return Arrays(IMAGE).nbytes * batch_size


def stream(contender: Contender, quick: bool, job: Job, key: str | None = None) -> Figures:
    """Gigabytes a second, and the parent's processor time for each batch."""
    seconds = 0.5 if quick else 1.5
    if contender.title == FLOOR:
        return _floor(contender, job, seconds)
    meter = Meter(seconds, 0.3 if quick else 0.5, check=partial(_check, job.batch_size, key))
    drive.consume(contender, job, meter)
    return {
        "rate": meter.rate * job.nbytes / 1e9,
        "cpu": meter.cpu / meter.count * 1e3,
        "all_cpu": meter.all_cpu / meter.count * 1e3,
    }


def _floor(contender: Contender, job: Job, seconds: float) -> Figures:
    run: Callable[[Job, float, int], tuple[float, float]] = contender.load().run
    rate, cpu = run(job, seconds, 4)
    hot, _ = run(job, seconds, 1)
    return {
        "rate": rate * job.nbytes / 1e9,
        "all_cpu": cpu * 1e3,
        "one_buffer": hot * job.nbytes / 1e9,
    }


def _check(batch_size: int | None, key: str | None, batch: Any) -> None:
    """The batch has the items that it should: by their first numbers."""
    array = batch if key is None else batch[key]
    if batch_size is None:
        assert float(array[0, 0]) in range(64)
        return
    firsts = [float(item[0, 0, 0]) for item in array]
    assert len(firsts) == batch_size
    steps = {(after - before) % 64 for before, after in pairwise(firsts)}
    assert len(steps) == 1, firsts  # 1, or the number of workers where each has a slice


_BATCHES = (
    Goal("rate", 0.9, "least", "floor"),
    Goal("rate", 3, "least", "best"),
)

WORKLOADS = (
    Workload(
        "batch-38mb",
        "38.5 MB batches",
        "64 float32 images of 3×224×224, stacked by the default collate. The items are ready "
        "arrays, so that all the work is the stacking.",
        ALL,
        ("floor", "ours", "torch"),
        (RATE, CPU, ALL_CPU, ONE_BUFFER),
        partial(images, batch_size=64),
        (
            *_BATCHES,
            Goal("rate", 6, "least", "torch"),
            Goal("cpu", 1 / 15, "most", "torch"),
        ),
    ),
    Workload(
        "batch-5mb",
        "4.8 MB batches",
        "8 of the same images.",
        ALL,
        ("floor", "ours"),
        (RATE, CPU, ALL_CPU, ONE_BUFFER),
        partial(images, batch_size=8),
        (*_BATCHES, Goal("rate", 10, "least", "torch")),
    ),
    Workload(
        "array-1mb",
        "1 MiB arrays, item by item",
        "float32 arrays of 512×512 with `batch_size=None`.",
        ("floor", "ours", "torch", "spdl", "tensorpack-zmq"),
        ("floor", "ours"),
        (RATE, CPU, ALL_CPU, ONE_BUFFER),
        partial(arrays, side=512),
    ),
    Workload(
        "array-8mb",
        "8 MiB arrays, item by item",
        "float32 arrays of 1448×1448 with `batch_size=None`.",
        ("floor", "ours", "torch", "spdl", "tensorpack-zmq"),
        (),
        (RATE, CPU, ALL_CPU, ONE_BUFFER),
        partial(arrays, side=1448),
    ),
    Workload(
        "dict-batch",
        "A dict of arrays",
        "32 dicts of an image, a mask, boxes and a label, collated key by key.",
        ("floor", "ours", "torch", "grain", "spdl"),
        (),
        (RATE, CPU, ALL_CPU, ONE_BUFFER),
        dicts,
        (Goal("rate", 3, "least", "best"),),
        left_out={
            "tensorpack": "BatchData takes lists of components, not dicts",
            "tensorpack-zmq": "BatchData takes lists of components, not dicts",
        },
    ),
)
