"""Workers of a real Dask cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import PoolBroken, Prefetcher, WorkerStartError
from tests import callees
from tests.callees import Slow, add
from tests.engines.work import (
    MAPPED,
    STREAMS,
    check_calls,
    check_cancel,
    check_death,
    check_poison,
    check_prefetchers,
    check_resume,
)
from tests.helpers import collect
from tests.processes import wait_for

distributed = pytest.importorskip("distributed", reason="distributed is not installed")

from aioprefetch.engines.dask import DaskPool  # noqa: E402

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")

CLUSTER: dict[str, Any] = {
    "n_workers": 2,
    "threads_per_worker": 1,
    "processes": True,
    "dashboard_address": "127.0.0.1:0",
    "silence_logs": "CRITICAL",
}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with distributed.LocalCluster(**CLUSTER) as cluster, distributed.Client(cluster) as client:
        yield client


async def test_prefetchers_give_what_they_give_in_processes(client: Any) -> None:
    async with DaskPool(client) as pool:
        assert pool.num_proc == 2
        await check_prefetchers(pool, {**MAPPED, **STREAMS})


async def test_calls_give_what_the_function_gives(client: Any) -> None:
    async with DaskPool(client) as pool:
        await check_calls(pool)
        pids = {await pool.run(callees.pid) for _ in range(10)}
        assert len(pids) <= 2
        assert os.getpid() not in pids


async def test_it_goes_on_where_a_pool_of_this_machine_stopped(client: Any) -> None:
    async with DaskPool(client) as pool:
        await check_resume(pool)


@one_loop
async def test_what_cannot_be_loaded_fails_alone(client: Any) -> None:
    async with DaskPool(client, worker_init_fn=callees.model) as pool:
        with pytest.raises(WorkerStartError, match="not here"):
            await collect(Prefetcher(callees.CannotBeLoaded("raises"), pool=pool))
        assert await pool.run(callees.state) in ("model 0", "model 1")


async def test_a_cancelled_call_is_dropped(client: Any, tmp_path: Path) -> None:
    async with DaskPool(client) as pool:
        await check_cancel(pool, tmp_path)


@one_loop
async def test_the_loop_runs_on(client: Any) -> None:
    async with DaskPool(client) as pool:
        p = Prefetcher(Slow(50, 0.01), pool=pool)
        late, last = 0.0, time.monotonic()

        async def tick() -> None:
            nonlocal late, last
            while True:
                await asyncio.sleep(0.002)
                late, last = max(late, time.monotonic() - last), time.monotonic()

        ticking = asyncio.create_task(tick())
        assert await collect(p) == list(range(50))
        ticking.cancel()
        assert late < 0.25


async def test_an_asynchronous_client_on_the_same_loop() -> None:
    async with (
        distributed.LocalCluster(**CLUSTER, asynchronous=True) as cluster,
        distributed.Client(cluster, asynchronous=True) as client,
    ):
        pool = DaskPool(client)
        with pytest.raises(RuntimeError, match="give num_proc"):
            Prefetcher(range(3), pool=pool)
        async with pool:
            assert pool.num_proc == 2
            assert await pool.run(add, 1, 2) == 3
            await check_prefetchers(pool, {"map": MAPPED["map"], "shard": STREAMS["shard"]})


async def test_a_worker_that_is_lost_changes_nothing() -> None:
    with distributed.LocalCluster(**CLUSTER) as cluster, distributed.Client(cluster) as client:
        async with DaskPool(client) as pool:
            await check_death(pool, lambda pid: os.kill(pid, signal.SIGKILL))
            await check_poison(pool)


@one_loop
async def test_a_cluster_that_ends_breaks_the_pool() -> None:
    with distributed.LocalCluster(**CLUSTER) as cluster, distributed.Client(cluster) as client:
        async with DaskPool(client, retries=0) as pool:
            p = Prefetcher(Slow(10_000, 0.01), pool=pool)
            it = aiter(p)
            await anext(it)
            await asyncio.to_thread(cluster.scale, 0)
            with pytest.raises(PoolBroken, match="no worker"):
                await collect(it)
            await p.aclose()


@one_loop
async def test_a_worker_that_leaves_before_it_is_ours() -> None:
    def tasks(dask_scheduler: Any) -> int:
        return len(dask_scheduler.tasks)

    with (
        distributed.LocalCluster(**{**CLUSTER, "n_workers": 1}) as cluster,
        distributed.Client(cluster) as client,
    ):
        busy = client.submit(callees.nap, 50)
        starting = asyncio.create_task(DaskPool(client, num_proc=1).start())
        waits = asyncio.to_thread(wait_for, lambda: client.run_on_scheduler(tasks) == 2, 20)
        assert await waits  # ours, for the other to end
        await asyncio.to_thread(cluster.scale, 0)
        with pytest.raises(WorkerStartError, match="lost its worker"):
            await asyncio.wait_for(starting, 20)
        del busy


def test_what_is_no_client_is_refused(client: Any) -> None:
    with pytest.raises(TypeError, match=r"distributed\.Client"):
        DaskPool(3)
    with pytest.raises(ValueError, match="num_proc"):
        DaskPool(client, num_proc=0)
