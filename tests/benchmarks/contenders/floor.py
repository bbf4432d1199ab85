"""The floor: the same work and the same np.stack, in as many plain processes, without transport.

A worker rotates over as many warm buffers as a loader's window gives it, or over one.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

from tests.benchmarks.data import collate, fetch

from . import Job


def run(job: Job, seconds: float, buffers: int) -> tuple[float, float]:
    """Batches a second of all workers together, and processor seconds a batch."""
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(job.num_proc)
    pipes = [context.Pipe(duplex=False) for _ in range(job.num_proc)]
    workers = [
        context.Process(target=_work, args=(job, seconds, buffers, barrier, writer), daemon=True)
        for _, writer in pipes
    ]
    for worker in workers:
        worker.start()
    answers = [reader.recv() for reader, _ in pipes]
    for worker in workers:
        worker.join()
    return (
        sum(count / elapsed for count, elapsed, _ in answers),
        sum(cpu for *_, cpu in answers) / sum(count for count, *_ in answers),
    )


def _work(job: Job, seconds: float, buffers: int, barrier: Barrier, answer: Connection) -> None:
    size = job.batch_size or 1
    outs = [collate(fetch(job.dataset, range(size))) for _ in range(buffers)]
    for out in outs:
        _batch(job.dataset, 0, size, out)
    barrier.wait()
    start, cpu, count = time.perf_counter(), time.process_time(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        _batch(job.dataset, count * size, size, outs[count % buffers])
        count += 1
    answer.send((count, elapsed, time.process_time() - cpu))


def _batch(dataset: Any, start: int, size: int, out: Any) -> None:
    collate(fetch(dataset, range(start, start + size)), out)
