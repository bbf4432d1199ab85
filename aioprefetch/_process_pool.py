"""A shared pool of worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

from ._config import Staff
from ._lane import Kind
from ._processes import Processes
from ._shared_pool import SharedPool


class ProcessPool(SharedPool):
    """Worker processes that calls and any number of Prefetchers share.

    Open it once, with ``async with`` or `start`, in the lifespan of a server say. `run` calls a
    function in a worker; ``Prefetcher(source, pool=pool)`` works on the same ones. Calls go
    ahead of prefetching, and Prefetchers take turns by the time that they have had.

    Parameters
    ----------
    num_proc
        Worker processes, 1 or more.
    mp_context
        Start method or multiprocessing context; by default "forkserver", else "spawn".
    worker_init_fn
        Called once in each worker with its id before anything else; may be async, or a generator
        whose second half runs at the end. Its value is ``worker_info().state``.
    worker_threads
        Threads of BLAS and OpenMP libraries in each worker; None leaves them alone.
    retries
        Times that a call is tried again after the worker that ran it has died; so functions must
        bear being run again.
    shutdown_timeout
        Seconds that closing waits for calls that have been made before workers are killed.

    Raises
    ------
    TypeError, ValueError
        An argument that cannot be meant.
    """

    def __init__(
        self,
        num_proc: int,
        *,
        mp_context: str | BaseContext | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        worker_threads: int | None = 1,
        retries: int = 2,
        shutdown_timeout: float = 5.0,
    ) -> None:
        staff = Staff(num_proc, mp_context, worker_init_fn, worker_threads)
        staff.check(least=1, stacklevel=4)
        super().__init__(staff, retries, shutdown_timeout)

    def _kind(self, loop: asyncio.AbstractEventLoop) -> Kind:
        return Processes(self._staff.context(), loop)
