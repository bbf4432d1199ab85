"""Hosts that share one plan: who takes what, and what they take together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioprefetch import Prefetcher
from aioprefetch._delivered import Share
from tests.resume.journeys import Dividing, Indexed, Repeating, Sharded

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


async def of_rank(rank: int, world_size: int, source: Any, **arguments: Any) -> list[Any]:
    p = Prefetcher(source, rank=rank, world_size=world_size, **{"num_proc": 0, **arguments})
    return [item async for item in p]


async def of_all(world_size: int, source: Any, **arguments: Any) -> list[list[Any]]:
    return [await of_rank(rank, world_size, source, **arguments) for rank in range(world_size)]


@given(st.integers(0, 10**6), st.integers(1, 50))
def test_the_counts_of_each_tail(length: int, world_size: int) -> None:
    counts = {
        tail: [Share(rank, world_size, tail).count(length) for rank in range(world_size)]
        for tail in ("exact", "pad", "drop")
    }
    assert sum(counts["exact"]) == length
    assert max(counts["exact"]) - min(counts["exact"]) <= 1
    assert set(counts["pad"]) == {-(-length // world_size)}
    assert set(counts["drop"]) == {length // world_size}


LENGTHS = [0, 1, 2, 5, 12, 13]


@one_loop
@pytest.mark.parametrize("how", ["index", "shuffled", "sampler", "read here"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
async def test_hosts_take_every_nth_of_one_order(how: str, length: int, world_size: int) -> None:
    source: Any = Repeating(length) if how == "read here" else Indexed(length)
    ways: dict[str, dict[str, Any]] = {
        "index": {},
        "shuffled": {"shuffle": True},
        "sampler": {"sampler": [(3 * n + 1) % length for n in range(length)]},
        "read here": {"split": "parent"},
    }
    arguments = ways[how]
    order = await of_rank(0, 1, source, **arguments)
    exact = await of_all(world_size, source, **arguments)
    assert exact == [order[rank::world_size] for rank in range(world_size)]
    rounds = -(-length // world_size)
    padded = [order[n % length] for n in range(rounds * world_size)]
    assert await of_all(world_size, source, **arguments, tail="pad") == [
        padded[rank::world_size] for rank in range(world_size)
    ]
    kept = order[: length // world_size * world_size]
    assert await of_all(world_size, source, **arguments, tail="drop") == [
        kept[rank::world_size] for rank in range(world_size)
    ]


@one_loop
async def test_it_is_the_same_with_workers_and_in_batches() -> None:
    for num_proc in (0, 1, 2):
        batches = await of_rank(
            1, 3, Indexed(20), shuffle=True, batch_size=3, drop_last=True, num_proc=num_proc
        )
        order = await of_rank(0, 1, Indexed(20), shuffle=True)
        assert [b.tolist() for b in batches] == [order[1::3][:3], order[1::3][3:6]]


@one_loop
async def test_seeds_are_those_of_the_place_in_the_plan() -> None:
    whole = await of_rank(0, 1, Indexed(9), map_fn=draw)
    assert await of_all(2, Indexed(9), map_fn=draw) == [whole[0::2], whole[1::2]]
    assert await of_all(2, Repeating(9), map_fn=draw, split="parent", num_proc=1) == [
        whole[0::2],
        whole[1::2],
    ]
    padded = await of_rank(1, 2, Indexed(9), map_fn=draw, tail="pad")
    assert padded[:4] == whole[1::2]
    assert padded[4] not in whole  # the first item again, at another place


def draw(item: int) -> float:
    from aioprefetch import rng

    return float(rng().random())


@one_loop
@pytest.mark.parametrize("num_proc", [0, 2])
async def test_streams_are_divided_too(num_proc: int) -> None:
    source = Sharded(list(range(25)), stateful=False)
    shards = [list(source.shard(5, n)) for n in range(5)]
    got = await of_all(2, source, num_shards=5, num_proc=num_proc, ordered=False)
    assert [sorted(items) for items in got] == [
        sorted(shards[0] + shards[2] + shards[4]),
        sorted(shards[1] + shards[3]),
    ]
    got = await of_all(2, Dividing(20), split="worker", num_proc=num_proc)
    assert sorted(got[0] + got[1]) == list(range(20))
    streams = max(1, num_proc) * 2
    assert {item % streams for item in got[0]} == set(range(0, streams, 2))


@one_loop
async def test_replicas_of_hosts_draw_apart() -> None:
    got = []
    for rank in (0, 1):
        p = Prefetcher(
            Repeating(3),
            map_fn=draw,
            split="replicate",
            ordered=False,
            rank=rank,
            world_size=2,
            num_proc=1,
        )
        got += [item async for item in p]
    assert len(set(got)) == len(got) == 3


def test_the_length_is_this_host_s() -> None:
    def length(**arguments: Any) -> int:
        return len(Prefetcher(Indexed(10), num_proc=0, world_size=4, **arguments))

    assert [length(rank=rank) for rank in range(4)] == [3, 3, 2, 2]
    assert length(batch_size=2) == 2
    assert length(batch_size=2, drop_last=True) == 1
    assert [length(tail="pad", rank=rank) for rank in range(4)] == [3] * 4
    assert length(tail="drop") == 2
    assert length(batch_sampler=[[1], [2], [3]], rank=3) == 0
    assert len(Prefetcher(Repeating(10), split="parent", rank=1, world_size=3)) == 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"world_size": 0}, "world_size must be 1 or more"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size=2"),
        ({"rank": -1}, "rank must be 0 or more"),
        ({"tail": "even"}, "tail must be one of exact, pad, drop"),
        (
            {"source": Dividing(5), "split": "worker", "tail": "pad"},
            "streams of unknown length: only tail='exact'",
        ),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Prefetcher(**{"source": Indexed(3), **arguments})


@one_loop
async def test_a_host_without_a_stream_is_told() -> None:
    p = Prefetcher(Sharded([1], stateful=False), num_shards=1, rank=1, world_size=2, num_proc=0)
    with pytest.raises(ValueError, match="rank 1 has none"):
        await anext(aiter(p))
