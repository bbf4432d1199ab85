"""A pool that is shared: calls, Prefetchers on it, and what they do to each other."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioprefetch import (
    PoolBroken,
    Prefetcher,
    ProcessPool,
    SerializationError,
    SkipItem,
    TaskError,
    TaskTimeout,
    WorkerDied,
    WorkerStartError,
)
from tests import callees, datasets, faulty
from tests.callees import Adder, CannotBeLoaded, Slow, add, add_later, nap, nap_async, pid
from tests.helpers import collect
from tests.processes import eventually, leftovers, send, workers


def drop(things: list[Any]) -> None:
    things.clear()
    gc.collect()


one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


# Calls


async def test_a_call_gives_what_the_function_returns() -> None:
    offset = 5
    functions: list[Any] = [
        add,
        add_later,
        lambda a, b: a + b + offset - 5,
        lambda a, b: Adder(a).plus(b),
    ]
    async with ProcessPool(2) as pool:
        for function in functions:
            assert await pool.run(function, 3, 4) == 7
        assert await pool.run(functools.partial(add, b=4), 3) == 7
        assert await pool.run(Adder(3).plus, 4) == 7
        assert await pool.run(Adder(3), 4) == 7
        array = np.arange(300_000.0).reshape(3, -1)
        doubled = await pool.run(callees.double, array)
        assert (doubled == 2 * array).all()
        assert doubled.flags.writeable
        assert await pool.run(callees.double, array[:0]) is not None
        both = await asyncio.gather(*[pool.run(add, n, n) for n in range(100)])
        assert both == [2 * n for n in range(100)]
        assert len({await pool.run(pid) for _ in range(8)}) <= 2


async def test_calls_run_at_once_in_as_many_workers_as_there_are() -> None:
    async with ProcessPool(2) as pool:
        began = time.monotonic()
        pids = await asyncio.gather(*[pool.run(nap, 0.2) for _ in range(4)])
        assert len(set(pids)) == 2
        assert time.monotonic() - began < 0.75
        began = time.monotonic()
        await asyncio.gather(*[pool.run(asyncio.sleep, 0.2) for _ in range(40)])
        assert time.monotonic() - began < 0.6, "async calls overlap in a worker"


async def test_a_function_is_sent_once_and_keeps_its_globals() -> None:
    async with ProcessPool(1) as pool:
        assert [await pool.run(callees.count) for _ in range(3)] == [1, 2, 3]


@one_loop
async def test_calls_draw_different_numbers() -> None:
    async with ProcessPool(1) as pool:
        drawn = {await pool.run(callees.draw) for _ in range(5)}
        drawn |= {await pool.run(callees.draw_globally) for _ in range(5)}
        assert len(drawn) == 10


@pytest.mark.parametrize("function", [callees.raise_, callees.raise_later])
async def test_an_exception_is_of_its_own_type(function: Any) -> None:
    async with ProcessPool(1) as pool:
        with pytest.raises(KeyError, match="'x'") as caught:
            await pool.run(function, KeyError("x"))
        assert "in raise_" in str(caught.value.__cause__), "the worker's traceback"
        with pytest.raises(TimeoutError):
            await pool.run(function, TimeoutError())
        with pytest.raises(TaskError, match=r"raise_.*KeyboardInterrupt"):
            await pool.run(function, KeyboardInterrupt())
        assert await pool.run(add, 1, 2) == 3


async def test_what_cannot_be_raised_here_is_told_in_words() -> None:
    async with ProcessPool(1) as pool:
        with pytest.raises(TaskError, match=r"exit_\(\) failed: SystemExit: 3"):
            await pool.run(callees.exit_)
        with pytest.raises(SkipItem):
            await pool.run(callees.skip)
        with pytest.raises(SerializationError, match="lock"):
            await pool.run(callees.lock)
        with pytest.raises(SerializationError, match=r"args\[0\]"):
            await pool.run(add, faulty.HoldsALock(), 1)
        with pytest.raises(TypeError, match="must be a function"):
            await pool.run(3)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="positional"):
            await pool.run(add, 1)
        bad: list[Any] = [0, -1, "1"]
        for timeout in bad:
            with pytest.raises(ValueError, match="timeout must be seconds"):
                await pool.run(add, 1, 2, timeout=timeout)


async def test_a_call_whose_worker_dies_is_made_again(tmp_path: Path) -> None:
    async with ProcessPool(2, retries=2) as pool:
        others = [asyncio.create_task(pool.run(nap, 0.02)) for _ in range(20)]
        assert await pool.run(callees.die_at, tmp_path, 2) == "alive"
        await asyncio.gather(*others)
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(WorkerDied, match=r"die_at\(\) failed: .*SIGKILL, as 2 before") as e:
            await pool.run(callees.die_at, other, 9)
        assert len(os.listdir(other)) == 3
        assert e.value.exitcode == -9
        assert await pool.run(add, 1, 2) == 3


@one_loop
async def test_calls_that_kill_do_not_end_the_pool(tmp_path: Path) -> None:
    async with ProcessPool(1, retries=0) as pool:
        for number in range(15):
            with pytest.raises(WorkerDied):
                await pool.run(callees.die_at, tmp_path, 99)
            if number % 5 == 0:
                assert await pool.run(add, 1, 2) == 3
        assert await pool.run(add, 1, 2) == 3


async def test_a_call_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async with ProcessPool(1) as pool:
        first = await pool.run(pid)
        with pytest.raises(TaskTimeout, match=r"nap_async\(\) took longer than timeout=0.1 s"):
            await pool.run(nap_async, 30, tmp_path, timeout=0.1)
        assert (tmp_path / "cancelled").exists()
        assert await pool.run(pid) == first, "an async call costs no worker"
        with pytest.raises(TaskTimeout, match=r"nap\(\) failed: .*timeout=0.2 s") as caught:
            await pool.run(nap, 30, timeout=0.2)
        assert "callees.py" in str(caught.value.stack)
        assert await pool.run(pid) != first
        assert await pool.run(nap, 0.05, timeout=5) > 0


async def test_a_cancelled_call_frees_its_worker(tmp_path: Path) -> None:
    async with ProcessPool(1) as pool:
        running = asyncio.create_task(pool.run(nap, 30, tmp_path / "napping"))
        assert await eventually((tmp_path / "napping").exists, 5)
        waiting = asyncio.create_task(pool.run(callees.touch, tmp_path / "never"))
        queued = [asyncio.create_task(pool.run(add, 1, 1)) for _ in range(3)]
        await asyncio.sleep(0.05)
        waiting.cancel()
        running.cancel()
        began = time.monotonic()
        assert await asyncio.gather(*queued) == [2, 2, 2]
        assert time.monotonic() - began < 3
        assert not (tmp_path / "never").exists()
        later = asyncio.create_task(pool.run(nap_async, 30, tmp_path))
        assert await eventually((tmp_path / "began").exists, 5)
        first = await pool.run(pid)
        later.cancel()
        assert await eventually((tmp_path / "cancelled").exists, 5)
        assert await pool.run(pid) == first
        for task in (running, waiting, later):
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_cancelled_call_that_ends_soon_costs_no_worker(tmp_path: Path) -> None:
    async with ProcessPool(1) as pool:
        first = await pool.run(pid)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.run(nap, 0.3)
        await asyncio.sleep(1.2)
        assert await pool.run(pid) == first


# Prefetchers on it


SOURCES: dict[str, dict[str, Any]] = {
    "map": {"source": datasets.Numbers(23), "batch_size": 4},
    "map shuffled": {"source": datasets.Numbers(23), "batch_size": 4, "shuffle": True},
    "map async": {"source": datasets.AsyncNumbers(23), "batch_size": 4},
    "drawing": {"source": datasets.Drawing(9)},
    "parent": {"source": datasets.Flow(23), "split": "parent", "map_fn": datasets.double},
    "shard": {"source": datasets.Shards(23), "num_shards": 4, "batch_size": 3},
    "worker": {"source": datasets.Divided(23), "split": "worker"},
    "factory": {"source": datasets.ten, "split": "parent"},
    "sampler": {"source": datasets.Numbers(23), "sampler": datasets.Keys([3, 1, 3])},
}


@pytest.mark.parametrize("kind", SOURCES)
async def test_a_prefetcher_on_a_pool_gives_what_it_gives_on_its_own(kind: str) -> None:
    own = Prefetcher(**SOURCES[kind], num_proc=2, epochs=2)
    expected = await collect(own)
    async with ProcessPool(2) as pool:
        p = Prefetcher(**SOURCES[kind], pool=pool, epochs=2)
        assert await collect(p) == expected
        async with Prefetcher(**SOURCES[kind], pool=pool, ordered=False) as p:
            if p.epoch == 0:
                first = await collect(p)
                assert len(first) == len(expected) // 2


async def test_many_share_one_pool(tmp_path: Path) -> None:
    async with ProcessPool(2, worker_init_fn=callees.model) as pool:
        numbers = Prefetcher(range(200), batch_size=5, pool=pool)
        doubled = Prefetcher(range(100), map_fn=datasets.double, pool=pool)
        later = Prefetcher(datasets.AsyncNumbers(60), pool=pool)
        states = Prefetcher(range(8), map_fn=callees.state, pool=pool)
        calls = [pool.run(add, n, 0) for n in range(50)]
        made = await asyncio.gather(
            collect(numbers), collect(doubled), collect(later), collect(states), *calls
        )
        assert made[0] == [list(range(n, n + 5)) for n in range(0, 200, 5)]
        assert made[1] == [2 * n for n in range(100)]
        assert len(made[2]) == 60
        assert set(made[3]) <= {"model 0", "model 1"}
        assert list(made[4:]) == list(range(50))
        assert await pool.run(callees.state) in ("model 0", "model 1")


async def test_replicas_on_a_pool() -> None:
    async with ProcessPool(2) as pool:
        p = Prefetcher(datasets.Replica(10), split="replicate", ordered=False, pool=pool)
        async with p:
            assert len(await collect(p)) == 10
            assert len(await collect(p)) == 10


async def test_it_goes_on_where_a_state_says() -> None:
    async with ProcessPool(2) as pool:
        p = Prefetcher(range(40), batch_size=4, shuffle=True, pool=pool)
        whole = await collect(Prefetcher(range(40), batch_size=4, shuffle=True))
        async with p:
            begun = [(await anext(it)).tolist() for it in [aiter(p)] for _ in range(4)]
        q = Prefetcher(range(40), batch_size=4, shuffle=True, num_proc=1)
        q.load_state_dict(p.state_dict())
        assert begun + await collect(q) == whole


async def test_a_death_changes_no_stream() -> None:
    async with ProcessPool(2) as pool:
        expected = [await collect(Prefetcher(datasets.Drawing(60))), list(range(300))]
        numbers = Prefetcher(Slow(300, 0.001), pool=pool)
        drawing = Prefetcher(datasets.Drawing(60), pool=pool)

        async def kill() -> None:
            for _ in range(3):
                await asyncio.sleep(0.08)
                send(workers()[0])

        killing = asyncio.create_task(kill())
        made = list(await asyncio.gather(collect(drawing), collect(numbers)))
        await killing
        assert made == expected


async def test_a_poisoned_item_fails_its_own_prefetcher_alone() -> None:
    async with ProcessPool(1) as pool:
        bad = Prefetcher(faulty.Map(9, faulty.Die("exit 3")), pool=pool, retries=0, on_error="skip")
        good = Prefetcher(range(100), pool=pool)
        ok, rest = await asyncio.gather(collect(good), collect(bad))
        assert ok == list(range(100))
        assert len(rest) == 8


# Turns


async def test_calls_go_ahead_of_prefetching() -> None:
    async with (
        ProcessPool(1) as pool,
        Prefetcher(Slow(10_000, 0.02), pool=pool, num_prefetch=64) as p,
    ):
        await anext(aiter(p))
        took = []
        for _ in range(8):
            began = time.monotonic()
            await pool.run(add, 1, 2)
            took.append(time.monotonic() - began)
        assert sorted(took)[4] < 0.06, "what runs is finished, and then it is their turn"


async def test_prefetchers_take_turns_by_time() -> None:
    async with ProcessPool(2) as pool:
        slow = Prefetcher(Slow(10_000, 0.02), pool=pool)
        quick = Prefetcher(Slow(100_000, 0.0005), pool=pool, num_prefetch=512)
        made = {"slow": 0, "quick": 0}

        async def consume(name: str, p: Prefetcher[Any]) -> None:
            async for _ in p:
                made[name] += 1

        tasks = [asyncio.create_task(consume(*each)) for each in [("slow", slow), ("quick", quick)]]
        await asyncio.sleep(1.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await slow.aclose()
        await quick.aclose()
        assert made["slow"] > 25, made
        assert made["quick"] > 400, made


# Ends


async def test_a_prefetcher_leaves_and_the_pool_goes_on() -> None:
    async with ProcessPool(2) as pool:
        async with Prefetcher(range(10), pool=pool) as p:
            await collect(p)
        before = leftovers()
        for _ in range(5):
            async with Prefetcher(datasets.Numbers(50), pool=pool, batch_size=2) as p:
                await anext(aiter(p))
        dropped = [aiter(Prefetcher(datasets.Flow(10**6), split="parent", pool=pool))]
        await anext(dropped[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of work in flight, if there is any
            drop(dropped)
        assert await eventually(lambda: not leftovers().beyond(before), 5), leftovers().beyond(
            before
        )
        assert await pool.run(add, 1, 2) == 3


async def test_closing_a_prefetcher_ends_what_is_stuck_in_it_alone() -> None:
    async with ProcessPool(2) as pool:
        first = {await pool.run(pid) for _ in range(20)}
        p = Prefetcher(Slow(9, 60), pool=pool, num_prefetch=1, shutdown_timeout=0.2)
        async with p:
            begun = asyncio.create_task(anext(aiter(p)))
            await asyncio.sleep(0.2)
            began = time.monotonic()
        assert time.monotonic() - began < 1.5
        with pytest.raises(RuntimeError, match="closed"):
            await begun
        assert await asyncio.gather(*[pool.run(add, 1, n) for n in range(4)]) == [1, 2, 3, 4]
        last = {await pool.run(pid) for _ in range(20)}
        assert len(first | last) <= 3


@pytest.mark.parametrize("how", ["raises", "kills"])
async def test_a_source_that_cannot_be_loaded_fails_alone(how: str) -> None:
    async with ProcessPool(2) as pool:
        good = Prefetcher(Slow(100, 0.005), pool=pool)
        collecting = asyncio.create_task(collect(good))
        bad = Prefetcher(CannotBeLoaded(how), pool=pool, retries=1)
        with pytest.raises(WorkerStartError, match="not here" if how == "raises" else "SIGKILL"):
            await collect(bad)
        assert await collecting == list(range(100))
        assert await pool.run(add, 1, 2) == 3


async def test_a_pool_closed_under_its_users_says_so() -> None:
    pool = ProcessPool(1, shutdown_timeout=0.3)
    await pool.start()
    p = Prefetcher(Slow(1000, 0.01), pool=pool)
    it = aiter(p)
    await anext(it)
    quick = asyncio.create_task(pool.run(nap, 0.1))
    stuck = asyncio.create_task(pool.run(nap, 60))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await pool.aclose()
    assert time.monotonic() - began < 2
    assert await quick > 0, "what was asked for is done, if it can be in time"
    with pytest.raises(RuntimeError, match=r"nap\(\) was not done: the pool was closed"):
        await stuck
    with pytest.raises(PoolBroken, match="the pool was closed"):
        await collect(it)
    await p.aclose()
    assert not workers()
    with pytest.raises(RuntimeError, match="not open"):
        await pool.run(add, 1, 2)
    async with pool:
        assert await pool.run(add, 1, 2) == 3, "it can be opened again"


async def test_kill_ends_it_at_once() -> None:
    pool = ProcessPool(2)
    await pool.start()
    stuck = asyncio.create_task(pool.run(nap, 60))
    await asyncio.sleep(0.1)
    pool.kill()
    with pytest.raises(RuntimeError, match="the pool was killed"):
        await stuck
    assert await eventually(lambda: not workers(), 5)


async def test_a_dropped_pool_ends_its_workers() -> None:
    pool = ProcessPool(2)
    await pool.start()
    assert workers()
    dropped = [pool]
    del pool
    with pytest.warns(ResourceWarning, match="a pool was dropped"):
        drop(dropped)
    assert await eventually(lambda: not workers(), 5)


# What is refused


async def test_what_belongs_to_the_pool_is_refused_beside_it() -> None:
    pool = ProcessPool(2)
    for given in (
        {"num_proc": 3},
        {"mp_context": "spawn"},
        {"worker_init_fn": callees.model},
        {"worker_threads": 2},
    ):
        with pytest.raises(ValueError, match=f"give {next(iter(given))} to the pool"):
            Prefetcher(range(3), pool=pool, **given)
    with pytest.raises(TypeError, match="pool must be"):
        Prefetcher(range(3), pool=3)  # type: ignore[arg-type]
    for num_proc in (0, -1):
        with pytest.raises(ValueError, match="num_proc must be 1 or more"):
            ProcessPool(num_proc)
    with pytest.raises(TypeError, match="cannot be sent"):
        pickle.dumps(pool)
    with pytest.raises(RuntimeError, match="not open"):
        await pool.run(add, 1, 2)
    with pytest.raises(RuntimeError, match="not open"):
        await anext(aiter(Prefetcher(range(3), pool=pool)))


@one_loop
async def test_a_pool_belongs_to_its_loop() -> None:
    async with ProcessPool(1) as pool:

        def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="belongs to the event loop"):
                asyncio.run(pool.run(add, 1, 2))

        await asyncio.to_thread(elsewhere)


@one_loop
async def test_a_worker_init_fn_that_raises_is_told_at_the_start() -> None:
    with pytest.raises(WorkerStartError, match="ZeroDivisionError"):
        async with ProcessPool(1, worker_init_fn=lambda _: 1 // 0):
            pass
    assert not workers()
