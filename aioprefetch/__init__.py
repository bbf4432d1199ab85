"""Prefetch data in worker processes and iterate it with ``async for``."""

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
    from ._prefetcher import Prefetcher, PrefetchIterator

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


def _publish(name: str, public: _typing.Any) -> None:
    globals()[name] = public
    public.__module__ = __name__  # what users see in tracebacks and reprs


def __getattr__(name: str) -> _typing.Any:
    # A worker imports this package too, and none of what it takes to start workers.
    if name in ("PrefetchIterator", "Prefetcher"):
        from . import _prefetcher

        _publish(name, getattr(_prefetcher, name))
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


for _name in set(__all__) & set(globals()):
    if hasattr(globals()[_name], "__module__"):
        _publish(_name, globals()[_name])
