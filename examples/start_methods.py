"""How often each start method initialises the main module, in which processes, and how fast.

Every process that runs the top level of this file notes its number in a journal; every item
says which process made it. The rest is counting.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
import warnings
from collections import Counter
from typing import NamedTuple

from aioprefetch import Prefetcher

# The name travels in the environment, which every start method hands on.
if "START_METHODS_JOURNAL" not in os.environ:
    os.environ["START_METHODS_JOURNAL"] = tempfile.mkstemp(prefix="start-methods-")[1]
JOURNAL = os.environ["START_METHODS_JOURNAL"]
with open(JOURNAL, "a") as journal:
    print(os.getpid(), file=journal)

EXPLANATION = """\
fork         A worker is a copy of this process, its memory and open files included: nothing is
             initialised or imported again. But a lock that another thread holds at that moment
             stays locked in the copy for ever: fork is used only when asked for by name.
spawn        A worker is a new interpreter. It imports this file again, named __mp_main__, which
             is why the last lines stand under `if __name__ == "__main__":`.
forkserver   A small process without threads starts once and is copied for every worker.
             {server}
             The default: as safe as spawn, without a new interpreter for every worker.

What stands at the top level of the main module runs, and what it imports is imported, as often
as the table says: the first batch waits for it. Import what only the parent needs where it is
needed."""

SERVER = {
    True: "It has imported this file, so its copies need not do so again.",
    False: "In this version of Python it is clean of this file: every worker imports it.",
}


class Sleepy:
    """A map-style dataset: an item sleeps, then says who made it and who started the maker."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(self.seconds)
        return os.getpid(), os.getppid()


class Row(NamedTuple):
    method: str
    here: int
    server: int | None  # None: there is no such process
    workers: list[int]
    first_batch: float
    epoch: float

    def __str__(self) -> str:
        server = "-" if self.server is None else self.server
        workers = " + ".join(map(str, self.workers))
        times = f"{self.first_batch:11.2f} s{self.epoch:8.2f} s"
        return f"{self.method:<18}{self.here:>12}{server:>13}{workers:>12}{times}"


def initialisations() -> Counter[int]:
    """How often each process has run the top level of this file."""
    with open(JOURNAL) as journal:
        return Counter(map(int, journal))


async def measure(name: str, num_proc: int) -> Row:
    method = name.split()[0]
    workers: set[int] = set()
    starters: set[int] = set()
    times = []
    began = time.perf_counter()
    batches = Prefetcher(Sleepy(64, 0.01), batch_size=4, num_proc=num_proc, mp_context=method)
    async for pids, parents in batches:
        times.append(time.perf_counter() - began)
        workers.update(pids.tolist())
        starters.update(parents.tolist())
    runs = initialisations()
    server = sum(runs[pid] for pid in starters) if method == "forkserver" else None
    return Row(name, runs[os.getpid()], server, [runs[pid] for pid in workers], times[0], times[-1])


async def main(args: argparse.Namespace) -> None:
    # The explanation says what this warning says.
    warnings.filterwarnings("ignore", "mp_context='fork'", RuntimeWarning)
    print("how often the main module was initialised\n")
    print(f"{'':<18}{'here':>12}{'fork server':>13}{'workers':>12}{'1st batch':>13}{'epoch':>10}")
    for name in ("fork", "spawn", "forkserver", "forkserver again"):
        row = await measure(name, args.num_proc)
        print(row)
    print()
    print(EXPLANATION.format(server=SERVER[bool(row.server)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    try:
        asyncio.run(main(parser.parse_args()))
    finally:
        os.unlink(JOURNAL)
