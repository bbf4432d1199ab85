"""Who takes part. Each is one function in a module here that opens a stream for a job.

The function is a context manager: a plain one gives an iterable, an asynchronous one an
async iterable. A module is imported only by the process that measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

Stream = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]


class CannotRun(Exception):
    """Why a contender is left out of a workload."""


@dataclass(frozen=True)
class Job:
    """A stream to be opened."""

    dataset: Any
    batch_size: int | None
    num_proc: int = 2
    start: str = "forkserver"
    ordered: bool = True
    nbytes: int = 64  # of one batch, or of one item without batches
    ours: Mapping[str, Any] = field(default_factory=dict)  # further arguments of Prefetcher
    window: int | None = None  # batches ahead; None is each contender's own choice


@dataclass(frozen=True)
class Contender:
    """One line of the table below."""

    title: str
    packages: tuple[str, ...]
    module: str
    settings: str
    function: str = "stream"
    uvloop: bool = False

    def load(self) -> ModuleType:
        try:
            return import_module(f"{__name__}.{self.module}")
        except ImportError as error:
            raise CannotRun(f"not installed here: {error}") from error

    def open(self, job: Job) -> Stream:
        opener: Callable[[Job], Stream] = getattr(self.load(), self.function)
        return opener(job)


OURS = "ours"
FLOOR = "floor"

CONTENDERS: dict[str, Contender] = {
    FLOOR: Contender(
        "floor", (), "floor", "the same work in as many plain processes, results thrown away"
    ),
    "idle": Contender("idle loop", (), "floor", "nothing to do"),
    OURS: Contender("aioprefetch", ("aioprefetch",), "ours", "default settings"),
    "ours-single": Contender(
        "aioprefetch, chunks off",
        ("aioprefetch",),
        "ours",
        "one task a message: the internal CHUNK_SECONDS is 0",
        function="single",
    ),
    "ours-uvloop": Contender(
        "aioprefetch on uvloop", ("aioprefetch", "uvloop"), "ours", "default settings", uvloop=True
    ),
    "ours-shared": Contender(
        "aioprefetch with SharedList",
        ("aioprefetch",),
        "ours",
        "the list in shared memory, decoded on access",
        function="shared",
    ),
    "torch": Contender(
        "torch DataLoader",
        ("torch",),
        "torch_loader",
        "forkserver, prefetch_factor 2 (large batches) or 8, tensors through shared memory",
    ),
    "nodes": Contender(
        "torchdata.nodes",
        ("torchdata", "torch"),
        "torchdata_nodes",
        "ParallelMapper(method='process'), prebatch 64 for small items, Prefetcher(4)",
    ),
    "grain": Contender(
        "Grain mp_prefetch",
        ("grain",),
        "grain_loader",
        "batched in the worker straight into shared memory, no reading threads, buffer 1 or 64",
    ),
    "spdl": Contender(
        "SPDL subprocess",
        ("spdl-core",),
        "spdl_loader",
        "a pipeline with 2 threads in one subprocess, SharedMemorySegmentPool (fork: it does "
        "not work otherwise on Python 3.11)",
    ),
    "spdl-pool": Contender(
        "SPDL on a process pool",
        ("spdl-core",),
        "spdl_loader",
        "a stage on a ProcessPoolExecutor",
        function="on_pool",
    ),
    "tensorpack": Contender(
        "tensorpack MultiProcessRunner",
        ("tensorpack",),
        "tensorpack_flow",
        "fork, num_prefetch 8 or 256; independent copies of the data",
    ),
    "tensorpack-zmq": Contender(
        "tensorpack MultiProcessRunnerZMQ",
        ("tensorpack", "pyzmq"),
        "tensorpack_flow",
        "fork, hwm 8 (large) or 50; independent copies of the data",
        function="zmq",
    ),
    "executor": Contender(
        "run_in_executor",
        (),
        "executor",
        "ProcessPoolExecutor, 4 calls a worker in flight, dataset by initializer",
    ),
    "loky": Contender(
        "loky",
        ("loky",),
        "executor",
        "run_in_executor on its ProcessPoolExecutor, 4 calls a worker in flight",
        function="loky",
    ),
}
