"""What tensorpack's MultiProcessRunner and MapData promise about the data, in numbers.

One process: the same data in the same order. Several: each runs its own copy of the flow, so an
epoch repeats some items and lacks others, and the share of unique ones says how many. Where
each item must come once, the flow is read in one place and only the mapping is spread.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import warnings
from collections.abc import AsyncIterable, Iterator

from aioprefetch import Prefetcher, rng


class Flow:
    """An iterable of the numbers below ``length``, in the given order."""

    def __init__(self, length: int, order: str) -> None:
        self.length = length
        self.order = order

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers():
            time.sleep(0.0005)  # as if it were read from somewhere
            yield int(number)

    def numbers(self) -> Iterator[int]:
        if self.order == "shuffled":
            return iter(rng().permutation(self.length))
        if self.order == "drawn":
            return iter(rng().integers(self.length, size=self.length))
        return iter(range(self.length))


def square(number: int) -> tuple[int, int]:
    return number, number**2


async def collect(batches: AsyncIterable[int]) -> list[int]:
    return [item async for item in batches]


def expected_share(order: str, length: int, num_proc: int) -> float:
    """Of unique items in an epoch to which every process gives an equal part."""
    if order == "drawn":  # the birthday bound: every draw is independent
        return 1 - (1 - 1 / length) ** length
    if order == "shuffled":  # no process repeats its own
        return 1 - (1 - 1 / num_proc) ** num_proc
    return 1 / num_proc  # all begin alike


async def one_process(length: int) -> None:
    async with Prefetcher(Flow(length, "sorted"), num_proc=1) as items:
        epochs = [await collect(items) for _ in range(2)]
    print(f"MultiProcessRunner, 1 process: {says(epochs == [list(range(length))] * 2)}")
    print("  the same data in the same order, epoch after epoch\n")


async def replicas(length: int, num_proc: int) -> None:
    print(f"MultiProcessRunner, {num_proc} processes: share of unique items\n")
    print(f"  {'the flow is':<12}{'1 epoch':>10}{'expected':>10}{'3 epochs':>10}")
    for order in ("sorted", "shuffled", "drawn"):
        flow = Flow(length, order)
        seen: set[int] = set()
        shares = []
        async with Prefetcher(flow, num_proc=num_proc, split="replicate", ordered=False) as items:
            for _ in range(3):
                seen.update(await collect(items))
                shares.append(len(seen) / length)
        expected = expected_share(order, length, num_proc)
        print(f"  {order:<12}{shares[0]:>10.1%}{expected:>10.1%}{shares[2]:>10.1%}")


def says(true: bool) -> str:
    return "yes" if true else "NO"


async def strict(length: int, num_proc: int) -> None:
    for ordered in (True, False):
        flow = Flow(length, "sorted")
        items = Prefetcher(flow, map_fn=square, split="parent", num_proc=num_proc, ordered=ordered)
        numbers = [number async for number, _ in items]
        print(numbers == sorted(numbers), sorted(numbers) == list(range(length)))
