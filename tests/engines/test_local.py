"""The same work on every kind of shared pool, but for what a kind says it cannot do."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import (
    ExecutorPool,
    PoolBroken,
    Prefetcher,
    TaskTimeout,
    ThreadPool,
    WorkerStartError,
)
from aioprefetch._shared_pool import SharedPool
from tests import callees, datasets
from tests.callees import Slow, add, nap, nap_async
from tests.engines.work import (
    MAPPED,
    STREAMS,
    check_calls,
    check_cancel,
    check_prefetchers,
    check_resume,
)
from tests.helpers import collect
from tests.processes import eventually

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@asynccontextmanager
async def threads() -> AsyncIterator[SharedPool]:
    async with ThreadPool(2) as pool:
        yield pool


@asynccontextmanager
async def executor() -> AsyncIterator[SharedPool]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as workers:
        async with ExecutorPool(workers, num_proc=2) as pool:
            yield pool


@asynccontextmanager
async def executor_of_threads() -> AsyncIterator[SharedPool]:
    with ThreadPoolExecutor(2) as workers:
        async with ExecutorPool(workers, num_proc=2) as pool:
            yield pool


ENGINES = [threads, executor, executor_of_threads]


@pytest.mark.parametrize("engine", ENGINES)
async def test_prefetchers_give_what_they_give_in_processes(engine: Callable[[], Any]) -> None:
    async with engine() as pool:
        await check_prefetchers(pool, {**MAPPED, **(STREAMS if engine is threads else {})})


@pytest.mark.parametrize("engine", ENGINES)
async def test_calls_give_what_the_function_gives(engine: Callable[[], Any]) -> None:
    async with engine() as pool:
        await check_calls(pool)


@pytest.mark.parametrize("engine", ENGINES)
async def test_it_goes_on_where_a_pool_of_another_kind_stopped(engine: Callable[[], Any]) -> None:
    async with engine() as pool:
        await check_resume(pool)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_cancelled_call_is_dropped(engine: Callable[[], Any], tmp_path: Path) -> None:
    async with engine() as pool:
        await check_cancel(pool, tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
@one_loop
async def test_what_cannot_be_loaded_fails_alone(engine: Callable[[], Any]) -> None:
    async with engine() as pool:
        if engine is not threads:  # nothing is loaded there
            with pytest.raises(WorkerStartError, match="not here"):
                await collect(Prefetcher(callees.CannotBeLoaded("raises"), pool=pool))
        assert await pool.run(add, 1, 2) == 3


@pytest.mark.parametrize("engine", ENGINES)
@one_loop
async def test_a_worker_is_set_up_once(engine: Callable[[], Any]) -> None:
    async with engine() as pool:
        kind = type(pool)
    args: tuple[Any, ...] = (2,)
    more: dict[str, Any] = {}
    with ThreadPoolExecutor(2) as workers:
        if kind is ExecutorPool:
            args, more = (workers,), {"num_proc": 2}
        async with kind(*args, **more, worker_init_fn=callees.model) as pool:
            assert await pool.run(callees.state) in ("model 0", "model 1")
            p = Prefetcher(range(6), map_fn=callees.state, pool=pool)
            assert set(await collect(p)) <= {"model 0", "model 1"}
    with pytest.raises(WorkerStartError, match="ZeroDivisionError"):
        async with ThreadPool(1, worker_init_fn=lambda _: 1 // 0):
            pass


# What a kind cannot do


async def test_a_thread_that_takes_too_long_is_left_behind(tmp_path: Path) -> None:
    async with ThreadPool(1) as pool:
        with pytest.raises(TaskTimeout, match=r"nap\(\) failed: worker 0 .* left behind") as caught:
            await pool.run(nap, 1.5, timeout=0.1)
        assert "callees.py" in str(caught.value.stack)
        assert await pool.run(add, 1, 2) == 3
        with pytest.raises(TaskTimeout):
            await pool.run(nap_async, 30, tmp_path, timeout=0.1)
        assert (tmp_path / "cancelled").exists()
        p = Prefetcher(Slow(3, 0.6), pool=pool, task_timeout=0.1, retries=0, on_error="skip")
        assert await collect(p) == []
    assert await eventually(lambda: True, 1)


async def test_closing_leaves_a_thread_that_is_stuck() -> None:
    pool = ThreadPool(1, shutdown_timeout=0.1)
    await pool.start()
    stuck = asyncio.create_task(pool.run(nap, 1.5))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await pool.aclose()
    assert time.monotonic() - began < 1
    with pytest.raises(RuntimeError, match="was not done: the pool was closed"):
        await stuck


async def test_a_broken_executor_breaks_the_pool() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as workers:
        async with ExecutorPool(workers, num_proc=1) as pool:
            p = Prefetcher(Slow(10_000, 0.01), pool=pool)
            it = aiter(p)
            await anext(it)
            began = time.monotonic()
            with pytest.raises(PoolBroken, match="BrokenProcessPool"):
                await pool.run(callees.exit_at_once)
            with pytest.raises(PoolBroken, match="none can take"):
                await collect(it)
            with pytest.raises(PoolBroken):
                await pool.run(add, 1, 2)
            assert time.monotonic() - began < 2
            await p.aclose()


async def test_an_executor_is_left_open_and_its_limits_are_told() -> None:
    with ThreadPoolExecutor(1) as workers:
        async with ExecutorPool(workers, num_proc=1) as pool:
            with pytest.raises(ValueError, match=r"asyncio\.timeout"):
                await pool.run(add, 1, 2, timeout=3)
            with pytest.raises(ValueError, match="no task_timeout"):
                Prefetcher(range(3), pool=pool, task_timeout=1)
            for split in ("worker", "shard"):
                source = datasets.Shards(9)
                with pytest.raises(ValueError, match="only split='parent'"):
                    Prefetcher(source, pool=pool, split=split)
        assert workers.submit(add, 1, 2).result() == 3
    with pytest.raises(TypeError, match="submit"):
        ExecutorPool(3, num_proc=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generator"):
        ExecutorPool(workers, num_proc=1, worker_init_fn=callees.two_halves)
    with pytest.raises(ValueError, match="num_threads"):
        ThreadPool(0)


async def test_a_closed_executor_is_told() -> None:
    workers = ThreadPoolExecutor(1)
    workers.shutdown()
    with pytest.raises(WorkerStartError, match="cannot schedule"):
        async with ExecutorPool(workers, num_proc=1):
            pass
