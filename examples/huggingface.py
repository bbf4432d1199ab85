"""Read Hugging Face datasets: a Dataset by index, an IterableDataset by its shards.

Both are made here, so nothing is downloaded. A Dataset is a map-style source and needs nothing
more. An IterableDataset has `shard`, so each of its shards can be a stream of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, IterableDataset

from aioprefetch import Prefetcher

WORDS = ("good", "long", "dull")


def review(number: int) -> dict[str, Any]:
    word = WORDS[number % len(WORDS)]
    return {"number": number, "text": f"a {word} book", "good": word == "good"}


def reviews(files: list[range]) -> Iterator[dict[str, Any]]:
    """What stands in some files, one after another: a list among the arguments is the shards."""
    for numbers in files:
        yield from map(review, numbers)


def make_dataset(rows: int) -> Dataset:
    return Dataset.from_list([review(number) for number in range(rows)]).with_format("numpy")


def make_stream(rows: int, shards: int) -> IterableDataset:
    size = -(-rows // shards)
    files = [range(start, min(start + size, rows)) for start in range(0, rows, size)]
    return IterableDataset.from_generator(reviews, gen_kwargs={"files": files})


def in_turns(streams: list[list[Any]]) -> list[Any]:
    """The next item of each stream that has one, round after round."""
    nothing = object()
    rounds = itertools.zip_longest(*streams, fillvalue=nothing)
    return [item for round_ in rounds for item in round_ if item is not nothing]


async def by_index(rows: int, num_proc: int) -> None:
    dataset = make_dataset(rows)
    async with Prefetcher(dataset, batch_size=32, shuffle=True, num_proc=num_proc) as batches:
        for epoch in range(2):
            numbers, good = [], 0
            async for batch in batches:
                numbers += batch["number"].tolist()
                good += int(batch["good"].sum())
            assert sorted(numbers) == list(range(rows))
            print(f"  epoch {epoch}: {rows} rows, each once, {good} good; first {numbers[:5]}")


async def by_shards(rows: int, shards: int, num_proc: int) -> None:
    stream = make_stream(rows, shards)
    p = Prefetcher(stream, num_shards=stream.num_shards, num_proc=num_proc)
    items = [item async for item in p]
    parts = [list(stream.shard(num_shards=shards, index=index)) for index in range(shards)]
    assert items == in_turns(parts)
    assert sorted(items, key=lambda item: item["number"]) == list(stream)
    print(f"  {len(items)} items of {shards} shards in turns, by {num_proc} workers")
    print(f"  first {[item['number'] for item in items[:shards]]}")


async def main(args: argparse.Namespace) -> None:
    print("a Dataset, shuffled")
    await by_index(args.rows, args.num_proc)
    print("an IterableDataset, by its shards")
    await by_shards(args.rows, args.shards, args.num_proc)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--shards", type=int, default=5, help="of the IterableDataset")
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    asyncio.run(main(parser.parse_args()))
