"""``python -m tests.benchmarks.bottleneck [--settings N] [--seed N]``.

Is `stats().bottleneck` right? Each setting gives source, workers, transport and consumer costs
of their own, by sleeping; the largest is at least twice the next, or two are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from aioprefetch import Prefetcher, Stats

Part = Literal["workers", "consumer", "source", "transport"]
PARTS: tuple[Part, ...] = get_args(Part)
NUM_PROC = 2
BATCHES = 60


@dataclass(frozen=True)
class Setting:
    """Seconds a batch that each part takes, were the others free."""

    expected: str
    workers: float
    consumer: float
    source: float
    transport: float
    blocks: bool = False  # whether the consumer keeps the loop
    transfers: bool = False  # whether transport is a transfer function, or rebuilding

    @property
    def costs(self) -> dict[Part, float]:
        return {part: getattr(self, part) for part in PARTS}


def draw(dice: random.Random, expected: str, base: float) -> Setting:
    """A setting with the bottleneck that is asked for."""
    costs: dict[Any, float] = {part: base * dice.uniform(0.05, 0.5) for part in PARTS}
    if expected == "balanced":
        first, second = dice.sample(PARTS, 2)
        costs[first], costs[second] = base, base * dice.uniform(0.97, 1.03)
    else:
        costs[expected] = base
    return Setting(expected, **costs, blocks=dice.random() < 0.5, transfers=dice.random() < 0.5)


def grid(seed: int, settings: int) -> list[Setting]:
    """As many settings of each kind."""
    dice = random.Random(seed)
    kinds = [*PARTS, "balanced"]
    return [
        draw(dice, kinds[number % len(kinds)], dice.uniform(0.006, 0.015))
        for number in range(settings)
    ]


class Source:
    """Takes its time in the process that reads it."""

    def __init__(self, seconds: float, batches: int) -> None:
        self.seconds = seconds
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        for item in range(self.batches):
            time.sleep(self.seconds)
            yield item


class Rebuilt:
    """Takes its time to be unpickled."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.seconds,)


def _rebuild(seconds: float) -> Rebuilt:
    time.sleep(seconds)
    return Rebuilt(seconds)


@dataclass(frozen=True)
class Work:
    """What a worker does with an item."""

    seconds: float
    rebuilding: float

    def __call__(self, item: int) -> Any:
        time.sleep(self.seconds)
        return Rebuilt(self.rebuilding) if self.rebuilding else item


@dataclass(frozen=True)
class Transfer:
    seconds: float

    def __call__(self, batch: Any) -> Any:
        time.sleep(self.seconds)
        return batch


def make(setting: Setting, batches: int = BATCHES) -> Prefetcher[Any]:
    rebuilding = 0.0 if setting.transfers else setting.transport
    return Prefetcher(
        Source(setting.source, batches),
        split="parent",
        map_fn=Work(NUM_PROC * setting.workers, rebuilding),
        transfer=Transfer(setting.transport) if setting.transfers else None,
        num_proc=NUM_PROC,
        num_prefetch=4 * NUM_PROC,
    )


async def measure(setting: Setting, batches: int = BATCHES) -> Stats:
    """Run it, and give what the statistics say."""
    async with make(setting, batches) as prefetcher:
        async for _ in prefetcher:
            if setting.blocks:
                time.sleep(setting.consumer)  # noqa: ASYNC251 - as a training step does
            else:
                await asyncio.sleep(setting.consumer)
        return prefetcher.stats()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bottleneck",
        description="Is stats().bottleneck right? Costs are random, and by sleeping.",
    )
    parser.add_argument("--settings", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the costs (default: 0)")
    options = parser.parse_args()
    columns = [*(f"{part} ms" for part in PARTS), "expected", "said", ""]
    print("".join(f"{column:>14}" for column in columns))
    right = 0
    for setting in grid(options.seed, options.settings):
        said = asyncio.run(measure(setting)).bottleneck
        right += said == setting.expected
        costs = [f"{1000 * cost:.2f}" for cost in setting.costs.values()]
        mark = "" if said == setting.expected else "wrong"
        print("".join(f"{text:>14}" for text in (*costs, setting.expected, said, mark)), flush=True)
    print(f"right in {right} of {options.settings}")


if __name__ == "__main__":
    main()
