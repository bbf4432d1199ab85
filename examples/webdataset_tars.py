"""Read tar files with the webdataset library, each file a stream of its own.

Five small tar files are made in a temporary folder. `Tars` gives them out file by file through
`shard`, so workers read them in parallel, each sample comes once, and the order is the same for
any number of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import webdataset

from aioprefetch import Prefetcher

Sample = tuple[str, np.ndarray, int]


class Tars:
    """An iterable of the samples in tar files, that can be divided by file."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Tars:
        return Tars(self.files[index::num_shards])

    def __iter__(self) -> Iterator[Sample]:
        # The files are divided already: webdataset must not divide them once more.
        files = webdataset.WebDataset(
            self.files, nodesplitter=None, workersplitter=None, shardshuffle=False
        )
        return iter(files.decode().to_tuple("__key__", "npy", "cls"))


def write_tar(path: Path, numbers: range) -> str:
    """A file of samples, each an array and its class."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            array = io.BytesIO()
            np.save(array, np.full((4, 4), number, np.float32))
            add(tar, f"{number:04}.npy", array.getvalue())
            add(tar, f"{number:04}.cls", str(number % 10).encode())
    return str(path)


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def write_tars(folder: Path, files: int, samples: int) -> list[str]:
    return [
        write_tar(folder / f"{file}.tar", range(file * samples, (file + 1) * samples))
        for file in range(files)
    ]


async def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tars = Tars(write_tars(Path(folder), args.files, args.samples))
        keys: list[str] = []
        async with Prefetcher(
            tars, batch_size=8, num_shards=tars.num_shards, num_proc=args.num_proc
        ) as batches:
            async for names, arrays, classes in batches:
                assert [f"{int(mean):04}" for mean in arrays.mean((1, 2))] == names
                assert [int(name) % 10 for name in names] == classes.tolist()
                keys += names
        assert sorted(keys) == [key for key, _, _ in tars]
    print(f"{len(keys)} samples of {args.files} tar files, each once, by {args.num_proc} workers")
    print(f"batches of {arrays.shape[1:]} arrays begin with {keys[:40:8]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=5)
    parser.add_argument("--samples", type=int, default=40, help="in each file")
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    asyncio.run(main(parser.parse_args()))
