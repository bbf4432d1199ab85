"""Read real photographs on the workers of a Dask cluster: the same batches as on this machine.

The cluster is a local one of two processes; give ``--scheduler tcp://…`` for another, whose
workers must be able to import this package and to read the photographs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

from distributed import Client, LocalCluster
from photos import Photos, digests

from aioprefetch import ProcessPool
from aioprefetch.engines.dask import DaskPool


async def main(photos: Photos, client: Client) -> None:
    async with ProcessPool(2) as pool:
        here = await timed("this machine", photos, pool)
    async with DaskPool(client) as pool:
        there = await timed(f"{pool.num_proc} workers of the cluster", photos, pool)
    if here != there:
        raise SystemExit("the batches differ")
    print(f"the same {len(here)} batches, byte for byte")


async def timed(name: str, photos: Photos, pool: ProcessPool | DaskPool) -> list[str]:
    began = time.perf_counter()
    found = await digests(photos, pool)
    print(f"{name:<26} {len(photos) / (time.perf_counter() - began):6.0f} images/s")
    return found


if __name__ == "__main__":
    import skimage

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", help="address of a running one")
    parser.add_argument("--crops", type=int, default=10, help="of each photograph")
    args = parser.parse_args()
    with ExitStack() as stack:
        where = args.scheduler
        if where is None:
            where = stack.enter_context(
                LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0")
            )
        client = stack.enter_context(Client(where))
        asyncio.run(main(Photos(Path(skimage.data_dir), args.crops, 128), client))
