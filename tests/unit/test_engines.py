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

import numpy as np
import pytest

from aioprefetch import (
    ExecutorPool,
    PoolBroken,
    Prefetcher,
    ProcessPool,
    TaskError,
    TaskTimeout,
    ThreadPool,
    WorkerStartError,
)
from aioprefetch._shared_pool import SharedPool
from tests import callees, datasets, faulty
from tests.callees import Slow, add, add_later, nap, nap_async
from tests.helpers import collect
from tests.processes import eventually

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@asynccontextmanager
async def processes() -> AsyncIterator[SharedPool]:
    async with ProcessPool(2) as pool:
        yield pool


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

MAPPED: dict[str, dict[str, Any]] = {
    "map": {"source": datasets.Numbers(23), "batch_size": 4},
    "shuffled": {"source": datasets.Numbers(23), "batch_size": 4, "shuffle": True},
    "quick": {"source": range(2000), "batch_size": 3, "num_prefetch": 64},
    "async": {"source": datasets.AsyncNumbers(23), "batch_size": 4},
    "drawing": {"source": callees.Drawn(9)},
    "arrays": {"source": np.arange(60_000.0).reshape(6, -1), "batch_size": 2},
    "parent": {"source": datasets.Flow(23), "split": "parent", "map_fn": datasets.double},
    "arrays in": {"source": list(np.ones((4, 9000))), "split": None, "map_fn": datasets.double},
    "sampler": {"source": datasets.Numbers(23), "sampler": datasets.Keys([3, 1, 3])},
    "skips": {"source": faulty.Map(12, faulty.fail), "on_error": "skip", "batch_size": 4},
    "mends": {"source": faulty.Map(12, faulty.fail), "on_error": faulty.mend},
    "collates": {"source": datasets.Numbers(9), "batch_size": 2, "collate_fn": list},
}

STREAMS: dict[str, dict[str, Any]] = {
    "shard": {"source": datasets.Shards(23), "num_shards": 4, "batch_size": 3},
    "worker": {"source": datasets.Divided(23), "split": "worker"},
    "factory": {"source": datasets.ten, "split": "parent"},
}


async def on_its_own(kind: dict[str, Any]) -> list[Any]:
    return await collect(Prefetcher(**kind, num_proc=2, epochs=2))


@pytest.mark.parametrize("engine", ENGINES)
async def test_prefetchers_give_what_they_give_in_processes(engine: Callable[[], Any]) -> None:
    kinds = MAPPED if engine is not threads else {**MAPPED, **STREAMS}
    async with engine() as pool:
        for name, kind in kinds.items():
            made = await collect(Prefetcher(**kind, pool=pool, epochs=2))
            assert made == await on_its_own(kind), name
        both = Prefetcher(range(300), pool=pool), Prefetcher(range(99), pool=pool, ordered=False)
        first, second = await asyncio.gather(*map(collect, both))
        assert first == list(range(300))
        assert sorted(second) == list(range(99))


@pytest.mark.parametrize("engine", ENGINES)
async def test_calls_give_what_the_function_gives(engine: Callable[[], Any]) -> None:
    async with engine() as pool:
        assert await pool.run(add, 1, 2) == 3
        assert await pool.run(add_later, 1, 2) == 3
        assert await pool.run(lambda a: a + 1, 2) == 3
        large = np.ones(100_000)
        assert (await pool.run(add, large, large)).sum() == 200_000
        made = await asyncio.gather(*[pool.run(add, n, n) for n in range(50)])
        assert made == [2 * n for n in range(50)]
        for function in (callees.raise_, callees.raise_later):
            with pytest.raises(KeyError, match="'x'"):
                await pool.run(function, KeyError("x"))
        with pytest.raises(TaskError, match="SystemExit"):
            await pool.run(callees.exit_)
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert await pool.run(add, 1, 2) == 3


@pytest.mark.parametrize("engine", ENGINES)
async def test_it_goes_on_where_a_pool_of_another_kind_stopped(engine: Callable[[], Any]) -> None:
    kind: dict[str, Any] = {"source": datasets.Numbers(40), "batch_size": 4, "shuffle": True}
    whole = await collect(Prefetcher(**kind))
    async with Prefetcher(**kind, num_proc=1) as p:
        it = aiter(p)
        begun = [(await anext(it)).tolist() for _ in range(4)]
    async with engine() as pool:
        q = Prefetcher(**kind, pool=pool)
        q.load_state_dict(p.state_dict())
        assert begun + await collect(q) == whole


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
