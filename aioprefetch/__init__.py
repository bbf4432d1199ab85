"""Prefetch data in worker processes and iterate it with ``async for``."""

import importlib as _importlib
import typing as _typing

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
from ._shared import SharedList

if _typing.TYPE_CHECKING:
    from ._batcher import Batcher
    from ._blocking import blocking
    from ._iterators import PrefetchIterator
    from ._prefetcher import Prefetcher
    from ._process_pool import ProcessPool
    from ._samplers import RandomSampler, SubsetSampler, WeightedSampler
    from ._stats import Stats
    from .engines.executor import ExecutorPool
    from .engines.threads import ThreadPool

__all__ = [
    "Batcher",
    "ExecutorPool",
    "PoolBroken",
    "PrefetchError",
    "PrefetchIterator",
    "Prefetcher",
    "ProcessPool",
    "RandomSampler",
    "SerializationError",
    "SharedList",
    "SkipItem",
    "Stats",
    "SubsetSampler",
    "TaskError",
    "TaskTimeout",
    "ThreadPool",
    "WeightedSampler",
    "WorkerDied",
    "WorkerInfo",
    "WorkerStartError",
    "__version__",
    "blocking",
    "rng",
    "worker_info",
]

__version__ = "0.1.0"


def _publish(name: str, public: _typing.Any) -> None:
    globals()[name] = public
    public.__module__ = __name__  # what users see in tracebacks and reprs


# A worker imports this package too, and none of what only its parent needs.
_IN_THE_PARENT = {
    "Batcher": "_batcher",
    "ExecutorPool": "engines.executor",
    "PrefetchIterator": "_iterators",
    "Prefetcher": "_prefetcher",
    "ProcessPool": "_process_pool",
    "RandomSampler": "_samplers",
    "Stats": "_stats",
    "SubsetSampler": "_samplers",
    "ThreadPool": "engines.threads",
    "WeightedSampler": "_samplers",
    "blocking": "_blocking",
}


def __getattr__(name: str) -> _typing.Any:
    if name in _IN_THE_PARENT:
        module = _importlib.import_module(f"{__name__}.{_IN_THE_PARENT[name]}")
        _publish(name, getattr(module, name))
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


for _name in set(__all__) & set(globals()):
    if hasattr(globals()[_name], "__module__"):
        _publish(_name, globals()[_name])
