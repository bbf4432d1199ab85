"""Read real photographs in the actors of a Ray cluster: the same batches as on this machine.

The cluster is a local one; give ``--address`` for another, whose nodes must be able to import
this package and to read the photographs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import ray
from photos import Photos, digests

from aioprefetch import ProcessPool
from aioprefetch.engines.ray import RayPool


async def main(photos: Photos) -> None:
    async with ProcessPool(2) as pool:
        here = await timed("this machine", photos, pool)
    async with RayPool(2) as pool:
        there = await timed(f"{pool.num_proc} actors of the cluster", photos, pool)
    if here != there:
        raise SystemExit("the batches differ")
    print(f"the same {len(here)} batches, byte for byte")


async def timed(name: str, photos: Photos, pool: ProcessPool | RayPool) -> list[str]:
    began = time.perf_counter()
    found = await digests(photos, pool)
    print(f"{name:<26} {len(photos) / (time.perf_counter() - began):6.0f} images/s")
    return found


if __name__ == "__main__":
    import skimage

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", help="of a running cluster")
    parser.add_argument("--crops", type=int, default=10, help="of each photograph")
    args = parser.parse_args()
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
    if args.address is None:
        ray.init(num_cpus=2, include_dashboard=False, runtime_env=here)
    else:
        ray.init(args.address, runtime_env=here)
    asyncio.run(main(Photos(Path(skimage.data_dir), args.crops, 128)))
    ray.shutdown()
