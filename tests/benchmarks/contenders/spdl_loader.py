"""SPDL: a pipeline in a subprocess with its shared-memory pool; a stage on a process pool."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

from tests.benchmarks.data import Fetch, Indices

from . import CannotRun, Job
from .executor import install, work


def _order(job: Job) -> str:
    return "input" if job.ordered else "completion"


@contextmanager
def stream(job: Job) -> Iterator[Any]:
    if job.start != "forkserver" or job.num_proc != 2:
        raise CannotRun("its shared-memory pool works with fork only on Python 3.11")
    config = (
        PipelineBuilder()
        .add_source(Indices(len(job.dataset), job.batch_size))
        .pipe(Fetch(job.dataset), concurrency=job.num_proc, output_order=_order(job))
        .add_sink(4)
        .get_config()
    )
    yield run_pipeline_in_subprocess(
        config,
        num_threads=job.num_proc,
        buffer_size=4,
        mp_context="fork",
        arena=SharedMemorySegmentPool(job.nbytes + 65536, 8) if job.nbytes > 4096 else None,
    )


@contextmanager
def on_pool(job: Job) -> Iterator[Any]:
    context = multiprocessing.get_context(job.start)
    with ProcessPoolExecutor(job.num_proc, context, install, (job.dataset,)) as pool:
        pipeline = (
            PipelineBuilder()
            .add_source(Indices(len(job.dataset), job.batch_size))
            .pipe(work, executor=pool, concurrency=4 * job.num_proc, output_order=_order(job))
            .add_sink(4)
            .build(num_threads=1)
        )
        with pipeline.auto_stop():
            yield pipeline
        pool.shutdown(cancel_futures=True)
