"""Hugging Face datasets as sources."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from aioprefetch import Prefetcher
from tests.edge.run import in_turns, load_example, run_example
from tests.helpers import collect

example = load_example("huggingface", "datasets")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
ROWS = 53


def stream(shards: int) -> Any:
    return example.make_stream(ROWS, shards)


def numbers(items: list[Any]) -> list[int]:
    return [item["number"] for item in items]


def test_the_example_runs() -> None:
    out = run_example("huggingface", "--rows", "100")
    assert "epoch 1: 100 rows, each once" in out
    assert "100 items of 5 shards in turns" in out


@one_loop
@pytest.mark.parametrize("num_proc", [0, 2])
async def test_a_dataset_is_read_by_index(num_proc: int) -> None:
    dataset = example.make_dataset(ROWS)
    p = Prefetcher(dataset, batch_size=8, num_proc=num_proc)
    assert len(p) == 7
    batches = [batch async for batch in p]
    assert [number for batch in batches for number in batch["number"].tolist()] == list(range(ROWS))
    assert [text for batch in batches for text in batch["text"]] == list(dataset["text"])


@one_loop
@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize("shards", [1, 3, 5])
async def test_streams_take_turns(shards: int, num_proc: int) -> None:
    source = stream(5)
    p = Prefetcher(source, num_shards=shards, num_proc=num_proc)
    parts = [source.shard(num_shards=shards, index=index) for index in range(shards)]
    items = await collect(p)
    assert numbers(items) == numbers(in_turns(parts))
    assert sorted(numbers(items)) == numbers(list(source)) == list(range(ROWS))
    if shards == 1:
        assert items == list(source)


@one_loop
async def test_it_is_read_by_its_shards_unless_told_otherwise() -> None:
    source = stream(3)
    by_default = await collect(Prefetcher(source, num_proc=2))
    assert by_default == await collect(Prefetcher(source, split="shard", num_shards=2))
    few = await collect(Prefetcher(stream(1), num_proc=2))  # no more streams than shards
    assert few == list(source)


@one_loop
async def test_unordered_each_item_comes_once() -> None:
    items = await collect(Prefetcher(stream(5), num_shards=5, num_proc=2, ordered=False))
    assert Counter(numbers(items)) == Counter(range(ROWS))


@one_loop
async def test_a_shuffled_stream_is_told_the_epoch() -> None:
    source = stream(4).shuffle(seed=3, buffer_size=10)
    async with Prefetcher(source, num_shards=2, num_proc=2) as p:
        first, second = numbers(await collect(p)), numbers(await collect(p))
        p.set_epoch(0)
        again = numbers(await collect(p))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert first == again


@one_loop
async def test_nothing_is_divided_twice_where_torch_is() -> None:
    """There an IterableDataset is torch's too, and would divide itself by torch's worker info."""
    pytest.importorskip("torch", reason="torch is not installed")
    for source in (stream(4), stream(4).with_format("torch"), lambda: stream(4)):
        items = await collect(Prefetcher(source, num_shards=2, num_proc=2))
        assert sorted(map(int, numbers(items))) == list(range(ROWS))
