"""Grain: mp_prefetch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grain

from . import CannotRun, Job


@contextmanager
def stream(job: Job) -> Iterator[Any]:
    if job.start != "spawn" and job.ours.get("exact_start"):
        raise CannotRun("starts its workers by spawn only")
    dataset = grain.MapDataset.source(job.dataset)
    if job.ours.get("shuffle"):
        dataset = dataset.shuffle(seed=0)
    flow = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if job.batch_size is not None:
        flow = flow.batch(job.batch_size)
    options = grain.MultiprocessingOptions(
        num_workers=job.num_proc,
        per_worker_buffer_size=job.window or (64 if job.nbytes <= 4096 else 1),
    )
    iterator = iter(flow.mp_prefetch(options))
    yield iterator
    iterator.close()
