"""What it costs to start one worker with a source of many small objects, and the ways out.

The same million records three times: as a list of dicts, as arrays, and made in the worker by
a function given as the source. Then what it costs to take delivery of a batch of objects.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from aioprefetch import Prefetcher


class Columns:
    """The records as one array a field."""

    def __init__(self, length: int) -> None:
        self.number = np.arange(length)
        self.value = np.arange(length) / 2

    def __len__(self) -> int:
        return len(self.number)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": int(self.number[index]), "value": float(self.value[index])}


def dicts(length: int) -> list[dict[str, Any]]:
    return [{"number": number, "value": number / 2} for number in range(length)]


def own_memory(item: Any) -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


async def latest_by(stop: asyncio.Event) -> float:
    """By how much a heartbeat of 5 ms came late at worst."""
    worst = 0.0
    while not stop.is_set():
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        worst = max(worst, time.perf_counter() - due)
    return worst


async def start(source: Any) -> tuple[float, float, float]:
    """Seconds to start one worker, its memory in MB, and how late the loop was meanwhile."""
    gc.collect()  # what an earlier source has left must not be freed in this one's time
    stop = asyncio.Event()
    pulse = asyncio.create_task(latest_by(stop))
    prefetcher = Prefetcher(source, map_fn=own_memory, num_prefetch=1)
    began = time.perf_counter()
    await prefetcher.start()
    seconds = time.perf_counter() - began
    stop.set()
    memory = await anext(aiter(prefetcher))
    await prefetcher.aclose()
    return seconds, memory, await pulse


def records(length: int) -> list[dict[str, str]]:
    """Dicts of eight short texts, no two the same."""
    return [{f"field {n}": f"{row} {n}" for n in range(8)} for row in range(length)]


def constant(batch: Any, items: list[Any]) -> Any:
    return batch


async def delivery(batch: Any) -> float:
    """Seconds that the loop is held by taking a batch that is ready."""
    collate = functools.partial(constant, batch)
    async with Prefetcher(range(20), batch_size=1, collate_fn=collate, num_prefetch=4) as p:
        iterator = aiter(p)
        times = []
        for _ in range(5):
            await asyncio.sleep(0.3)  # until it is ready
            began = time.perf_counter()
            await anext(iterator)
            times.append(time.perf_counter() - began)
        await iterator.aclose()
    return float(np.median(times))


async def main(args: argparse.Namespace) -> None:
    length = args.length
    await start(range(1))  # the first start brings up the stdlib's forkserver too
    sources: dict[str, Callable[[], Any]] = {
        "a list of dicts": lambda: dicts(length),
        "an object with two arrays": lambda: Columns(length),
        "a function that makes the arrays": lambda: functools.partial(Columns, length),
    }
    rows = {name: await start(make()) for name, make in sources.items()}
    arrays = rows["an object with two arrays"]
    print(f"{f'{length:,} records as':<34} to start   memory   loop late")
    for name, (seconds, memory, late) in rows.items():
        ratios = f"{seconds / arrays[0]:7.1f} x{memory / arrays[1]:7.1f} x"
        print(f"{name:<34}{ratios}{late * 1000:9.0f} ms")
    few, many = await delivery(records(1_000)), await delivery(records(11_000))
    print(f"\none dict of eight texts, delivered: {(many - few) / 10_000 * 1e6:.1f} µs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1_000_000, help="records")
    asyncio.run(main(parser.parse_args()))
