"""Every kind of source, recognised, read, told of epochs, and overlapped where it awaits."""

from __future__ import annotations

import array
import asyncio
import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from aioprefetch import Prefetcher, TaskError, WorkerStartError
from tests.datasets import (
    AsyncCounted,
    AsyncFlow,
    AsyncGroups,
    AsyncItemsSyncGroups,
    AsyncNumbers,
    AsyncToldFlow,
    BrokenGroups,
    Counted,
    Flow,
    FlowLengthRaises,
    Groups,
    Journal,
    LengthRaises,
    MiscountedGroups,
    Numbers,
    Overlapping,
    SizedFlow,
    Ten,
    Threads,
    Told,
    ToldFlow,
    ToldShards,
    TorchFlow,
    async_double,
    async_ten,
    double,
    portion,
    tells_torch,
    ten,
)
from tests.helpers import LOOPS, START_METHODS, Loop, collect, run, warns

TEN = list(range(10))

workers = pytest.mark.parametrize("num_proc", [0, 2])


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


# Every kind, read to its end. Of each a new one is made, since some can be read once.

MAP_STYLE: dict[str, Callable[[], Any]] = {
    "map-style": lambda: Numbers(10),
    "async map-style": lambda: AsyncNumbers(10),
    "list": lambda: list(TEN),
    "tuple": lambda: tuple(TEN),
    "range": lambda: range(10),
    "array of numpy": lambda: np.arange(10),
    "array": lambda: array.array("i", TEN),
    "bytes": lambda: bytes(TEN),
    "dict": lambda: dict(zip(TEN, TEN, strict=True)),
    "function": lambda: lambda: Numbers(10),
    "async function": lambda: _async_numbers,
    "class": lambda: Ten,
    "partial": lambda: functools.partial(Numbers, 10),
}
ITERABLE: dict[str, Callable[[], Any]] = {
    "iterable": lambda: Flow(10),
    "iterable with a length": lambda: SizedFlow(10),
    "async iterable": lambda: AsyncFlow(10),
    "set": lambda: set(TEN),
    "generator function": lambda: ten,
    "async generator function": lambda: async_ten,
    "partial of a generator function": lambda: functools.partial(_from, 0),
    "function of an iterable": lambda: lambda: Flow(10),
    "function of an async iterable": lambda: lambda: AsyncFlow(10),
    "function of an iterator": lambda: lambda: iter(TEN),
}
ONE_SHOT: dict[str, Callable[[], Any]] = {
    "generator": ten,
    "async generator": async_ten,
    "iterator": lambda: iter(TEN),
    "map": lambda: map(int, TEN),
    "zip": lambda: (item for (item,) in zip(TEN, strict=True)),
}


async def _async_numbers() -> Numbers:
    return Numbers(10)


def _from(first: int) -> Any:
    yield from range(first, 10)


@workers
@pytest.mark.parametrize("kind", MAP_STYLE)
async def test_map_style(kind: str, num_proc: int) -> None:
    assert await collect(Prefetcher(MAP_STYLE[kind](), num_proc=num_proc)) == TEN


@pytest.mark.parametrize(("num_proc", "split"), [(0, None), (1, None), (2, "parent")])
@pytest.mark.parametrize("kind", ITERABLE)
async def test_iterable(kind: str, num_proc: int, split: Any) -> None:
    p = Prefetcher(ITERABLE[kind](), num_proc=num_proc, split=split, batch_size=4)
    assert await collect(p) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@workers
@pytest.mark.parametrize("kind", ONE_SHOT)
async def test_what_can_be_read_once_is_read_once(kind: str, num_proc: int) -> None:
    p = Prefetcher(ONE_SHOT[kind](), num_proc=num_proc)
    assert await collect(p) == TEN
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(generator|iterator|map).* has been read"):
            aiter(p)


