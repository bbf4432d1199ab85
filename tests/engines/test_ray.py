"""Actors of a real Ray cluster on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aioprefetch import Prefetcher, WorkerStartError
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
from tests.processes import ROOT

ray = pytest.importorskip("ray", reason="ray is not installed: make test-ray")

from aioprefetch.engines.ray import RayPool  # noqa: E402

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": ROOT}},
    )
    yield
    ray.shutdown()


async def test_prefetchers_give_what_they_give_in_processes() -> None:
    async with RayPool() as pool:
        assert pool.num_proc == 2
        await check_prefetchers(pool, {**MAPPED, **STREAMS})


async def test_calls_give_what_the_function_gives() -> None:
    async with RayPool(2) as pool:
        await check_calls(pool)
        pids = {await pool.run(callees.pid) for _ in range(10)}
        assert len(pids) <= 2
        assert os.getpid() not in pids


async def test_it_goes_on_where_a_pool_of_this_machine_stopped() -> None:
    async with RayPool(2) as pool:
        await check_resume(pool)


async def test_a_cancelled_call_is_dropped(tmp_path: Path) -> None:
    async with RayPool(2) as pool:
        await check_cancel(pool, tmp_path)


@one_loop
async def test_arrays_are_read_only() -> None:
    async with RayPool(1) as pool:
        array = await pool.run(callees.double, np.ones(100_000))
        assert array.sum() == 200_000
        assert not array.flags.writeable


@one_loop
async def test_what_cannot_be_loaded_fails_alone() -> None:
    async with RayPool(1, worker_init_fn=callees.model) as pool:
        with pytest.raises(WorkerStartError, match="not here"):
            await collect(Prefetcher(callees.CannotBeLoaded("raises"), pool=pool))
        assert await pool.run(callees.state) == "model 0"


async def test_an_actor_that_is_lost_changes_nothing() -> None:
    async with RayPool(2) as pool:
        await check_death(pool, lambda pid: os.kill(pid, signal.SIGKILL))
        await check_poison(pool)


@one_loop
async def test_resources_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioprefetch.engines.ray._START", 2.0)
    with pytest.raises(WorkerStartError, match="no room for worker 0"):
        async with RayPool(1, resources={"unobtainium": 1}):
            pass


@one_loop
async def test_actors_that_die_again_and_again_are_given_up() -> None:
    async with RayPool(1, retries=0) as pool:
        with pytest.raises(Exception, match="exit_at_once"):
            await pool.run(callees.exit_at_once)
        assert await pool.run(add, 1, 2) == 3
        p = Prefetcher(Slow(30, 0.01), pool=pool)
        assert await collect(p) == list(range(30))


def test_it_needs_ray() -> None:
    ray.shutdown()
    with pytest.raises(RuntimeError, match=r"ray\.init"):
        RayPool()
