"""What a batch that is ready costs, taken with `async for` and with the `for` of `blocking`."""

from __future__ import annotations

import asyncio
import statistics
import time

from aioprefetch import Prefetcher, blocking

ITEMS = 2000
TURNS = 5


def make() -> Prefetcher:
    return Prefetcher(range(ITEMS), num_prefetch=ITEMS + 1)


async def with_async_for() -> float:
    async with make() as p:
        items = aiter(p)
        await asyncio.sleep(1)  # until all are ready
        began = time.perf_counter()
        async for _ in items:
            pass
        return time.perf_counter() - began


def with_for() -> float:
    with blocking(make()) as batches:
        items = iter(batches)
        time.sleep(1)
        began = time.perf_counter()
        for _ in items:
            pass
        return time.perf_counter() - began


def main() -> None:
    turns = [(asyncio.run(with_async_for()), with_for()) for _ in range(TURNS)]
    for name, seconds in zip(("async for", "for"), zip(*turns, strict=True), strict=True):
        print(f"{name:<10}{statistics.median(seconds) / ITEMS * 1e6:6.0f} µs an item")


if __name__ == "__main__":
    main()
