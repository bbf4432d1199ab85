"""torch.utils.data.DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from . import Job


@contextmanager
def stream(job: Job) -> Iterator[Any]:
    loader = DataLoader(
        job.dataset,
        batch_size=job.batch_size,
        num_workers=job.num_proc,
        multiprocessing_context=job.start,
        prefetch_factor=job.window or (2 if job.nbytes > 2**24 else 8),
        in_order=job.ordered,
        shuffle=job.ours.get("shuffle", False),
        timeout=job.ours.get("task_timeout", 0),
    )
    yield loader
