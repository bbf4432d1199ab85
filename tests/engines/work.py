"""Work that every kind of shared pool does alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioprefetch import Prefetcher, TaskError, WorkerDied
from aioprefetch._shared_pool import SharedPool
from tests import callees, datasets, faulty
from tests.callees import Slow, add, add_later, nap
from tests.helpers import collect
from tests.processes import eventually

Kinds = Mapping[str, dict[str, Any]]

MAPPED: Kinds = {
    "map": {"source": datasets.Numbers(23), "batch_size": 4},
    "shuffled": {"source": datasets.Numbers(23), "batch_size": 4, "shuffle": True},
    "quick": {"source": range(2000), "batch_size": 3, "num_prefetch": 64},
    "async": {"source": datasets.AsyncNumbers(23), "batch_size": 4},
    "drawing": {"source": callees.Drawn(9)},
    "arrays": {"source": np.arange(60_000.0).reshape(6, -1), "batch_size": 2},
    "parent": {"source": datasets.Flow(23), "split": "parent", "map_fn": datasets.double},
    "arrays in": {"source": list(np.ones((4, 9000))), "map_fn": datasets.double},
    "sampler": {"source": datasets.Numbers(23), "sampler": datasets.Keys([3, 1, 3])},
    "skips": {"source": faulty.Map(12, faulty.fail), "on_error": "skip", "batch_size": 4},
    "mends": {"source": faulty.Map(12, faulty.fail), "on_error": faulty.mend},
    "collates": {"source": datasets.Numbers(9), "batch_size": 2, "collate_fn": list},
    "factory": {"source": datasets.ten, "split": "parent"},
}

STREAMS: Kinds = {
    "shard": {"source": datasets.Shards(23), "num_shards": 4, "batch_size": 3},
    "worker": {"source": datasets.Divided(23), "split": "worker"},
}


async def check_prefetchers(pool: SharedPool, kinds: Kinds) -> None:
    """What processes of this machine give, it gives."""
    for name, kind in kinds.items():
        expected = await collect(Prefetcher(**kind, num_proc=2, epochs=2))
        assert await collect(Prefetcher(**kind, pool=pool, epochs=2)) == expected, name
    both = Prefetcher(range(300), pool=pool), Prefetcher(range(99), pool=pool, ordered=False)
    first, second = await asyncio.gather(*map(collect, both))
    assert first == list(range(300))
    assert sorted(second) == list(range(99))


async def check_calls(pool: SharedPool) -> None:
    """Results and exceptions are the function's own."""
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


async def check_resume(pool: SharedPool) -> None:
    """It goes on where a pool of this machine stopped, and the other way round."""
    kind: dict[str, Any] = {"source": datasets.Numbers(60), "batch_size": 4, "shuffle": True}
    whole = await collect(Prefetcher(**kind))
    state: Any = None
    made: list[Any] = []
    for elsewhere in ({}, {"pool": pool}, {"num_proc": 2}):
        p = Prefetcher(**kind, **elsewhere)
        if state is not None:
            p.load_state_dict(state)
        async with p:
            it = aiter(p)
            made += [(await anext(it)).tolist() for _ in range(5)]
        state = p.state_dict()
    assert made == whole


async def check_death(pool: SharedPool, kill: Callable[[int], None]) -> None:
    """The end of a worker in mid-epoch changes no stream."""
    numbers = Prefetcher(Slow(200, 0.01), pool=pool)
    shards = Prefetcher(datasets.Shards(200), num_shards=4, pool=pool, num_prefetch=4)
    expected = await collect(Prefetcher(datasets.Shards(200), num_shards=4, num_proc=2))

    async def kill_one() -> None:
        await asyncio.sleep(0.3)
        kill(await pool.run(callees.pid))

    *_, made, read = await asyncio.gather(kill_one(), collect(numbers), collect(shards))
    assert made == list(range(200))
    assert read == expected
    assert await pool.run(add, 1, 2) == 3


async def check_poison(pool: SharedPool) -> None:
    """What ends a worker is found among what it had been given, and fails alone."""
    p = Prefetcher(faulty.Map(20, faulty.Die("exit 3")), pool=pool, retries=1, num_prefetch=20)
    made: list[Any] = []
    async with p:
        it = aiter(p)
        while True:
            try:
                made.append(await anext(it))
            except WorkerDied as error:
                made.append(error.indices)
            except StopAsyncIteration:
                break
    assert made == [(faulty.BAD,) if n == faulty.BAD else n for n in range(20)]


async def check_cancel(pool: SharedPool, tmp_path: Path) -> None:
    """A cancelled call that has not begun never does; others go on."""
    naps = [asyncio.create_task(pool.run(nap, 1.5, tmp_path / str(n))) for n in range(2)]
    assert await eventually(lambda: len(os.listdir(tmp_path)) == 2, 10)
    waiting = [asyncio.create_task(pool.run(callees.touch, tmp_path / "never")) for _ in range(4)]
    await asyncio.sleep(0.05)
    for task in (*waiting, naps[0]):
        task.cancel()
    assert await asyncio.gather(*[pool.run(add, 1, n) for n in range(8)]) == list(range(1, 9))
    assert await naps[1] > 0
    told = await asyncio.gather(naps[0], *waiting, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in told)
    assert not (tmp_path / "never").exists()