@workers
async def test_an_iterator_that_a_function_made_is_read_once(num_proc: int) -> None:
    p = Prefetcher(lambda: iter(TEN), num_proc=num_proc, split="parent")
    async with p:
        assert await collect(p) == TEN
        with pytest.raises(RuntimeError, match="has been read"):
            await collect(p)
    assert await collect(p) == TEN  # the function is called again


@pytest.mark.parametrize(
    "kind", ["iterable", "async generator function", "function of an iterator"]
)
async def test_map_fn_alone_chooses_the_parent(kind: str) -> None:
    p = Prefetcher(ITERABLE[kind](), map_fn=double, num_proc=2)
    assert await collect(p) == [2 * item for item in TEN]


@workers
@pytest.mark.parametrize("map_fn", [double, async_double])
@pytest.mark.parametrize("source", [Numbers, AsyncNumbers, Flow, AsyncFlow])
async def test_map_fn_runs_on_items(source: Any, map_fn: Any, num_proc: int) -> None:
    p = Prefetcher(source(10), map_fn=map_fn, batch_size=4, num_proc=num_proc)
    assert await collect(p) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]


# Whole batches


@workers
@pytest.mark.parametrize("kind", [Groups, AsyncGroups, AsyncItemsSyncGroups])
async def test_getitems_is_used_for_batches_alone(kind: type[Numbers], num_proc: int) -> None:
    batches = await collect(Prefetcher(kind(5), batch_size=3, num_proc=num_proc))
    assert batches == [[1000, 1001, 1002], [1003, 1004]]
    assert await collect(Prefetcher(kind(3), num_proc=num_proc)) == [0, 1, 2]


@workers
async def test_getitems_is_followed_by_map_fn(num_proc: int) -> None:
    p = Prefetcher(Groups(3), map_fn=double, batch_size=3, num_proc=num_proc)
    assert await collect(p) == [[2000, 2002, 2004]]


@workers
@pytest.mark.parametrize("surplus", [1, -1])
async def test_a_miscount_of_getitems_is_an_error(surplus: int, num_proc: int) -> None:
    p = Prefetcher(MiscountedGroups(5, surplus), batch_size=3, num_proc=num_proc)
    async with p:
        batches = aiter(p)
        with pytest.raises(TaskError, match=f"gave {3 + surplus} results for 3 keys") as caught:
            await anext(batches)
        assert await collect(batches) == [[3, 4]]
    error = caught.value
    assert (error.stage, error.index, error.indices) == ("fetch", None, (0, 1, 2))
    assert isinstance(error.__cause__, ValueError)


@workers
@pytest.mark.parametrize("surplus", [1, -1])
async def test_a_miscount_under_skip_is_fetched_item_by_item(surplus: int, num_proc: int) -> None:
    source = MiscountedGroups(5, surplus)
    p = Prefetcher(source, batch_size=3, num_proc=num_proc, on_error="skip")
    assert await collect(p) == [[0, 1, 2], [3, 4]]
    assert p.skipped == 0


@workers
@pytest.mark.parametrize(
    ("on_error", "batches", "skipped"),
    [("skip", [[0, 2], [4]], 2), (lambda error: -1, [[0, -1, 2], [-1, 4]], 0)],
    ids=["skip", "callable"],
)
async def test_broken_getitems_is_fetched_item_by_item(
    on_error: Any, batches: list[Any], skipped: int, num_proc: int
) -> None:
    p = Prefetcher(BrokenGroups(5), batch_size=3, num_proc=num_proc, on_error=on_error)
    assert await collect(p) == batches
    assert p.skipped == skipped


# Recognising


@pytest.mark.parametrize("num_proc", [1, 2, 3])
async def test_torch_iterables_are_known_by_name(num_proc: int) -> None:
    """They are iterable though they have __getitem__, and each worker reads a copy."""
    streams = [portion(20, num_proc, index) for index in range(num_proc)]
    items = await collect(Prefetcher(TorchFlow(20), num_proc=num_proc))
    assert Counter(items) == Counter(item for stream in streams for item in stream)
    for stream in streams:
        assert [item for item in items if item in stream] == stream


