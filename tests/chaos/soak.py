"""``python -m tests.chaos.soak [--minutes N]``: faults at random moments, for as long as wanted.

Items are arrays that say whether they are whole. At the end it prints what was survived and
what was lost, repeated, torn or left behind; it fails unless all of those are none.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from aioprefetch import Prefetcher
from tests.heartbeat import heartbeat
from tests.processes import eventually, leftovers, send, workers

LENGTH = 5_000  # items an epoch
BATCH = 4
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}


class Checked:
    """Arrays of one number, some small and some large; a few take their time."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        if index % 97 == 0:
            time.sleep(0.02)
        return np.full(40_000 if index % 50 == 0 else 500, index)


def whole(items: list[Any]) -> list[Any]:
    """A batch as it is, copied into shared memory array by array."""
    return items


@dataclass
class Tally:
    faults: Counter[str] = field(default_factory=Counter)
    delivered: int = 0
    lost: int = 0
    repeated: int = 0
    torn: int = 0
    held: float = 0.0  # seconds that the loop was, at most
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB

    def slope(self) -> float:
        """MiB an hour, by least squares over the second half."""
        points = self.memory[len(self.memory) // 2 :]
        if len(points) < 3:
            return 0.0
        seconds, sizes = zip(*points, strict=True)
        return float(np.polyfit(seconds, sizes, 1)[0]) * 3600

    def lines(self) -> Iterator[str]:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        yield f"faults survived: {sum(self.faults.values())} ({faults})"
        yield f"items delivered: {self.delivered}"
        yield f"lost {self.lost}, repeated {self.repeated}, torn {self.torn}"
        yield f"longest time that the loop was held: {self.held * 1000:.0f} ms"
        yield f"resident memory of this process: {self.slope():+.1f} MiB an hour"


async def soak(seconds: float, seed: int) -> Tally:
    tally, dice = Tally(), random.Random(seed)
    deadline = time.monotonic() + seconds
    side = [
        asyncio.ensure_future(work)
        for work in (break_things(tally, dice), weigh(tally, time.monotonic()))
    ]
    async with heartbeat() as heart:
        while time.monotonic() < deadline:
            await one_opening(tally, dice, deadline)
    tally.held = heart.longest
    for task in side:
        task.cancel()
    await asyncio.wait(side)
    return tally


async def one_opening(tally: Tally, dice: random.Random, deadline: float) -> None:
    """Some epochs with one pool: ordered or not, read to the end or left."""
    ordered = dice.random() < 0.7
    p = Prefetcher(
        Checked(),
        batch_size=BATCH,
        collate_fn=whole,
        num_proc=2,
        ordered=ordered,
        retries=99,
        task_timeout=2.0,
        shutdown_timeout=1.0,
    )
    async with p:
        for _ in range(dice.randrange(1, 4)):
            if time.monotonic() > deadline:
                return
            leave_at = LENGTH if dice.random() < 0.7 else dice.randrange(LENGTH)
            await one_epoch(p, tally, ordered, leave_at)


async def one_epoch(p: Prefetcher, tally: Tally, ordered: bool, leave_at: int) -> None:
    seen: list[int] = []
    async for batch in p:
        for array in batch:
            tally.torn += bool((array != array[0]).any())
            seen.append(int(array[0]))
        if len(seen) >= leave_at:
            break
    tally.delivered += len(seen)
    tally.repeated += len(seen) - len(set(seen))
    if len(seen) >= LENGTH:
        tally.lost += LENGTH - len(set(seen))
    if ordered:
        tally.lost += sum(found != number for number, found in enumerate(seen))


async def break_things(tally: Tally, dice: random.Random) -> None:
    while True:
        await asyncio.sleep(dice.expovariate(1.0))
        there = workers()
        if there:
            name = dice.choice(list(FAULTS))
            send(dice.choice(there), FAULTS[name])
            tally.faults[name] += 1


async def weigh(tally: Tally, start: float) -> None:
    process = psutil.Process(os.getpid())
    while True:
        await asyncio.sleep(1.0)
        tally.memory.append((time.monotonic() - start, process.memory_info().rss / 2**20))


async def main(minutes: float, seed: int) -> int:
    async for _ in Prefetcher(range(2)):  # starts what stays
        pass
    before = leftovers()
    tally = await soak(minutes * 60, seed)
    gc.collect()
    await eventually(lambda: not leftovers().beyond(before), 5)
    left = leftovers().beyond(before)
    for line in (*tally.lines(), f"left behind: {left or 'nothing'}"):
        sys.stdout.write(line + "\n")
    return int(bool(tally.lost or tally.repeated or tally.torn or left))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.minutes, options.seed)))
