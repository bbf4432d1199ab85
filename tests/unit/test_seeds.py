"""What is random depends on the seed and the place in the plan, and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aioprefetch import Prefetcher
from tests.datasets import (
    AsyncDrawing,
    AsyncFlow,
    Drawing,
    DrawingDivided,
    DrawingGroups,
    DrawingReplica,
    DrawingShards,
    Flow,
    Generators,
    Seeds,
    and_draw,
    same_generator,
)
from tests.helpers import LOOPS, START_METHODS, Loop, collect, run, warns

SLOW = (0.0, 0.002, 0.0, 0.004)
SPLITS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "map": (lambda: Drawing(20, SLOW), {"shuffle": True}),
    "map with map_fn": (lambda: Drawing(20, SLOW), {"map_fn": and_draw}),
    "map with sampler": (lambda: Drawing(20, SLOW), {"sampler": [3, 1, 3, 3, 0, 7]}),
    "batches": (lambda: Drawing(20, SLOW), {"batch_size": 3, "collate_fn": and_draw}),
    "groups": (lambda: DrawingGroups(20, SLOW), {"batch_size": 3, "collate_fn": and_draw}),
    "parent": (lambda: Flow(20, SLOW), {"split": "parent", "map_fn": and_draw}),
    "async parent": (lambda: AsyncFlow(20, SLOW), {"split": "parent", "map_fn": and_draw}),
    "parent in batches": (
        lambda: Flow(20, SLOW),
        {"split": "parent", "map_fn": and_draw, "batch_size": 3, "collate_fn": and_draw},
    ),
    "shard": (lambda: DrawingShards(20, SLOW), {"num_shards": 3}),
    "shard with map_fn": (
        lambda: DrawingShards(20, SLOW),
        {"num_shards": 3, "map_fn": and_draw, "batch_size": 2, "collate_fn": and_draw},
    ),
}
splits = pytest.mark.parametrize("split", SPLITS)


async def data(split: str, epochs: int = 2, **arguments: Any) -> list[list[Any]]:
    """All that some epochs deliver."""
    make, given = SPLITS[split]
    async with Prefetcher(make(), **{"seed": 5, **given, **arguments}) as p:
        return [await collect(p) for _ in range(epochs)]


def ours(data: Any) -> Any:
    """Without what the process's own generators gave."""
    if isinstance(data, tuple) and len(data) == 3 and all(isinstance(n, float) for n in data):
        return data[:1]
    return type(data)(map(ours, data)) if isinstance(data, (list, tuple)) else data


def in_any_order(epochs: list[list[Any]]) -> list[list[Any]]:
    return [sorted(epoch, key=str) for epoch in epochs]


@splits
async def test_the_data_do_not_depend_on_who_makes_them(split: str) -> None:
    one = await data(split, num_proc=1)
    for num_proc in (2, 4):
        assert await data(split, num_proc=num_proc) == one
    assert in_any_order(await data(split, num_proc=2, ordered=False)) == in_any_order(one)
    assert ours(await data(split, num_proc=0)) == ours(one)
    thread = await data(split, num_proc=0, ordered=False)
    assert in_any_order(ours(thread)) == in_any_order(ours(one))


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize(
    ("split", "loop"),
    [("map", LOOPS[0]), ("parent in batches", LOOPS[1]), ("shard with map_fn", LOOPS[0])],
)
def test_the_data_do_not_depend_on_the_start_method(split: str, loop: Loop, method: str) -> None:
    with warns(method):
        one = run(data(split, mp_context=method, num_proc=1), loop)
    assert one == run(data(split, num_proc=1), loop)


async def test_the_data_of_async_items_do_not_depend_on_what_overlaps() -> None:
    runs = []
    for num_proc, concurrency in [(1, 1), (1, 16), (2, 3), (0, 16)]:
        p = Prefetcher(AsyncDrawing(20, SLOW), num_proc=num_proc, concurrency=concurrency)
        runs.append(await collect(p))
    assert all(run == runs[0] for run in runs)
    assert len({number for _, drawn in runs[0] for number in drawn}) == 40


@pytest.mark.parametrize("num_proc", [1, 2])
async def test_streams_of_workers_repeat(num_proc: int) -> None:
    async def once(**arguments: Any) -> list[Any]:
        source = DrawingDivided(20, SLOW)
        return await collect(
            Prefetcher(source, split="worker", num_proc=num_proc, seed=3, **arguments)
        )

    one = await once()
    assert await once() == one
    assert sorted(await once(ordered=False)) == sorted(one)
    assert len({drawn for _, drawn in one}) == 20


