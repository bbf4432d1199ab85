"""Batches of 1 MiB from a local cluster of two processes, beside the engine's own way.

    python -m tests.benchmarks.clusters dask     # client.map + as_completed
    python -m tests.benchmarks.clusters ray      # Ray Data's iter_batches; needs ray[data]

Both make the same batches on the same cluster, by turns; medians are printed, and their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from aioprefetch import Prefetcher

ITEMS, SIZE = 64, 4096  # of float32: 1 MiB a batch
_BLOCK = 8  # batches of one of Ray Data's blocks, which are to be the same batches
_BEAT = 0.002  # seconds of the heartbeat by which lateness is measured


class Rows:
    """Rows that cost next to nothing: what is measured is how they come."""

    def __init__(self, batches: int) -> None:
        self._length = batches * ITEMS

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.full(SIZE, index, np.float32)


def make_batch(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The same batch, in one call."""
    rows = Rows(number + 1)
    return np.stack([rows[number * ITEMS + item] for item in range(ITEMS)])


class Run(NamedTuple):
    """One pass."""

    first: float  # seconds to the first batch
    rate: float  # batches a second
    late: float  # seconds, p99 of a heartbeat's lateness


async def measure(batches: Any, count: int) -> Run:
    """Read them, while a heart beats on the same loop."""
    late: list[float] = []

    async def beat() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_BEAT)
            late.append(time.perf_counter() - before - _BEAT)

    beating = asyncio.create_task(beat())
    began = time.perf_counter()
    first, total, seen = 0.0, 0.0, 0
    async for batch in batches:
        first = first or time.perf_counter() - began
        total += float(batch[0, 0])
        seen += 1
    seconds = time.perf_counter() - began
    beating.cancel()
    if seen != count or total != sum(number * ITEMS for number in range(count)):
        raise SystemExit(f"{seen} batches came, and not those that were asked for")
    return Run(first, seen / seconds, sorted(late)[int(0.99 * len(late))])


@asynccontextmanager
async def dask() -> AsyncIterator[tuple[Any, dict[str, Callable[[int], Any]]]]:
    from distributed import Client, LocalCluster, as_completed

    from aioprefetch.engines.dask import DaskPool

    async def theirs(count: int) -> AsyncIterator[Any]:
        futures = client.map(make_batch, range(count), pure=False)
        async for _, batch in as_completed(futures, with_results=True):
            yield batch

    async with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            asynchronous=True,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
        DaskPool(client, num_proc=2) as pool,
    ):
        yield pool, {"client.map": theirs}


@asynccontextmanager
async def ray() -> AsyncIterator[tuple[Any, dict[str, Callable[[int], Any]]]]:
    import ray
    import ray.data

    from aioprefetch.engines.ray import RayPool

    def rows_of(batch: dict[str, Any]) -> dict[str, Any]:
        made = [np.full(SIZE, index, np.float32) for index in batch["id"]]
        return {"data": np.stack(made)}

    async def theirs(count: int) -> AsyncIterator[Any]:
        data = ray.data.range(count * ITEMS, override_num_blocks=count // _BLOCK)
        batches = iter(data.map_batches(rows_of, batch_size=ITEMS).iter_batches(batch_size=ITEMS))
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch["data"]

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        async with RayPool(2) as pool:
            yield pool, {"ray.data": theirs}
    finally:
        ray.shutdown()


async def main(args: argparse.Namespace) -> None:
    async with {"dask": dask, "ray": ray}[args.engine]() as (pool, others):

        def ours(count: int) -> Any:
            return Prefetcher(Rows(count), batch_size=ITEMS, ordered=False, pool=pool)

        contenders = {"aioprefetch": ours, **others}
        runs: dict[str, list[Run]] = {name: [] for name in contenders}
        for _ in range(args.repeats + 1):
            for name, contender in contenders.items():
                runs[name].append(await measure(contender(args.batches), args.batches))
    print("| | batches/s | first batch, ms | lateness p99, ms |\n|---|---|---|---|")
    medians = {
        name: Run(*map(statistics.median, zip(*found[1:], strict=True)))  # the first warms up
        for name, found in runs.items()
    }
    for name, run in medians.items():
        print(f"| {name} | {run.rate:.0f} | {1000 * run.first:.0f} | {1000 * run.late:.1f} |")
    mine = medians["aioprefetch"]
    for name in others:
        run = medians[name]
        print(
            f"\n{mine.rate / run.rate:.2f} × the throughput of {name}, the first batch after "
            f"{mine.first / run.first:.2f} × the time"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("engine", choices=["dask", "ray"])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.batches < 1 or options.batches % _BLOCK:
        parser.error(f"argument --batches: {options.batches} is no multiple of {_BLOCK}")
    asyncio.run(main(options))
