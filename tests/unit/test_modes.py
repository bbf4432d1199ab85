"""Every mode against a reference function of (source, S, B, drop_last), and the cursor."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aioprefetch import Prefetcher, TaskError
from tests.datasets import (
    AsyncFlow,
    AsyncNumbers,
    Divided,
    DrawingReplica,
    EpochNumbers,
    Flow,
    Numbers,
    Replica,
    Shards,
    SizedFlow,
    Ten,
    TwoShards,
    portion,
)
from tests.helpers import LOOPS, Loop, collect, run, warns

Mode = Literal["map", "parent", "shard", "worker"]
MODES: tuple[Mode, ...] = ("map", "parent", "shard", "worker")

# The reference


def batches_of(items: Sequence[Any], size: int | None, drop_last: bool) -> list[Any]:
    """The batches of one stream."""
    if size is None:
        return list(items)
    batches = [list(items[start : start + size]) for start in range(0, len(items), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


def in_turn(streams: Iterable[Sequence[Any]]) -> list[Any]:
    """One batch of each stream that has one left, turn after turn."""
    gone = object()
    turns = zip_longest(*streams, fillvalue=gone)
    return [batch for turn in turns for batch in turn if batch is not gone]


def reference(streams: Sequence[Sequence[Any]], size: int | None, drop_last: bool) -> list[Any]:
    return in_turn([batches_of(items, size, drop_last) for items in streams])


# What is run


@dataclass(frozen=True)
class Case:
    length: int
    batch_size: int | None
    drop_last: bool
    num_proc: int
    ordered: bool = True
    num_shards: int = 1
    num_prefetch: int | None = None
    delays: tuple[float, ...] = ()
    is_async: bool = False

    def streams_of(self, mode: Mode) -> list[Sequence[int]]:
        """What each of the S streams holds."""
        if mode in ("map", "parent"):
            return [range(self.length)]
        num = self.num_shards if mode == "shard" else max(1, self.num_proc)
        return [portion(self.length, num, index) for index in range(num)]

    def source(self, mode: Mode) -> Any:
        kinds: dict[Mode, Callable[..., Any]] = {
            "map": AsyncNumbers if self.is_async else Numbers,
            "parent": AsyncFlow if self.is_async else Flow,
            "shard": Shards,
            "worker": Divided,
        }
        return kinds[mode](self.length, self.delays)

    def prefetcher(self, mode: Mode, mp_context: str | None = None) -> Prefetcher:
        return Prefetcher(
            self.source(mode),
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            num_proc=self.num_proc,
            num_prefetch=self.num_prefetch,
            ordered=self.ordered,
            mp_context=mp_context,
            split=None if mode == "map" else mode,
            num_shards=self.num_shards if mode == "shard" else None,
        )


def cases(num_proc: st.SearchStrategy[int], delay: float) -> st.SearchStrategy[Case]:
    sizes = st.none() | st.integers(1, 7)
    seconds = st.sampled_from([0.0, delay / 4, delay])
    return st.builds(
        Case,
        length=st.integers(0, 24),
        batch_size=sizes,
        drop_last=st.booleans(),
        num_proc=num_proc,
        num_shards=st.integers(1, 5),
        num_prefetch=st.none() | st.integers(1, 9),
        delays=st.lists(seconds, max_size=5).map(tuple),
        is_async=st.booleans(),
    ).map(lambda case: case if case.batch_size else replace(case, drop_last=False))


async def two_passes(p: Prefetcher) -> list[list[Any]]:
    async with p:
        return [await collect(p), await collect(p)]


def in_any_order(batches: list[Any]) -> list[Any]:
    return sorted(batches, key=str)


def check(case: Case, mode: Mode, loop: Loop, mp_context: str | None = None) -> None:
    expected = reference(case.streams_of(mode), case.batch_size, case.drop_last)
    passes = run(two_passes(case.prefetcher(mode, mp_context)), loop)
    if case.ordered:
        assert passes == [expected, expected]
    else:
        assert [in_any_order(one) for one in passes] == [in_any_order(expected)] * 2


async def two_replicated_passes(case: Case, mp_context: str | None) -> list[list[Any]]:
    p = Prefetcher(
        Replica(case.length, case.delays),
        batch_size=case.batch_size,
        drop_last=case.drop_last,
        collate_fn=None if case.batch_size is None else list,
        num_proc=case.num_proc,
        num_prefetch=case.num_prefetch,
        mp_context=mp_context,
        ordered=False,
        split="replicate",
    )
    return await two_passes(p)


def check_replicas(case: Case, loop: Loop, mp_context: str | None = None) -> None:
    size, length = case.batch_size or 1, case.length
    number = length // size if case.drop_last else -(-length // size)
    passes = run(two_replicated_passes(case, mp_context), loop)
    assert [len(one) for one in passes] == [number, number]
    seen: defaultdict[int, list[int]] = defaultdict(list)
    for batch in [batch for one in passes for batch in one]:
        items = [batch] if case.batch_size is None else batch
        assert len(items) == size, "a replica's batch is short"
        assert len({replica for replica, _ in items}) == 1, "a batch of two replicas"
        for replica, item in items:
            seen[replica].append(item)
    for sequence in seen.values():
        assert sequence == [ordinal % length for ordinal in range(len(sequence))]


inline = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
forked = settings(max_examples=18, suppress_health_check=[HealthCheck.too_slow])
loops = st.sampled_from(LOOPS)
orders = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
modes = pytest.mark.parametrize("mode", MODES)


@modes
@orders
@inline
@given(case=cases(st.just(0), 0.001), loop=loops)
def test_a_thread_gives_what_the_reference_gives(
    mode: Mode, ordered: bool, case: Case, loop: Loop
) -> None:
    check(replace(case, ordered=ordered), mode, loop)


@modes
@orders
@forked
@given(case=cases(st.integers(1, 3), 0.002), loop=loops)
def test_processes_give_what_the_reference_gives(
    mode: Mode, ordered: bool, case: Case, loop: Loop
) -> None:
    check(replace(case, ordered=ordered), mode, loop, "forkserver")


@inline
@given(case=cases(st.just(0), 0.001), loop=loops)
def test_a_replica_on_a_thread_goes_round_its_source(case: Case, loop: Loop) -> None:
    check_replicas(case, loop)


@forked
@given(case=cases(st.integers(1, 3), 0.002), loop=loops)
def test_each_replica_goes_round_its_source(case: Case, loop: Loop) -> None:
    check_replicas(case, loop, "forkserver")


TABLE = [
    Case(0, None, False, 1),
    Case(1, 3, False, 2, num_shards=2),
    Case(7, None, False, 1, ordered=False, num_shards=3),
    Case(12, 4, False, 2, num_shards=2, num_prefetch=1),
    Case(13, 4, True, 1, num_shards=3),
    Case(13, 4, False, 2, ordered=False, num_prefetch=3),
    Case(20, 3, False, 3, num_shards=3, delays=(0.0, 0.01)),
    Case(20, 3, True, 2, ordered=False, num_shards=5, delays=(0.01, 0.0, 0.002)),
    Case(3, 8, True, 1, num_shards=2),
    Case(24, 1, False, 1, num_shards=4, num_prefetch=20, is_async=True),
]


# Every pair of row, mode, method and loop, but for row and loop, which is fixed.
OTHER_STARTS = [
    pytest.param(number, mode, ("fork", "spawn")[(number // 2 + place) % 2], id=f"{number}-{place}")
    for number in range(len(TABLE))
    for place, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("number", "mode", "method"), OTHER_STARTS)
def test_other_start_methods(mode: Mode, number: int, method: str) -> None:
    with warns(method):
        check(TABLE[number], mode, LOOPS[number % 2], method)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("number", range(len(TABLE)))
def test_replicas_under_other_start_methods(number: int, method: str) -> None:
    with warns(method):
        check_replicas(TABLE[number], LOOPS[number % 2], method)


# What the reference does not say


async def test_a_slow_item_holds_up_nobody() -> None:
    p = Prefetcher(Numbers(10, [1.0] + [0.0] * 9), num_proc=3, ordered=False)
    assert sorted((items := await collect(p))[:9]) == list(range(1, 10))
    assert items[9:] == [0]


async def test_the_default_number_of_shards_is_the_sources_or_the_workers() -> None:
    for num_proc, streams in [(1, 1), (3, 2)]:
        expected = reference([portion(20, streams, i) for i in range(streams)], None, False)
        assert await collect(Prefetcher(TwoShards(20), num_proc=num_proc)) == expected


async def sequences_of(seed: int) -> dict[int, list[float]]:
    """The first numbers that each of three replicas draws."""
    drawn: defaultdict[int, list[float]] = defaultdict(list)
    p = Prefetcher(DrawingReplica(), num_proc=3, seed=seed, ordered=False, split="replicate")
    async with p, aclosing(aiter(p)) as batches:
        async for replica, number in batches:
            drawn[replica].append(number)
            if len(drawn) == 3 and min(map(len, drawn.values())) >= 20:
                break
    return {replica: numbers[:20] for replica, numbers in drawn.items()}


async def test_replicas_have_their_own_sequences_fixed_by_the_seed() -> None:
    first = await sequences_of(5)
    assert len({tuple(numbers) for numbers in first.values()}) == 3
    assert await sequences_of(5) == first
    other = await sequences_of(6)
    assert all(other[replica] != first[replica] for replica in first)


async def test_open_replicas_show_every_item_in_three_epochs() -> None:
    p = Prefetcher(Replica(30), num_proc=3, ordered=False, split="replicate")
    async with p:
        epochs = [await collect(p) for _ in range(3)]
    assert [len(items) for items in epochs] == [30, 30, 30]
    assert {item for items in epochs for _, item in items} == set(range(30))


async def test_open_replicas_run_on_after_a_break() -> None:
    p = Prefetcher(Replica(6), num_proc=1, ordered=False, split="replicate")
    async with p:
        async with aclosing(aiter(p)) as batches:
            left = [(await anext(batches))[1] for _ in range(2)]
        assert [item for _, item in await collect(p)] == [2, 3, 4, 5, 0, 1]
    assert left == [0, 1]


async def test_replicas_that_are_not_opened_start_afresh() -> None:
    p = Prefetcher(Replica(4), num_proc=1, batch_size=3, ordered=False, split="replicate")
    for _ in range(2):
        assert [batch[1].tolist() for batch in [b async for b in p]] == [[0, 1, 2], [3, 0, 1]]


async def test_replicas_without_a_length_never_end() -> None:
    p = Prefetcher(Flow(3), num_proc=2, ordered=False, split="replicate")
    async with p, aclosing(aiter(p)) as batches:
        items = [await anext(batches) for _ in range(200)]
    assert set(items) == {0, 1, 2}


async def test_a_replica_of_nothing_ends() -> None:
    p = Prefetcher(Flow(0), num_proc=2, ordered=False, split="replicate")
    assert await collect(p) == []


async def test_replicas_with_a_length_are_warned_of_unless_asked_for() -> None:
    with pytest.warns(UserWarning, match="repeat"):
        p = Prefetcher(SizedFlow(4), num_proc=2, ordered=False)
    assert len(await collect(p)) == 4


# Lengths

ITERABLE_SPLITS: list[dict[str, Any]] = [
    {"split": "parent", "num_proc": 2},
    {"split": "worker", "num_proc": 1},
    {"split": "worker", "num_proc": 0},
]


@pytest.mark.parametrize("arguments", ITERABLE_SPLITS, ids=str)
@pytest.mark.parametrize("claimed", [0, 3, 50])
async def test_a_wrong_length_of_an_iterable_is_not_believed(
    claimed: int, arguments: dict[str, Any]
) -> None:
    p = Prefetcher(SizedFlow(10, claimed=claimed), batch_size=4, **arguments)
    assert await collect(p) == batches_of(range(10), 4, False)


@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize("claimed", [0, 3, 50])
async def test_replicas_go_by_the_length_they_are_told(claimed: int, num_proc: int) -> None:
    source = SizedFlow(10, claimed=claimed)
    p = Prefetcher(source, num_proc=num_proc, ordered=False, split="replicate")
    assert len(await collect(p)) == claimed


class Overlong(Numbers):
    def __len__(self) -> int:
        return self.length + 2


@pytest.mark.parametrize("num_proc", [0, 2])
async def test_indices_that_a_map_style_source_lacks_are_errors(num_proc: int) -> None:
    results: list[Any] = []
    async with Prefetcher(Overlong(3), num_proc=num_proc) as p:
        batches = aiter(p)
        for _ in range(5):
            try:
                results.append(await anext(batches))
            except TaskError as error:
                results.append((error.index, type(error.__cause__)))
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
    assert results == [0, 1, 2, (3, IndexError), (4, IndexError)]


REPLICAS: dict[str, Any] = {"split": "replicate", "ordered": False}


@pytest.mark.parametrize(
    ("source", "arguments", "length"),
    [
        (Numbers(10), {}, 10),
        (Numbers(10), {"batch_size": 4}, 3),
        (Numbers(10), {"batch_size": 4, "drop_last": True}, 2),
        (Numbers(0), {"batch_size": 4}, 0),
        (Numbers(10), {"sampler": [1, 2, 3], "batch_size": 2}, 2),
        (Numbers(10), {"batch_sampler": [[1], [2, 3]]}, 2),
        (SizedFlow(10), {"batch_size": 4, "num_proc": 1}, 3),
        (SizedFlow(10), {"batch_size": 4, "num_proc": 0}, 3),
        (SizedFlow(10), {"split": "parent", "num_proc": 4}, 10),
        (SizedFlow(10), {**REPLICAS, "num_proc": 4}, 10),
        (SizedFlow(10), {**REPLICAS, "batch_size": 4, "drop_last": True}, 2),
    ],
)
def test_length_in_batches(source: Any, arguments: dict[str, Any], length: int) -> None:
    assert len(Prefetcher(source, **arguments)) == length


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        (Flow(10), {}),
        (SizedFlow(10), {"split": "worker", "num_proc": 2}),
        (Flow(10), REPLICAS),
        (Shards(10), {"num_shards": 2}),
        (Numbers(10), {"sampler": Flow(10)}),
        (Ten, {}),
    ],
)
def test_no_length(source: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="length"):
        len(Prefetcher(source, **arguments))


# The cursor: items tell the epoch that they were made in

opened = pytest.mark.parametrize("num_proc", [0, 2])


@opened
async def test_each_pass_is_the_next_epoch(num_proc: int) -> None:
    p = Prefetcher(EpochNumbers(3), num_proc=num_proc)
    assert p.epoch == 0
    async with p:
        for epoch in range(3):
            assert await collect(p) == [(epoch, 0), (epoch, 1), (epoch, 2)]
            assert (p.epoch, p.delivered) == (epoch + 1, 3)


@opened
async def test_reopening_goes_on_with_the_next_epoch(num_proc: int) -> None:
    p = Prefetcher(EpochNumbers(1), num_proc=num_proc)
    for epoch in range(2):
        async with p:
            assert await collect(p) == [(epoch, 0)]
    assert await collect(p) == [(2, 0)]
    assert await collect(p) == [(3, 0)]


@opened
async def test_a_pass_that_is_left_counts_as_one(num_proc: int) -> None:
    async with Prefetcher(EpochNumbers(20), num_proc=num_proc, num_prefetch=4) as p:
        async for item in p:
            if item[1] == 2:
                break
        assert (p.epoch, p.delivered) == (0, 3)
        assert await collect(p) == [(1, index) for index in range(20)]


@opened
async def test_set_epoch_names_the_next_pass(num_proc: int) -> None:
    async with Prefetcher(EpochNumbers(2), num_proc=num_proc) as p:
        p.set_epoch(7)
        assert p.epoch == 7
        assert await collect(p) == [(7, 0), (7, 1)]
        assert await collect(p) == [(8, 0), (8, 1)]


@opened
async def test_set_epoch_leaves_an_open_pass_as_it_is(num_proc: int) -> None:
    async with Prefetcher(EpochNumbers(4), num_proc=num_proc) as p:
        batches = aiter(p)
        first = await anext(batches)
        p.set_epoch(3)
        assert p.epoch == 0
        assert [first, *await collect(batches)] == [(0, index) for index in range(4)]
        assert p.epoch == 3
        assert (await collect(p))[0] == (3, 0)


def test_an_epoch_is_not_negative() -> None:
    with pytest.raises(ValueError, match="epoch"):
        Prefetcher(Numbers(1)).set_epoch(-1)


@opened
async def test_a_second_pass_supersedes_the_first(num_proc: int) -> None:
    async with Prefetcher(EpochNumbers(8), num_proc=num_proc) as p:
        first = aiter(p)
        await anext(first)
        second = aiter(p)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="another iteration"):
                await anext(first)
        assert await collect(second) == [(1, index) for index in range(8)]


async def test_a_waiting_pass_learns_that_it_is_superseded() -> None:
    async with Prefetcher(Numbers(2, [0.3]), num_proc=1) as p:
        waiting = asyncio.create_task(anext(aiter(p)))
        await asyncio.sleep(0)
        second = aiter(p)
        with pytest.raises(RuntimeError, match="another iteration"):
            await waiting
        assert await collect(second) == [0, 1]


@opened
async def test_a_closed_iterator_has_ended(num_proc: int) -> None:
    async with Prefetcher(EpochNumbers(8), num_proc=num_proc) as p:
        async with aiter(p) as batches:
            assert await anext(batches) == (0, 0)
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(batches)
        await batches.aclose()
        assert (await collect(p))[0] == (1, 0)


@opened
async def test_an_exhausted_iterator_stays_so(num_proc: int) -> None:
    batches = aiter(Prefetcher(Numbers(2), num_proc=num_proc))
    assert await collect(batches) == [0, 1]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(batches)


@opened
@pytest.mark.parametrize("is_open", [True, False])
async def test_a_pass_under_which_the_prefetcher_is_closed_says_so(
    num_proc: int, is_open: bool
) -> None:
    p = Prefetcher(Numbers(8), num_proc=num_proc)
    if is_open:
        await p.start()
    batches = aiter(p)
    await anext(batches)
    await p.aclose()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was closed"):
            await anext(batches)


async def test_delivered_counts_batches_of_the_open_pass() -> None:
    async with Prefetcher(Numbers(10), batch_size=3, num_proc=0) as p:
        counts = [p.delivered async for _ in p]
        assert counts == [1, 2, 3, 4]
        aiter(p)
        assert p.delivered == 0


def test_the_reference_itself() -> None:
    uneven = [range(5), range(10, 13)]
    assert reference(uneven, 2, False) == [[0, 1], [10, 11], [2, 3], [12], [4]]
    assert reference(uneven, 2, True) == [[0, 1], [10, 11], [2, 3]]
    assert reference([[], "ab", "c"], None, False) == ["a", "c", "b"]