@pytest.mark.parametrize("source", [None, 5, object(), Numbers, lambda index: index])
def test_what_is_no_source_is_refused_with_a_list(source: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Prefetcher(source)
    for kind in ("map-style", "iterable", "async iterable", "generator function", "function"):
        assert kind in str(caught.value)


@workers
async def test_a_function_that_makes_no_source_fails_the_start(num_proc: int) -> None:
    p = Prefetcher(lambda: 5, num_proc=num_proc)
    with pytest.raises(WorkerStartError, match="int is not a source"):
        await p.start()


NO_LENGTH = [TypeError, NotImplementedError, AttributeError]


@workers
@pytest.mark.parametrize("error", NO_LENGTH)
async def test_a_length_that_raises_is_none_for_an_iterable(
    error: type[Exception], num_proc: int
) -> None:
    p = Prefetcher(FlowLengthRaises(error), num_proc=num_proc, split="parent")
    with pytest.raises(TypeError, match="length"):
        len(p)
    assert await collect(p) == TEN


@pytest.mark.parametrize("error", NO_LENGTH)
async def test_a_length_that_raises_is_none_for_map_style(error: type[Exception]) -> None:
    with pytest.raises(TypeError, match="sampler"):
        Prefetcher(LengthRaises(error))
    p = Prefetcher(LengthRaises(error), sampler=[3, 4], num_proc=0)
    assert await collect(p) == [3, 4]


# Factories


@pytest.mark.parametrize(("split", "told"), [("shard", False), ("worker", True), (None, False)])
async def test_torch_tells_only_those_who_divide_themselves(split: Any, told: bool) -> None:
    """Also where the split is known only when the worker has made the source."""
    items = await collect(Prefetcher(tells_torch, split=split, num_proc=1))
    assert items == [(item, told) for item in range(6)]


@pytest.mark.parametrize("kind", [Counted, AsyncCounted])
@pytest.mark.parametrize("num_proc", [0, 1, 3])
async def test_a_function_is_called_once_a_copy(
    kind: type[Counted], num_proc: int, journal: Journal
) -> None:
    p = Prefetcher(kind(Ten, journal), num_proc=num_proc)
    async with p:
        for _ in range(2):
            assert await collect(p) == TEN
        assert len(p) == 10
    made = Counter(pid for _, pid in journal.lines())
    assert list(made.values()) == [1] * max(1, num_proc)
    assert (str(os.getpid()) in made) is (num_proc == 0)


@workers
async def test_a_function_for_the_parent_is_called_there_once(
    num_proc: int, journal: Journal
) -> None:
    p = Prefetcher(Counted(functools.partial(Flow, 10), journal), split="parent", num_proc=num_proc)
    async with p:
        for _ in range(2):
            assert await collect(p) == TEN
    assert journal.lines() == [["made", str(os.getpid())]]


async def test_what_a_function_makes_is_checked_at_the_start() -> None:
    p = Prefetcher(functools.partial(Flow, 10), num_proc=2)
    with pytest.raises(ValueError, match=r"parent.*shard.*worker.*replicate"):
        await p.start()


# What copies are told

EPOCHS = ["0", "1", "2"]
TOLD: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    # source, arguments, copies
    "map": (Told, {"num_proc": 2}, 2),
    "map on a thread": (Told, {"num_proc": 0}, 1),
    "parent": (ToldFlow, {"num_proc": 2, "split": "parent"}, 1),
    "parent on a thread": (ToldFlow, {"num_proc": 0, "split": "parent"}, 1),
    "async parent": (AsyncToldFlow, {"num_proc": 1, "split": "parent"}, 1),
    "worker": (ToldFlow, {"num_proc": 2, "split": "worker"}, 2),
    "shard": (ToldShards, {"num_proc": 2, "num_shards": 2}, 2),
    "shards of one worker": (ToldShards, {"num_proc": 1, "num_shards": 3}, 3),
}


