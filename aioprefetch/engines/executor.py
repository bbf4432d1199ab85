"""A shared pool on somebody's ``concurrent.futures`` executor."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from aioprefetch._config import Staff
from aioprefetch._lane import Kind
from aioprefetch._remote_lane import Executors, Reach
from aioprefetch._shared_pool import SharedPool


class ExecutorPool(SharedPool):
    """Workers of an executor that calls and any number of Prefetchers share.

    For executors that are there already: loky's, mpi4py's, one that a program shares. Of it
    nothing is used but ``submit``, and it is never shut down. What is not known of such workers
    cannot be done: there are no time-outs, streams are read in this process (``split="parent"``),
    a result is copied, and when the executor breaks, so does the pool. ``ProcessPool`` has none
    of these limits.

    Parameters
    ----------
    executor
        Any ``concurrent.futures.Executor``.
    num_proc
        Calls that are out at a time: as many as it has workers.
    worker_init_fn
        Called in each of its processes, or threads, before anything else.
    retries, shutdown_timeout
        As `ProcessPool` has them.

    Raises
    ------
    TypeError, ValueError
        An argument that cannot be meant.
    """

    _ends_calls = False
    _reads_streams = False

    def __init__(
        self,
        executor: Executor,
        *,
        num_proc: int,
        worker_init_fn: Callable[[int], Any] | None = None,
        retries: int = 2,
        shutdown_timeout: float = 5.0,
    ) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise TypeError(f"executor must have a submit() that gives futures, not {executor!r}")
        if inspect.isgeneratorfunction(worker_init_fn) or inspect.isasyncgenfunction(
            worker_init_fn
        ):
            raise TypeError(
                "worker_init_fn cannot be a generator here: nobody knows when an executor's "
                "worker ends, and its second half would never run"
            )
        staff = Staff(num_proc, None, worker_init_fn, None)
        staff.check(least=1, stacklevel=4)
        super().__init__(staff, retries, shutdown_timeout)
        self._executor = executor

    def _kind(self, loop: asyncio.AbstractEventLoop) -> Kind:
        return Executors(self._reach, pinned=False)

    def _reach(self, number: int) -> Reach:
        return Reach(self._executor.submit, may_block=True)
