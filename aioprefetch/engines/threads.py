"""A shared pool of threads: for work that waits, and for builds without a global lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aioprefetch._config import Staff, check_number
from aioprefetch._lane import Kind
from aioprefetch._shared_pool import SharedPool
from aioprefetch._thread_lane import Threads


class ThreadPool(SharedPool):
    """Threads of this process that calls and any number of Prefetchers share.

    For functions that wait for files or the network, or let other threads run, and for builds
    of Python without a global lock. Nothing is pickled; sources are shared, but for iterables,
    of which each thread has a copy. Functions must be safe to run in several threads at once;
    async ones run on a loop of the thread's own. The process's random generators are left alone:
    draw from `rng`.

    A thread cannot be killed: one that is over its time, or whose caller has gone, is left
    behind, and another takes its place.

    Parameters
    ----------
    num_threads
        Threads, 1 or more.
    worker_init_fn, retries, shutdown_timeout
        As `ProcessPool` has them.

    Raises
    ------
    TypeError, ValueError
        An argument that cannot be meant.
    """

    _in_process = True

    def __init__(
        self,
        num_threads: int,
        *,
        worker_init_fn: Callable[[int], Any] | None = None,
        retries: int = 2,
        shutdown_timeout: float = 5.0,
    ) -> None:
        check_number("num_threads", num_threads, 1)
        staff = Staff(num_threads, None, worker_init_fn, None)
        staff.check(least=1, stacklevel=4)
        super().__init__(staff, retries, shutdown_timeout)

    def _kind(self, loop: asyncio.AbstractEventLoop) -> Kind:
        return Threads()