@pytest.mark.parametrize("case", TOLD)
async def test_every_copy_is_told_once_that_it_is_one_and_of_each_epoch(
    case: str, journal: Journal
) -> None:
    make, arguments, copies = TOLD[case]
    source = make(12, journal, [0.005])
    async with Prefetcher(source, num_prefetch=4, **arguments) as p:
        for epoch in range(3):
            assert {told for _, told, _ in await collect(p)} == {epoch}
    words = Counter((word, number) for word, _, number in journal.lines())
    assert words == {("reset", "0"): copies, **{("epoch", n): copies for n in EPOCHS}}
    for pid in {pid for _, pid, _ in journal.lines()}:
        told = [(word, number) for word, at, number in journal.lines() if at == pid]
        resets = sum(word == "reset" for word, _ in told)
        firsts = [number for word, number in told if word == "epoch"]
        assert firsts == sorted(firsts), "epochs out of order"
        assert resets == firsts.count("0"), "a copy was not reset, or not told of the first epoch"
        assert told[0] == ("reset", "0")


async def test_replicas_are_reset_once_each(journal: Journal) -> None:
    p = Prefetcher(ToldFlow(4, journal), num_proc=2, split="replicate", ordered=False)
    async with p, aiter(p) as items:
        while len({pid for _, pid, _ in journal.lines()}) < 2:
            await anext(items)
        for _ in range(20):
            await anext(items)
    resets = [pid for word, pid, _ in journal.lines() if word == "reset"]
    assert len(resets) == len(set(resets)) == 2


# Awaiting


@pytest.mark.parametrize("batch_size", [64, 8, None])
async def test_items_that_await_overlap(batch_size: int | None) -> None:
    p = Prefetcher(
        Overlapping(64),
        batch_size=batch_size,
        collate_fn=None if batch_size is None else list,
        concurrency=16,
        num_proc=1,
    )
    async with p:
        await collect(p)
        began = time.perf_counter()
        batches = await collect(p)
        seconds = time.perf_counter() - began
    items = batches if batch_size is None else [item for batch in batches for item in batch]
    assert [index for index, _ in items] == list(range(64))
    assert max(in_flight for _, in_flight in items) == 16
    assert seconds < 0.8


@pytest.mark.parametrize("split", ["worker", "parent"])
async def test_map_fn_that_awaits_overlaps_over_a_stream(split: Any) -> None:
    p = Prefetcher(Flow(64), map_fn=_wait, split=split, num_proc=1, concurrency=16)
    async with p:
        await collect(p)
        began = time.perf_counter()
        assert await collect(p) == list(range(64))
        assert time.perf_counter() - began < 0.8


async def _wait(item: int) -> int:
    await asyncio.sleep(0.05)
    return item


async def test_items_that_await_overlap_on_the_callers_loop() -> None:
    loops = set()

    async def note(item: int) -> int:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0.05)
        return item

    began = time.perf_counter()
    assert await collect(Prefetcher(Numbers(64), map_fn=note, num_proc=0)) == list(range(64))
    assert time.perf_counter() - began < 0.8
    assert loops == {asyncio.get_running_loop()}


# Threads of libraries


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize(("worker_threads", "loop"), [(1, LOOPS[0]), (2, LOOPS[1])])
def test_libraries_have_the_threads_that_are_given(
    method: str, worker_threads: int, loop: Loop
) -> None:
    """numpy's was loaded before the worker began; scipy's and OpenMP's by its first item."""
    environment, limits = dict(os.environ), threadpoolctl.threadpool_info()
    with warns(method):
        p = Prefetcher(Threads(2), mp_context=method, worker_threads=worker_threads)
    for libraries in run(collect(p), loop):
        assert {api for api, _, _ in libraries} == {"blas", "openmp"}
        assert sum(api == "blas" for api, _, _ in libraries) >= 2
        assert {number for _, _, number in libraries} == {worker_threads}
    assert dict(os.environ) == environment
    assert threadpoolctl.threadpool_info() == limits
