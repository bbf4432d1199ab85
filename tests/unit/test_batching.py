"""How items become batches, and what is refused when it is asked for."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import numpy as np
import pytest

from aioprefetch import Prefetcher
from tests.datasets import (
    AsyncFlow,
    AsyncKeys,
    Flow,
    Keys,
    Numbers,
    Shards,
    double,
    pid_and,
    ten,
)
from tests.helpers import collect

workers = pytest.mark.parametrize("num_proc", [0, 2])


@workers
@pytest.mark.parametrize(
    ("arguments", "batches"),
    [
        ({"batch_size": 4}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        ({"batch_size": 4, "drop_last": True}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"batch_size": 1}, [[item] for item in range(10)]),
        ({"batch_size": 20}, [list(range(10))]),
        ({"batch_size": 20, "drop_last": True}, []),
        ({"sampler": [7, 7, 1]}, [7, 7, 1]),
        ({"sampler": [7, 7, 1], "batch_size": 2}, [[7, 7], [1]]),
        ({"sampler": [7, 7, 1], "batch_size": 2, "drop_last": True}, [[7, 7]]),
        ({"sampler": []}, []),
        ({"batch_sampler": [[3, 1], [2]]}, [[3, 1], [2]]),
        ({"batch_sampler": [(3, 1), range(2)]}, [[3, 1], [0, 1]]),
        ({"batch_sampler": []}, []),
    ],
    ids=str,
)
async def test_batches(arguments: dict[str, Any], batches: list[Any], num_proc: int) -> None:
    assert await collect(Prefetcher(Numbers(10), num_proc=num_proc, **arguments)) == batches


@workers
@pytest.mark.parametrize("kind", [Keys, AsyncKeys])
async def test_a_sampler_is_read_here(kind: type[Keys], num_proc: int) -> None:
    sampler = kind([4, 2, 8, 2, 6])
    async with Prefetcher(Numbers(10), sampler=sampler, batch_size=2, num_proc=num_proc) as p:
        for _ in range(2):
            assert await collect(p) == [[4, 2], [8, 2], [6]]
    assert sampler.epochs == [0, 1]
    check_places(sampler)


@workers
@pytest.mark.parametrize("kind", [Keys, AsyncKeys])
async def test_a_batch_sampler_is_read_here(kind: type[Keys], num_proc: int) -> None:
    sampler = kind([[4, 2], [8], [2, 6, 4]])
    p = Prefetcher(Numbers(10), batch_sampler=sampler, num_proc=num_proc)
    p.set_epoch(5)
    assert await collect(p) == [[4, 2], [8], [2, 6, 4]]
    assert sampler.epochs == [5]
    check_places(sampler)


def check_places(sampler: Keys) -> None:
    """In this process: an async sampler on the loop, any other off it."""
    [(pid, thread)] = sampler.places
    assert pid == os.getpid()
    assert (thread == threading.get_ident()) is isinstance(sampler, AsyncKeys)


@workers
async def test_keys_are_whatever_the_source_takes(num_proc: int) -> None:
    source = {"a": 1, ("b", 2): 2, None: 3}
    p = Prefetcher(source, sampler=[("b", 2), None, "a"], num_proc=num_proc)
    assert await collect(p) == [2, 3, 1]


@workers
async def test_shuffle_draws_each_index_once_anew_each_epoch(num_proc: int) -> None:
    async with Prefetcher(Numbers(100), shuffle=True, num_proc=num_proc) as p:
        epochs = [await collect(p) for _ in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert all(one != list(range(100)) for one in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


async def test_shuffle_with_drop_last_leaves_out_other_items_each_epoch() -> None:
    p = Prefetcher(Numbers(11), shuffle=True, batch_size=5, drop_last=True, num_proc=0)
    seen = [{item for batch in await collect(p) for item in batch} for _ in range(20)]
    assert {len(items) for items in seen} == {10}
    assert set().union(*seen) == set(range(11))


@pytest.mark.parametrize(
    "source", [Numbers(5), Flow(5), AsyncFlow(5)], ids=lambda source: type(source).__name__
)
async def test_collate_runs_in_the_worker_on_items_that_are_mapped(source: Any) -> None:
    p = Prefetcher(source, map_fn=double, batch_size=3, collate_fn=pid_and, num_proc=1)
    (pid, first), (same, second) = await collect(p)
    assert (first, second) == ([0, 2, 4], [6, 8])
    assert pid == same != os.getpid()


async def test_collate_runs_off_the_loop_without_processes() -> None:
    threads: set[int] = set()

    def collate(items: list[int]) -> int:
        threads.add(threading.get_ident())
        return sum(items)

    p = Prefetcher(Numbers(5), batch_size=3, collate_fn=collate, num_proc=0)
    assert await collect(p) == [3, 7]
    assert threading.get_ident() not in threads


@workers
async def test_collate_without_batches_is_called_on_each_item(num_proc: int) -> None:
    p = Prefetcher(Numbers(3), collate_fn=double, num_proc=num_proc)
    assert await collect(p) == [0, 2, 4]


@workers
async def test_items_without_batches_are_delivered_as_they_are(num_proc: int) -> None:
    source = [1, None, "text", [2, 3], (4,), {"five": 6}, np.arange(3, dtype=np.int8)]
    items = [item async for item in Prefetcher(source, num_proc=num_proc)]
    assert items[:-1] == source[:-1]
    assert (items[-1].dtype, items[-1].tolist()) == (np.int8, [0, 1, 2])


@workers
async def test_batches_are_stacked(num_proc: int) -> None:
    source = [{"x": np.full((2, 3), i, np.float32), "y": i} for i in range(4)]
    [batch] = [b async for b in Prefetcher(source, batch_size=4, num_proc=num_proc)]
    assert batch["x"].shape == (4, 2, 3)
    assert batch["x"].dtype == np.float32
    assert batch["x"][:, 0, 0].tolist() == batch["y"].tolist() == [0, 1, 2, 3]


# What is refused

M, F = Numbers(10), Flow(10)
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    # as torch refuses it
    (M, {"drop_last": True}, ValueError, "drop_last needs a batch_size"),
    (M, {"sampler": [0], "shuffle": True}, ValueError, "sampler .* shuffle"),
    (M, {"batch_sampler": [[0]], "batch_size": 2}, ValueError, "batch_sampler .* batch_size"),
    (M, {"batch_sampler": [[0]], "shuffle": True}, ValueError, "batch_sampler .* shuffle"),
    (M, {"batch_sampler": [[0]], "sampler": [0]}, ValueError, "batch_sampler .* sampler"),
    (M, {"batch_sampler": [[0]], "drop_last": True}, ValueError, "batch_sampler .* drop_last"),
    (F, {"shuffle": True}, ValueError, "shuffle needs a map-style source"),
    (F, {"sampler": [0]}, ValueError, "sampler needs a map-style source"),
    (F, {"batch_sampler": [[0]]}, ValueError, "batch_sampler needs a map-style source"),
    (M, {"num_proc": -1}, ValueError, "num_proc must be 0 or more"),
    (M, {"num_prefetch": 0}, ValueError, "num_prefetch must be 1 or more"),
    (M, {"num_proc": 0, "mp_context": "spawn"}, ValueError, "mp_context .* num_proc=0"),
    (M, {"mp_context": "thread"}, ValueError, "mp_context must be one of .*spawn.*'thread'"),
    (M, {"mp_context": 3}, TypeError, "mp_context must be .* not 3"),
    (M, {"shutdown_timeout": -1.0}, ValueError, "shutdown_timeout"),
    # numbers
    (M, {"batch_size": 0}, ValueError, "batch_size must be 1 or more"),
    (M, {"batch_size": -3}, ValueError, "batch_size must be 1 or more"),
    (M, {"batch_size": 2.0}, TypeError, "batch_size must be a whole number"),
    (M, {"batch_size": True}, TypeError, "batch_size must be a whole number"),
    (M, {"num_proc": "2"}, TypeError, "num_proc must be a whole number"),
    (M, {"num_proc": None}, TypeError, "num_proc must be a whole number"),
    (M, {"num_prefetch": -1}, ValueError, "num_prefetch must be 1 or more"),
    (M, {"concurrency": 0}, ValueError, "concurrency must be 1 or more"),
    (M, {"worker_threads": 0}, ValueError, "worker_threads must be 1 or more"),
    (M, {"seed": -1}, ValueError, "seed must be 0 or more"),
    (M, {"seed": 1 << 64}, ValueError, "seed must be below"),
    (M, {"seed": 0.5}, TypeError, "seed must be a whole number"),
    (M, {"shutdown_timeout": "5"}, ValueError, "shutdown_timeout"),
    (M, {"shutdown_timeout": float("nan")}, ValueError, "shutdown_timeout"),
    (Shards(10), {"num_shards": 0}, ValueError, "num_shards must be 1 or more"),
    # functions and iterables
    (M, {"map_fn": 3}, TypeError, "map_fn must be a function"),
    (M, {"collate_fn": "list"}, TypeError, "collate_fn must be a function"),
    (M, {"worker_init_fn": ()}, TypeError, "worker_init_fn must be a function"),
    (M, {"on_error": "ignore"}, ValueError, "on_error must be 'raise', 'skip'"),
    (M, {"on_error": None}, ValueError, "on_error must be 'raise', 'skip'"),
    (M, {"sampler": 3}, TypeError, "sampler must be an iterable"),
    (M, {"batch_sampler": 3}, TypeError, "batch_sampler must be an iterable"),
    # splits that the source cannot serve
    (M, {"split": "parent"}, ValueError, "map-style.* takes no split"),
    (M, {"num_shards": 2}, ValueError, "map-style.* takes no num_shards"),
    (F, {"split": "workers"}, ValueError, "split must be one of parent, shard, worker, replicate"),
    (F, {"split": "shard"}, ValueError, r"split='shard' needs a source with shard\("),
    (F, {"split": "replicate"}, ValueError, "replicate.* ordered=False"),
    (F, {"split": "worker", "num_shards": 2}, ValueError, "num_shards is for split='shard'"),
    (F, {"num_proc": 2}, ValueError, "parent.*shard.*worker.*replicate"),
    (ten, {"num_proc": 2}, ValueError, "parent.*shard.*worker.*replicate"),
    (iter([1]), {"split": "worker"}, ValueError, "iterator.* use split='parent'"),
    (iter([1]), {"split": "replicate", "ordered": False}, ValueError, "iterator.*'parent'"),
]


@pytest.mark.parametrize(("source", "arguments", "error", "message"), REFUSED)
def test_refused(
    source: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Prefetcher(source, **arguments)


def test_each_refusal_has_its_own_words() -> None:
    messages: dict[str, tuple[str, ...]] = {}
    for source, arguments, error, _ in REFUSED:
        with pytest.raises(error) as caught:
            Prefetcher(source, **arguments)
        names = tuple(sorted(arguments))
        assert messages.setdefault(str(caught.value), names) == names


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_a_context_object_does_as_well_as_its_name(method: str) -> None:
    context = multiprocessing.get_context(method)
    assert await collect(Prefetcher(Numbers(3), mp_context=context)) == [0, 1, 2]


def test_fork_is_warned_of_once_by_name_or_object() -> None:
    for context in ("fork", multiprocessing.get_context("fork")):
        with pytest.warns(RuntimeWarning, match="fork") as caught:
            Prefetcher(Numbers(3), mp_context=context)
        assert [warning.filename for warning in caught] == [__file__]