async def test_replicas_repeat_each_for_itself() -> None:
    async def once(num_prefetch: int) -> dict[int, list[float]]:
        drawn: dict[int, list[float]] = {0: [], 1: []}
        p = Prefetcher(
            DrawingReplica(),
            split="replicate",
            ordered=False,
            num_proc=2,
            seed=3,
            num_prefetch=num_prefetch,
        )
        async with p, aiter(p) as items:
            while min(map(len, drawn.values())) < 12:  # longer than its source
                replica, number = await anext(items)
                drawn[replica].append(number)
        return {replica: numbers[:12] for replica, numbers in drawn.items()}

    one = await once(4)
    assert await once(9) == one
    assert len({number for numbers in one.values() for number in numbers}) == 24


@splits
async def test_each_epoch_draws_anew(split: str) -> None:
    first, second = ours(await data(split, num_proc=0))
    again = ours(await data(split, 1, num_proc=0))
    other = ours(await data(split, 1, num_proc=0, seed=6))
    assert again == [first]
    assert not drawn(first) & drawn(second)
    assert not drawn(first) & drawn(other)


def drawn(data: Any) -> set[float]:
    if isinstance(data, float):
        return {data}
    return set().union(*map(drawn, data)) if isinstance(data, (list, tuple)) else set()


@splits
async def test_no_two_places_draw_alike(split: str) -> None:
    """Neither do two of one index, nor an item and the batch that it begins."""
    numbers = all_drawn(ours(await data(split, num_proc=0)))
    assert len(numbers) == len(set(numbers)) > 0


@pytest.mark.parametrize(
    "split", ["map", "batches", "groups", "parent in batches", "shard with map_fn"]
)
async def test_the_generators_of_a_process_are_seeded_apart(split: str) -> None:
    """All three, for each place anew, each from the place's own key."""
    numbers = all_drawn(await data(split, num_proc=1))
    assert len(numbers) == len(set(numbers)) > 0


def all_drawn(data: Any) -> list[float]:
    if isinstance(data, float):
        return [data]
    return [n for one in data for n in all_drawn(one)] if isinstance(data, (list, tuple)) else []


async def test_set_epoch_seeks() -> None:
    """An epoch's data are the same whether the ones before were read or not."""
    _, _, third = await data("map", 3, num_proc=0)
    async with Prefetcher(Drawing(20), shuffle=True, seed=5, num_proc=0) as p:
        p.set_epoch(2)
        assert ours(await collect(p)) == ours(third)


@pytest.mark.parametrize("num_proc", [0, 1])
async def test_one_item_has_one_generator(num_proc: int) -> None:
    p = Prefetcher(Generators(5), map_fn=same_generator, num_proc=num_proc)
    assert await collect(p) == [True] * 5


@pytest.mark.parametrize("split", ["map with map_fn", "groups", "parent in batches", "shard"])
async def test_a_thread_leaves_this_process_s_generators_alone(split: str) -> None:
    """They are drawn from as the user's code does, and never seeded."""
    random.seed(1)
    np.random.seed(1)
    items = await data(split, 1, num_proc=0)
    number = sum(1 for _ in all_drawn(items)) // 3
    after = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    expected = [(random.random(), np.random.random()) for _ in range(number + 1)]
    assert after == expected[-1]


async def test_a_thread_that_draws_nothing_changes_no_generator() -> None:
    python, numpy = random.getstate(), str(np.random.get_state())
    await collect(Prefetcher(Flow(20), batch_size=3, num_proc=0))
    await collect(Prefetcher(Generators(20), shuffle=True, seed=None, num_proc=0))
    assert (random.getstate(), str(np.random.get_state())) == (python, numpy)


async def test_workers_leave_this_process_s_generators_alone() -> None:
    python, numpy = random.getstate(), str(np.random.get_state())
    await data("map", 1, num_proc=1)
    assert (random.getstate(), str(np.random.get_state())) == (python, numpy)


@pytest.mark.parametrize("num_proc", [0, 2])
async def test_no_seed_draws_one_and_tells_it(num_proc: int) -> None:
    async def once() -> tuple[int, list[Any]]:
        async with Prefetcher(Seeds(4), seed=None, num_proc=num_proc) as p:
            seeds = await collect(p) + await collect(p)
        [seed] = set(seeds)
        return seed, seeds

    (first, _), (second, _) = await once(), await once()
    assert first != second


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
async def test_items_are_told_the_seed(seed: int) -> None:
    assert await collect(Prefetcher(Seeds(1), seed=seed, num_proc=0)) == [seed]


async def test_the_default_seed_is_fixed() -> None:
    default = Prefetcher(range(50), shuffle=True, num_proc=0)
    zero, one = (Prefetcher(range(50), shuffle=True, seed=n, num_proc=0) for n in (0, 1))
    assert await collect(default) == await collect(zero) != await collect(one)
