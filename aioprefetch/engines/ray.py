"""A shared pool on the workers of a Ray cluster.

A worker of ours is an actor there. Placement, the transport between hosts and who is alive are
Ray's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import ray

from aioprefetch._config import Staff
from aioprefetch._lane import Kind
from aioprefetch._remote_lane import Executors, Reach
from aioprefetch._shared_pool import SharedPool
from aioprefetch._visit import Ask, Parcelled, Setup, visit

_START = 60.0  # seconds for the cluster to find room for an actor


class Post:
    """The actor: our worker in one of the cluster's."""

    def visit(self, ask: Ask, setup: Setup | None = None) -> Parcelled | None:
        return visit(ask, setup)

    def ready(self) -> None:
        """Answers once it is there."""


class RayPool(SharedPool):
    """Actors of a Ray cluster that calls and any number of Prefetchers share.

    Order, seeds, state, errors and retries are the same as on this machine. An actor that is
    lost is a death: another takes its place and does again what it held. Arrays come from Ray's
    object store without a copy, and so they are read-only: copy what is to be written into.

    ``ray.init`` must have been called.

    Parameters
    ----------
    num_proc
        Actors; by default as many as the cluster has CPUs for.
    num_cpus
        CPUs that each is given.
    resources
        Other resources that each is given, by name.
    worker_init_fn, retries, shutdown_timeout
        As `ProcessPool` has them.

    Raises
    ------
    RuntimeError
        Ray is not initialised.
    TypeError, ValueError
        An argument that cannot be meant.
    """

    _ends_calls = False

    def __init__(
        self,
        num_proc: int | None = None,
        *,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        retries: int = 2,
        shutdown_timeout: float = 5.0,
    ) -> None:
        if not ray.is_initialized():
            raise RuntimeError("ray is not initialised: call ray.init() before making a RayPool")
        if num_proc is None:
            num_proc = max(1, int(ray.cluster_resources().get("CPU", 1) / (num_cpus or 1)))
        staff = Staff(num_proc, None, worker_init_fn, None)
        staff.check(least=1, stacklevel=4)
        super().__init__(staff, retries, shutdown_timeout)
        self._options = {"num_cpus": num_cpus, "resources": dict(resources or {})}

    def _kind(self, loop: asyncio.AbstractEventLoop) -> Kind:
        return Executors(self._hire, pinned=True, frees=True)

    def _hire(self, number: int) -> Reach:
        actor = ray.remote(Post).options(**self._options).remote()
        try:
            ray.get(actor.ready.remote(), timeout=_START)
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor)
            raise OSError(
                f"the cluster found no room for worker {number} in {_START:.0f} s: it asks for "
                f"{self._options}"
            ) from None

        def submit(_: Callable[..., Any], *args: Any) -> Future[Any]:
            future: Future[Any] = actor.visit.remote(*args).future()
            return future

        return Reach(submit, lambda: ray.kill(actor))
