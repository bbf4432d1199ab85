"""A shared pool on the workers of a Dask cluster.

A worker of ours is an actor there, so that what it has loaded and the streams that it reads stay
from one message to the next. Placement, the transport between hosts and who is alive are Dask's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from aioprefetch._config import Staff
from aioprefetch._errors import WorkerStartError
from aioprefetch._lane import Kind
from aioprefetch._remote_lane import Executors, Reach
from aioprefetch._shared_pool import SharedPool
from aioprefetch._visit import Ask, Parcelled, Setup, visit

_UNKNOWN = 0  # workers, until the cluster is asked
_START = 60.0  # seconds for a worker of the cluster to make an actor
_LOOK = 1.0  # seconds of waiting for it after which that worker is looked for


class Post:
    """The actor: our worker in one of the cluster's."""

    def visit(self, ask: Ask, setup: Setup | None = None) -> Parcelled | None:
        return visit(ask, setup)


class DaskPool(SharedPool):
    """Workers of a Dask cluster that calls and any number of Prefetchers share.

    Order, seeds, state, errors and retries are the same as on this machine. A worker that is
    lost is a death: another of the cluster, one that has joined since for instance, takes its
    place and does again what it held.

    Parameters
    ----------
    client
        A ``distributed.Client``, synchronous or asynchronous; it is left open.
    num_proc
        Workers to use; by default as many as the cluster has when the pool is first opened.
    worker_init_fn, retries, shutdown_timeout
        As `ProcessPool` has them.

    Raises
    ------
    TypeError, ValueError
        An argument that cannot be meant.
    """

    _ends_calls = False

    def __init__(
        self,
        client: Any,
        *,
        num_proc: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        retries: int = 2,
        shutdown_timeout: float = 5.0,
    ) -> None:
        if not hasattr(client, "scheduler_info"):
            raise TypeError(f"client must be a distributed.Client, not {client!r}")
        staff = Staff(_UNKNOWN if num_proc is None else num_proc, None, worker_init_fn, None)
        staff.check(least=_UNKNOWN if num_proc is None else 1, stacklevel=4)
        super().__init__(staff, retries, shutdown_timeout)
        self._client = client

    @property
    def num_proc(self) -> int:
        """Workers that it uses; known once it has been opened, if it was not given."""
        if self._staff.num_proc == _UNKNOWN:
            raise RuntimeError(
                "how many workers the cluster has is asked when the pool is opened: open it "
                "first, or give num_proc"
            )
        return self._staff.num_proc

    async def start(self) -> None:
        if self._staff.num_proc == _UNKNOWN:
            self._staff = replace(self._staff, num_proc=await self._size())
        await super().start()

    async def _size(self) -> int:
        """How many workers the cluster has."""
        asking = asyncio.run_coroutine_threadsafe(
            self._client.scheduler.identity(n_workers=-1), self._client.loop.asyncio_loop
        )
        size = len((await asyncio.wrap_future(asking))["workers"])
        if size == 0:
            raise WorkerStartError(
                "the cluster has no workers yet: wait for them (client.wait_for_workers), or "
                "give num_proc"
            )
        return size

    def _kind(self, loop: asyncio.AbstractEventLoop) -> Kind:
        return Executors(_Cluster(self._client).hire, pinned=True)


class _Cluster:
    """Which of our workers is where."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop
        self._places: dict[int, str] = {}  # of our workers, by number

    def hire(self, number: int) -> Reach:
        """A worker in the place that has fewest; on the keeper, which may wait."""
        self._places.pop(number, None)
        making = asyncio.run_coroutine_threadsafe(self._make(number), self._loop)
        try:
            actor = making.result(_START)
        finally:
            making.cancel()

        async def ask(*args: Any) -> Any:
            return await actor.visit(*args)

        def submit(_: Callable[..., Any], *args: Any) -> Future[Any]:
            return asyncio.run_coroutine_threadsafe(ask(*args), self._loop)

        return Reach(submit)

    async def _make(self, number: int) -> Any:
        workers = await self._workers()
        if not workers:
            raise OSError("the cluster has no worker left")
        taken = Counter(self._places.values())
        address = self._places[number] = min(workers, key=lambda address: taken[address])
        future = self._client.submit(
            Post, workers=[address], allow_other_workers=False, actor=True, pure=False, retries=0
        )
        made = asyncio.ensure_future(future._result())
        # The scheduler waits for ever for a worker that has left, and tells a client nothing.
        while not made.done():
            await asyncio.wait([made], timeout=_LOOK)
            if not made.done() and address not in await self._workers():
                made.cancel()
                raise OSError(f"the cluster has lost its worker {address}")
        return made.result()

    async def _workers(self) -> list[str]:
        """The addresses of those that the cluster has."""
        return sorted((await self._client.scheduler.identity(n_workers=-1))["workers"])
