"""Take batches of rows from a pyarrow Table in worker processes: as tables, or as arrays.

A Table is indexed by column, so it is not itself the source: the source is the numbers of its
rows, and `collate_fn` takes a whole batch of rows at once. The table travels with that function,
its columns in memory that all workers share, and columns of a batch come back without a copy.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from typing import Any

import numpy as np
import pyarrow as pa

from aioprefetch import Prefetcher

CITIES = ("Bergen", "Graz", "Lyon", "Porto")


def make_table(rows: int) -> pa.Table:
    """Made measurements: text, numbers, and some that are missing."""
    random = np.random.default_rng(0)
    return pa.table(
        {
            "number": np.arange(rows),
            "city": [CITIES[number % len(CITIES)] for number in range(rows)],
            "degrees": pa.array(random.normal(15, 8, rows), mask=random.random(rows) < 0.01),
        }
    )


def take(table: pa.Table, rows: list[int]) -> pa.Table:
    return table.take(rows)


def take_arrays(table: pa.Table, rows: list[int]) -> dict[str, np.ndarray]:
    """Numbers as arrays, missing ones as NaN; text as an array of str."""
    return {name: table[name].take(rows).to_numpy() for name in table.column_names}


def rows_of(table: pa.Table, collate: Any, **options: Any) -> Prefetcher:
    """Batches of a table's rows, made by ``collate(table, rows)``."""
    return Prefetcher(range(len(table)), collate_fn=functools.partial(collate, table), **options)


async def main(args: argparse.Namespace) -> None:
    table = make_table(args.rows)
    options = {"batch_size": args.batch_size, "shuffle": True, "num_proc": args.num_proc}

    async with rows_of(table, take, **options) as batches:
        tables = [batch async for batch in batches]
    together = pa.concat_tables(tables).sort_by("number")
    assert together.equals(table.combine_chunks())
    print(f"as tables: {len(tables)} batches, {len(together)} rows, each once")
    print(tables[0].slice(0, 3).to_pylist())

    means = {}
    async with rows_of(table, take_arrays, **options) as batches:
        async for batch in batches:
            for city in CITIES:
                means.setdefault(city, []).append(batch["degrees"][batch["city"] == city])
    print("as arrays: " + ", ".join(f"{city} {mean(parts):.2f}" for city, parts in means.items()))


def mean(parts: list[np.ndarray]) -> float:
    return float(np.nanmean(np.concatenate(parts)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    asyncio.run(main(parser.parse_args()))
