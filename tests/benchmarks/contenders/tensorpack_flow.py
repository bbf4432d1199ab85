"""tensorpack's parallel runners. Every worker runs a copy of its own of the whole flow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorpack.dataflow import BatchData, DataFlow, MultiProcessRunner, MultiProcessRunnerZMQ

from . import CannotRun, Job

LARGE = 2**20


class _Flow(DataFlow):  # type: ignore[misc]
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[list[Any]]:
        start = os.getpid() % 64  # copies that begin apart, as random ones would be
        for index in range(start, len(self._dataset)):
            yield [self._dataset[index]]


def _flow(job: Job) -> Any:
    if job.start != "forkserver":
        raise CannotRun("starts its workers by fork only")
    if len(job.dataset) < 10**6:
        raise CannotRun("runs independent copies: an epoch is not each item once")
    if isinstance(job.dataset[0], dict) and job.batch_size is not None:
        raise CannotRun("BatchData takes lists of components, not dicts")
    flow = _Flow(job.dataset)
    return flow if job.batch_size is None else BatchData(flow, job.batch_size)


@contextmanager
def stream(job: Job) -> Iterator[Any]:
    runner = MultiProcessRunner(_flow(job), 8 if job.nbytes > LARGE else 256, job.num_proc)
    runner.reset_state()
    yield (point[0] for point in runner)


@contextmanager
def zmq(job: Job) -> Iterator[Any]:
    hwm = 8 if job.nbytes > LARGE else 50
    runner = MultiProcessRunnerZMQ(_flow(job), job.num_proc, hwm=hwm)
    runner.reset_state()
    yield (point[0] for point in runner)
