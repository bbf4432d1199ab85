"""States: what they say, how small and quick they are, and which are refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioprefetch import Prefetcher, TaskError, WorkerStartError
from aioprefetch._delivered import Delivered, Run, Share
from aioprefetch._state import from_json, to_json
from tests.resume.journeys import (
    AsyncRepeating,
    Dividing,
    Indexed,
    Keys,
    Repeating,
    Sharded,
    Stateful,
)

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


# Sets of ordinals


runs = st.builds(
    lambda start, size, step: Run(start, start + size, step),
    st.integers(0, 40),
    st.integers(1, 30),
    st.integers(1, 4),
)


def ordinals(runs: Any) -> set[int]:
    return {ordinal for run in runs for ordinal in range(*run)}


@given(st.lists(runs, max_size=6))
def test_runs_are_kept_as_a_set(loaded: list[Run]) -> None:
    delivered, expected = Delivered(loaded), ordinals(loaded)
    assert ordinals(delivered.runs()) == expected
    probe = np.arange(90)
    assert set(probe[delivered.covers(probe)].tolist()) == expected
    assert all(delivered.was_loaded(n) == (n in expected) for n in range(90))
    assert set(range(delivered.through)) <= expected


@given(st.lists(runs, max_size=4), st.lists(st.integers(1, 9), max_size=6), st.randoms())
def test_spans_are_added_in_any_order_and_taken_out_again(
    loaded: list[Run], sizes: list[int], dice: Any
) -> None:
    delivered, base = Delivered(loaded), ordinals(loaded)
    spans, start = [], delivered.begun
    for size in sizes:
        spans.append((start, start + size))
        start += size
    added = dice.sample(spans, len(spans) // 2 + 1) if spans else []
    for span in added:
        delivered.add(*span)
    expected = base.union(*(range(*span) for span in added))
    assert ordinals(delivered.runs()) == expected
    left = set(added[:2])
    taken = expected.difference(*(range(*span) for span in left)) | base
    assert ordinals(delivered.without(left).runs()) == taken


@given(st.lists(runs, max_size=5), st.integers(1, 5))
def test_hosts_divide_a_set_and_make_it_whole_again(loaded: list[Run], world_size: int) -> None:
    whole = ordinals(loaded)
    for rank in range(world_size):
        share = Share(rank, world_size)
        own = [run for run in map(share.own, loaded) if run is not None]
        assert {rank + world_size * n for n in ordinals(own)} == {
            n for n in whole if n % world_size == rank
        }
        assert ordinals(map(share.whole, own)) == {n for n in whole if n % world_size == rank}


def test_a_world_s_states_become_one_prefix() -> None:
    delivered = Delivered(Share(rank, 1000).whole(Run(0, 10**9 + rank % 3)) for rank in range(1000))
    assert delivered.through == 10**12
    assert len(list(delivered.runs())) < 1000


# What a state says


async def take(p: Prefetcher, count: int) -> list[Any]:
    iterator = aiter(p)
    taken = [await anext(iterator) for _ in range(count)]
    await iterator.aclose()
    return taken


@one_loop
@pytest.mark.parametrize("ordered", [True, False])
async def test_it_counts_what_was_delivered_not_what_was_prefetched(ordered: bool) -> None:
    async with Prefetcher(Indexed(64), batch_size=4, num_prefetch=8, ordered=ordered) as p:
        await p.start()
        assert p.state_dict()["delivered"] == []
        iterator = aiter(p)
        taken = [await anext(iterator) for _ in range(3)]
        state = p.state_dict()
    assert sum(len(range(*run)) for run in state["delivered"]) == 12
    assert {n for run in state["delivered"] for n in range(*run)} == set(np.concatenate(taken))


@one_loop
async def test_a_state_needs_no_workers_and_survives_a_round() -> None:
    p = Prefetcher(Indexed(20), batch_size=3, seed=None)
    state = p.state_dict()
    assert state == json.loads(json.dumps(state))
    q = Prefetcher(Indexed(20), batch_size=3, seed=None)
    q.load_state_dict(state)
    assert q.state_dict() == state
    assert [b.tolist() async for b in q] == [b.tolist() async for b in p]


@one_loop
async def test_states_before_in_and_after_an_epoch() -> None:
    p = Prefetcher(Indexed(10), batch_size=4, num_proc=0, shuffle=True)
    states = [p.state_dict()]
    seen = []
    async for batch in p:
        seen.append(batch.tolist())
        states.append(p.state_dict())
    states.append(p.state_dict())
    assert [state["epoch"] for state in states] == [0, 0, 0, 0, 1]
    for number, state in enumerate(states[:4]):
        q = Prefetcher(Indexed(10), batch_size=4, num_proc=0, shuffle=True)
        q.load_state_dict(state)
        assert (q.epoch, q.delivered) == (0, number)
        assert [b.tolist() async for b in q] == seen[number:]
        assert q.epoch == 1
    second = [b.tolist() async for b in p]
    q = Prefetcher(Indexed(10), batch_size=4, num_proc=0, shuffle=True)
    q.load_state_dict(states[4])
    assert [b.tolist() async for b in q] == second


@one_loop
async def test_a_pass_that_was_left_goes_on_where_it_was() -> None:
    p = Prefetcher(Indexed(10), batch_size=4, num_proc=0)
    await take(p, 1)
    state = p.state_dict()
    q = Prefetcher(Indexed(10), batch_size=4, num_proc=0)
    q.load_state_dict(state)
    q.set_epoch(0)  # as loops over epochs do
    assert np.concatenate([b async for b in q]).tolist() == [4, 5, 6, 7, 8, 9]
    q.load_state_dict(state)
    q.set_epoch(3)
    assert len([b async for b in q]) == 3
    assert q.epoch == 4


@one_loop
async def test_a_state_is_not_changed_later() -> None:
    p = Prefetcher(Sharded(list(range(12)), stateful=True), num_shards=2, num_proc=0)
    iterator = aiter(p)
    await anext(iterator)
    state = p.state_dict()
    text = json.dumps(state)
    async for _ in iterator:
        pass
    assert json.dumps(state) == text
    await iterator.aclose()


def fails_at_three(item: int) -> int:
    if item == 3:
        raise ValueError(item)
    return item


@one_loop
async def test_what_failed_or_was_left_out_is_not_delivered_again() -> None:
    p = Prefetcher(Indexed(6), map_fn=fails_at_three, num_proc=0)
    iterator = aiter(p)
    for item in (0, 1, 2):
        assert await anext(iterator) == item
    with pytest.raises(TaskError):
        await anext(iterator)
    q = Prefetcher(Indexed(6), map_fn=fails_at_three, num_proc=0, on_error="skip")
    q.load_state_dict(p.state_dict())
    assert [item async for item in q] == [4, 5]
    assert q.skipped == 0
    await iterator.aclose()


# Size and cost


@one_loop
async def test_states_are_small_and_quick() -> None:
    huge = Prefetcher(Range(10**12), shuffle=True, batch_size=64, num_proc=0)
    await take(huge, 3)
    many = Prefetcher(Indexed(4096), num_proc=0, ordered=False, num_prefetch=256)
    iterator = aiter(many)
    longest = 0
    for _ in range(500):
        await anext(iterator)
        longest = max(longest, len(json.dumps(many.state_dict())))
    assert longest < 16 * 256
    assert len(json.dumps(huge.state_dict())) < 500
    costs = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(100):
            many.state_dict()
            huge.state_dict()
        costs.append((time.perf_counter() - began) / 200)
    assert min(costs) < 3 * 50e-6
    await iterator.aclose()


class Range(Indexed):
    """A length that no list has."""


@one_loop
async def test_the_middle_of_10_12_shuffled_indices_is_at_hand() -> None:
    p = Prefetcher(Range(10**12), shuffle=True, batch_size=64, num_proc=0)
    state = p.state_dict()
    state.update(delivered=[[0, 5 * 10**11, 1]], settled=1)
    costs = []
    for _ in range(3):
        async with Prefetcher(Range(10**12), shuffle=True, batch_size=64, num_proc=0) as q:
            began = time.perf_counter()
            q.load_state_dict(state)
            iterator = aiter(q)
            costs.append(time.perf_counter() - began)
            batch = await anext(iterator)
            await iterator.aclose()
    assert len(set(batch.tolist())) == 64
    assert min(costs) < 3 * 0.010


# Streams, samplers, parents


@one_loop
async def test_keys_are_passed_over_not_data() -> None:
    fetched: list[int] = []

    class Fetched(Indexed):
        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    keys = [3, 1, 4, 0, 2, 5]
    p = Prefetcher(Fetched(6), sampler=keys, num_proc=0, num_prefetch=1)
    await take(p, 3)
    q = Prefetcher(Fetched(6), sampler=keys, num_proc=0)
    q.load_state_dict(p.state_dict())
    fetched.clear()
    assert [item async for item in q] == [0, 2, 5]
    assert fetched == [0, 2, 5]


@one_loop
@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        ({"source": Indexed(8), "sampler": [*range(8)]}, {"sampler": [*range(7, -1, -1)]}),
        ({"source": Repeating(8), "split": "parent"}, {"source": Sharded([9] * 8, stateful=False)}),
        (
            {"source": Sharded([*range(8)], stateful=False), "num_shards": 1},
            {"source": Sharded([9] * 8, stateful=False)},
        ),
    ],
    ids=["sampler", "read here", "shard"],
)
async def test_a_sequence_that_does_not_repeat_itself_is_an_error(
    arguments: dict[str, Any], others: dict[str, Any], num_proc: int
) -> None:
    p = Prefetcher(**arguments, num_proc=num_proc)
    await take(p, 3)
    q = Prefetcher(**{**arguments, **others}, num_proc=num_proc)
    q.load_state_dict(p.state_dict())
    async with aiter(q) as iterator:
        with pytest.raises(TaskError, match="others than before"):
            await anext(iterator)


@one_loop
async def test_a_stream_s_own_state_is_in_the_state() -> None:
    p = Prefetcher(Stateful(8), num_proc=0, batch_size=2)
    await take(p, 2)
    (stream,) = p.state_dict()["streams"]
    assert stream["state"] == {"json": {"at": 4}}
    q = Prefetcher(Repeating(8), num_proc=0, batch_size=2)
    q.load_state_dict(p.state_dict())
    async with aiter(q) as iterator:
        with pytest.raises(TaskError, match="needs state_dict"):
            await anext(iterator)


class Pickled(Repeating):
    """Its state is nothing that JSON has."""

    def __iter__(self) -> Iterator[int]:
        return Tuples(range(self.length))


class Tuples:
    def __init__(self, items: range) -> None:
        self.items = items
        self.at = 0

    def __iter__(self) -> Tuples:
        return self

    def __next__(self) -> int:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> Any:
        return (self.at, {1})

    def load_state_dict(self, state: Any) -> None:
        self.at, _ = state


@one_loop
async def test_a_state_that_json_does_not_keep_is_pickled() -> None:
    p = Prefetcher(Pickled(8), num_proc=0)
    await take(p, 5)
    q = Prefetcher(Pickled(8), num_proc=0)
    q.load_state_dict(json.loads(json.dumps(p.state_dict())))
    assert [item async for item in q] == [5, 6, 7]


@one_loop
async def test_streams_keep_their_number_on_other_workers() -> None:
    p = Prefetcher(Dividing(12), split="worker", num_proc=3)
    whole = [item async for item in Prefetcher(Dividing(12), split="worker", num_proc=3)]
    first = await take(p, 4)
    for num_proc in (0, 1, 2):
        q = Prefetcher(Dividing(12), split="worker", num_proc=num_proc)
        q.load_state_dict(p.state_dict())
        assert first + [item async for item in q] == whole


@one_loop
async def test_a_state_is_loaded_into_workers_that_are_up() -> None:
    p = Prefetcher(Dividing(12), split="worker", num_proc=3)
    whole = [item async for item in Prefetcher(Dividing(12), split="worker", num_proc=3)]
    first = await take(p, 4)
    async with Prefetcher(Dividing(12), split="worker", num_proc=2) as q:
        assert sorted([item async for item in q]) == list(range(12))
        q.load_state_dict(p.state_dict())
        assert first + [item async for item in q] == whole
        assert q.epoch == 1


@one_loop
async def test_async_sources_and_samplers_go_on() -> None:
    p = Prefetcher(AsyncRepeating(9), split="parent", batch_size=2)
    first = await take(p, 2)
    q = Prefetcher(AsyncRepeating(9), split="parent", batch_size=3, num_proc=2)
    q.load_state_dict(p.state_dict())
    rest = [batch async for batch in q]
    assert np.concatenate(first + rest).tolist() == list(range(9))


@one_loop
async def test_replicas_restart_with_fresh_seeds() -> None:
    p = Prefetcher(Drawing(), split="replicate", ordered=False, num_proc=0)
    first = await take(p, 5)
    q = Prefetcher(Drawing(), split="replicate", ordered=False, num_proc=0)
    q.load_state_dict(p.state_dict())
    second = await take(q, 5)
    assert not set(first) & set(second)


class Drawing:
    def __iter__(self) -> Iterator[float]:
        from aioprefetch import rng

        while True:
            yield float(rng().random())


# Numbers, and batches that are pending


@one_loop
async def test_pending_batches_are_delivered_again() -> None:
    p = Prefetcher(Indexed(10), num_proc=0)
    iterator = p.numbered()
    numbers = [await anext(iterator) for _ in range(6)]
    assert numbers == [(n, n) for n in range(6)]
    state = p.state_dict(pending=[2, 4, 5])
    assert state["delivered"] == [[0, 2, 1], [3, 4, 1]]
    assert (state["batches"], state["settled"]) == (3, 3)
    q = Prefetcher(Indexed(10), num_proc=0)
    q.load_state_dict(state)
    assert [item async for _, item in q.numbered()] == [2, 4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"\[3\] are not among those"):
        p.state_dict(pending=[3])
    assert p.state_dict(pending=[5])["delivered"] == [[0, 5, 1]]
    await iterator.aclose()


@one_loop
async def test_pending_over_the_edge_of_an_epoch() -> None:
    p = Prefetcher(Indexed(3), num_proc=0, epochs=3, shuffle=True)
    whole = [item async for item in p]
    p = Prefetcher(Indexed(3), num_proc=0, epochs=3, shuffle=True)
    iterator = p.numbered()
    taken = [(await anext(iterator)) for _ in range(5)]
    assert [number for number, _ in taken] == [0, 1, 2, 3, 4]
    state = json.loads(json.dumps(p.state_dict(pending=[2, 4])))
    assert state["epoch"] == 0
    q = Prefetcher(Indexed(3), num_proc=0, epochs=3, shuffle=True)
    q.load_state_dict(state)
    assert [item async for item in q] == [whole[2], whole[4], *whole[5:]]
    assert q.epoch == 3
    await iterator.aclose()


# What is refused


def state_of(**arguments: Any) -> dict[str, Any]:
    return Prefetcher(**{"source": Indexed(10), "num_proc": 0, **arguments}).state_dict()


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (lambda: state_of(source=Indexed(11)), "length of the source is 11, and here it is 10"),
        (lambda: state_of(seed=7), "seed 7, and this Prefetcher was given seed=0"),
        (lambda: {**state_of(), "version": 2}, "version 2, and this release reads 1"),
        (lambda: state_of(shuffle=True), "shuffle is True, and here it is False"),
        (lambda: state_of(sampler=[1, 2]), "kind of plan is 'sampler'"),
        (lambda: state_of(rank=1, world_size=2), r"ranks \[1\] of world_size=2"),
        (
            lambda: [state_of(rank=1, world_size=3), state_of(rank=0, world_size=3)],
            r"ranks \[0, 1\] of world_size=3",
        ),
        (list, "empty list of states"),
        (lambda: {"version": 1}, "damaged: KeyError"),
        (lambda: {**state_of(), "delivered": [3]}, "damaged"),
        (lambda: [state_of(seed=1), state_of(seed=2)], "different runs"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: Any, match: str) -> None:
    p = Prefetcher(Indexed(10), num_proc=0)
    with pytest.raises(ValueError, match=match):
        p.load_state_dict(state())
    assert p.state_dict()["epoch"] == 0


@pytest.mark.parametrize("state", [None, "state", 3])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(TypeError, match="a state is a dict"):
        Prefetcher(Indexed(10), num_proc=0).load_state_dict(state)


def test_num_shards_is_the_state_s() -> None:
    source = Sharded(list(range(9)), stateful=False)
    state = Prefetcher(source, num_shards=3).state_dict()
    assert Prefetcher(source, num_shards=3).state_dict() == state
    with pytest.raises(ValueError, match="num_shards is 3, and here it is 2"):
        Prefetcher(source, num_shards=2).load_state_dict(state)


@one_loop
async def test_a_drawn_seed_is_the_state_s_before_the_workers_are_up() -> None:
    state = state_of(seed=5, shuffle=True)
    async with Prefetcher(Indexed(10), shuffle=True, seed=None, num_proc=0) as p:
        p.load_state_dict(state)
        with pytest.raises(ValueError, match="load it before they are, or give seed=5"):
            aiter(p)


@one_loop
async def test_a_factory_s_source_is_checked_once_it_is_made() -> None:
    state = state_of(source=Indexed(11))
    p = Prefetcher(lambda: Indexed(10), num_proc=0)
    p.load_state_dict({**state, "shuffle": False})
    with pytest.raises(ValueError, match="length of the source is 11, and here it is 10"):
        await anext(aiter(p))


def fail_at_first(path: Path) -> Any:
    def init(_: int) -> None:
        if not path.exists():
            path.touch()
            raise RuntimeError("not yet")

    return init


@one_loop
@pytest.mark.parametrize("num_proc", [0, 1])
async def test_a_start_that_failed_has_not_used_the_state(num_proc: int, tmp_path: Path) -> None:
    p = Prefetcher(Indexed(10), num_proc=0)
    await take(p, 4)
    init = fail_at_first(tmp_path / "tried")
    q = Prefetcher(Indexed(10), num_proc=num_proc, worker_init_fn=init)
    q.load_state_dict(p.state_dict())
    with pytest.raises(WorkerStartError):
        await anext(aiter(q))
    assert q.state_dict() == p.state_dict()
    assert [item async for item in q] == [4, 5, 6, 7, 8, 9]
    assert q.epoch == 1


@given(st.data())
def test_json_keeps_a_state(data: Any) -> None:
    state = state_of(seed=data.draw(st.integers(0, 2**64 - 1)))
    state["delivered"] = [list(run) for run in data.draw(st.lists(runs, max_size=4))]
    state["epoch"] = data.draw(st.integers(0, 10**9))
    assert to_json(from_json(json.loads(json.dumps(state)))) == state


@one_loop
async def test_two_epochs_and_two_more_are_four() -> None:
    p = Prefetcher(Indexed(7), shuffle=True, num_proc=0)
    straight = [[item async for item in p] for _ in range(4)]
    q = Prefetcher(Indexed(7), shuffle=True, num_proc=0)
    first = [[item async for item in q] for _ in range(2)]
    r = Prefetcher(Indexed(7), shuffle=True, num_proc=0)
    r.load_state_dict(q.state_dict())
    assert first + [[item async for item in r] for _ in range(2)] == straight


@one_loop
async def test_a_sampler_with_a_state_is_not_read_again() -> None:
    keys = CountedKeys([5, 3, 1, 0])
    p = Prefetcher(Indexed(6), sampler=keys, num_proc=0, num_prefetch=1)
    await take(p, 2)
    again = CountedKeys([5, 3, 1, 0])
    q = Prefetcher(Indexed(6), sampler=again, num_proc=0)
    q.load_state_dict(p.state_dict())
    assert [item async for item in q] == [1, 0]
    assert again.read == [1, 0]


class CountedKeys(Keys):
    def __init__(self, keys: list[int]) -> None:
        super().__init__(keys)
        self.read: list[int] = []

    def __iter__(self) -> Any:
        return _Telling(self.keys, self.read)


class _Telling:
    def __init__(self, keys: list[int], read: list[int]) -> None:
        self.keys, self.read, self.at = keys, read, 0

    def __iter__(self) -> _Telling:
        return self

    def __next__(self) -> int:
        if self.at == len(self.keys):
            raise StopIteration
        self.at += 1
        self.read.append(self.keys[self.at - 1])
        return self.keys[self.at - 1]

    def state_dict(self) -> int:
        return self.at

    def load_state_dict(self, state: int) -> None:
        self.at = state


def test_tasks_of_one_loop_do_not_matter() -> None:
    """A state may be taken where no loop runs."""
    p = Prefetcher(Indexed(10), num_proc=0)
    asyncio.run(take(p, 4))
    assert p.state_dict()["delivered"] == [[0, 4, 1]]
