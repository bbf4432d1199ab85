"""What tensorpack's MultiProcessRunner and MapData promise about the data, in numbers.

One process: the same data in the same order. Several: each runs its own copy of the flow, so an
epoch repeats some items and lacks others, and the share of unique ones says how many. Where
each item must come once, the flow is read in one place and only the mapping is spread.
"""

from __future__ import annotations

import argparse
import asyncio
import time
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


def square(number: int) -> int:
    return number**2


async def collect(items: AsyncIterable[int]) -> list[int]:
    return [item async for item in items]


async def one_process(length: int) -> None:
    print("MultiProcessRunner, 1 process\n")
    async with Prefetcher(Flow(length, "sorted"), num_proc=1) as items:
        for epoch in (1, 2):
            same = await collect(items) == list(range(length))
            print(f"  {f'epoch {epoch}: the same data in the same order':<54}{says(same)}")


async def many_processes(length: int, num_proc: int) -> None:
    print(f"\nMultiProcessRunner, {num_proc} processes: share of unique items\n")
    print(f"  {'':<30}{'1 epoch':>9}{'expected':>9}{'3 epochs':>9}")
    for order, words in (
        ("sorted", "all in the same order"),
        ("shuffled", "each in an order of its own"),
        ("drawn", "independent draws"),
    ):
        one, three = await unique_shares(Flow(length, order), num_proc)
        expected = expected_share(order, length, num_proc)
        print(f"  {words:<30}{one:>9.1%}{expected:>9.1%}{three:>9.1%}")
    print(
        "\n"
        f"  An epoch of {length} items has about {length // num_proc} from each process. "
        "Draws are expected to\n"
        "  hit 1 - (1 - 1/n)^n of n items, the birthday bound. While the flow is open its\n"
        "  processes go on where they are, so in three epochs at least one has gone through\n"
        "  all of its own data: a flow that has each item once a pass is seen whole."
    )


async def unique_shares(flow: Flow, num_proc: int) -> tuple[float, float]:
    """After one epoch, and after three of the same open flow."""
    async with Prefetcher(flow, num_proc=num_proc, split="replicate", ordered=False) as items:
        one = set(await collect(items))
        three = one | set(await collect(items)) | set(await collect(items))
    return len(one) / len(flow), len(three) / len(flow)


def expected_share(order: str, length: int, num_proc: int) -> float:
    """Of unique items in an epoch to which every process gives an equal part."""
    if order == "drawn":
        return 1 - (1 - 1 / length) ** length
    if order == "shuffled":  # draws as well, but no process repeats one of its own
        return 1 - (1 - 1 / num_proc) ** num_proc
    return 1 / num_proc  # all give the same part


async def strict_map(length: int, num_proc: int) -> None:
    print(f"\nMapData, strict, {num_proc} processes\n")
    squares = [square(number) for number in range(length)]
    for ordered in (False, True):
        got = await collect(
            Prefetcher(
                Flow(length, "sorted"),
                map_fn=square,
                split="parent",
                num_proc=num_proc,
                ordered=ordered,
            )
        )
        once, same = sorted(got) == squares, got == squares
        print(f"  {f'ordered={ordered}: each item exactly once':<54}{says(once)}")
        print(f"  {f'ordered={ordered}: in the order of the flow':<54}{says(same)}")


def says(true: bool) -> str:
    return "yes" if true else "no"


async def main(args: argparse.Namespace) -> None:
    await one_process(args.items)
    await many_processes(args.items, args.num_proc)
    await strict_map(args.items, args.num_proc)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=600, help="in the flow")
    parser.add_argument("--num-proc", type=int, default=3, help="where there are several")
    asyncio.run(main(parser.parse_args()))
