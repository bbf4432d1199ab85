"""Prefetch data in worker processes and iterate it with ``async for``."""

from ._errors import (
    PoolBroken,
    PrefetchError,
    SerializationError,
    SkipItem,
    TaskError,
    TaskTimeout,
    WorkerDied,
    WorkerStartError,
)
from ._place import WorkerInfo, rng, worker_info
from ._prefetcher import Prefetcher, PrefetchIterator
from ._shared import SharedList

__all__ = [
    "PoolBroken",
    "PrefetchError",
    "PrefetchIterator",
    "Prefetcher",
    "SerializationError",
    "SharedList",
    "SkipItem",
    "TaskError",
    "TaskTimeout",
    "WorkerDied",
    "WorkerInfo",
    "WorkerStartError",
    "__version__",
    "rng",
    "worker_info",
]

__version__ = "0.1.0"

for _name in __all__:
    _public = globals()[_name]
    if hasattr(_public, "__module__"):
        _public.__module__ = __name__  # what users see in tracebacks and reprs
