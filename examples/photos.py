"""Decode, crop and flip real photographs in worker processes: in order, then as they come.

The photographs ship with scikit-image and differ in size, so some take ten times as long as
others. In order, a quick one waits for the slow one before it; unordered, it overtakes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from aioprefetch import Prefetcher, rng

PHOTOGRAPHS = [
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "clock_motion.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "retina.jpg",
    "rocket.jpg",
]


class Photos:
    """A map-style dataset of random crops, each photograph ``crops`` times."""

    def __init__(self, folder: Path, crops: int, size: int) -> None:
        self.paths = [folder / name for name in PHOTOGRAPHS] * crops
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        with Image.open(self.paths[index]) as image:
            return index, crop_and_flip(np.asarray(image.convert("RGB")), self.size)


def crop_and_flip(pixels: np.ndarray, size: int) -> np.ndarray:
    top, left = (rng().integers(0, side - size + 1) for side in pixels.shape[:2])
    crop = pixels[top : top + size, left : left + size]
    return crop[:, ::-1] if rng().random() < 0.5 else crop


async def read(photos: Photos, num_proc: int, ordered: bool) -> dict[int, str]:
    """A digest of every crop, in the order of delivery."""
    digests = {}
    async with Prefetcher(photos, num_proc=num_proc, ordered=ordered, seed=0) as crops:
        began = time.perf_counter()
        async for index, crop in crops:
            digests[index] = hashlib.sha256(crop.tobytes()).hexdigest()
        seconds = time.perf_counter() - began
    word = "ordered" if ordered else "unordered"
    print(f"{word:<9}  {len(digests) / seconds:6.0f} images/s   came first: {first(digests)}")
    return digests


async def digests(photos: Photos, pool: Any) -> list[str]:
    """Of every batch, in order, read on a pool."""
    batches = Prefetcher(photos, batch_size=16, shuffle=True, seed=0, pool=pool)
    return [hashlib.sha256(crops.tobytes()).hexdigest() async for _, crops in batches]


def first(indices: Iterable[int], count: int = 12) -> str:
    return " ".join(f"{index:2}" for index, _ in zip(indices, range(count), strict=False))


async def main(args: argparse.Namespace) -> None:
    import skimage  # here, since workers import this file too and do not need it

    photos = Photos(Path(skimage.data_dir), args.crops, args.size)
    print(
        f"{len(PHOTOGRAPHS)} photographs, {args.crops} crops of {args.size} × {args.size} "
        f"from each, {args.num_proc} workers\n"
    )
    in_order = await read(photos, args.num_proc, ordered=True)
    as_they_come = await read(photos, args.num_proc, ordered=False)
    # The generator of an item depends on its place in the plan alone, so even the random crops
    # are the same.
    if in_order != as_they_come:
        raise SystemExit("the two passes differ")
    print(f"\nthe same {len(in_order)} crops both times, byte for byte")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crops", type=int, default=20, help="of each photograph")
    parser.add_argument("--size", type=int, default=128, help="of a crop, in pixels")
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    asyncio.run(main(parser.parse_args()))
