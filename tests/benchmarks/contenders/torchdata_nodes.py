"""torchdata.nodes: ParallelMapper on processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torchdata.nodes as tn
from torch.utils.data import default_collate

from tests.benchmarks.data import Indices, fetch

from . import Job

RARELY = 1_000_000  # a snapshot of the state at every step would be measured too


class _Fetch:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, indices: Any) -> Any:
        if isinstance(indices, int):
            return self._dataset[indices]
        return default_collate(fetch(self._dataset, indices))


@contextmanager
def stream(job: Job) -> Iterator[Any]:
    node = tn.ParallelMapper(
        tn.IterableWrapper(Indices(len(job.dataset), job.batch_size)),
        _Fetch(job.dataset),
        num_workers=job.num_proc,
        in_order=job.ordered,
        method="process",
        multiprocessing_context=job.start,
        snapshot_frequency=RARELY,
        prebatch=64 if job.nbytes <= 4096 and job.window is None else None,
    )
    node = tn.Prefetcher(node, prefetch_factor=4, snapshot_frequency=RARELY)
    yield tn.Loader(node)
