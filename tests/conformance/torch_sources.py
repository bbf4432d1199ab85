"""What torch's users have: datasets, and those that divide themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from aioprefetch.torch import collate


class Pair(NamedTuple):
    image: Any
    label: int


class Pairs(Dataset[Any]):  # type: ignore[misc]
    """Map-style: item i is a tensor and an array of i, and i."""

    def __init__(self, length: int = 13) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.full((2, 3), float(index)),
            "array": np.full(3, index, np.int16),
            "pair": Pair(torch.tensor([index]), index),
            "number": index,
            "fraction": index / 2,
            "text": f"item {index}",
            "both": (index, [float(index), b"bytes"]),
        }


class Grouped(Pairs):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"number": index, "of": len(indices)} for index in indices]


class Plain(Pairs):
    """Its items are numbers."""

    def __getitem__(self, index: int) -> int:
        return index


class Endless(Dataset[Any]):  # type: ignore[misc]
    """Has no length: somebody else says which items there are."""

    def __getitem__(self, index: int) -> int:
        return index


class Eager(Sampler[int]):  # type: ignore[misc]
    """Draws from torch's own generator, before it is asked for the first key."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(13).tolist())

    def __len__(self) -> int:
        return 13


class Marked(torch.Tensor):  # type: ignore[misc]
    """A tensor of the user's own class."""


class Drawing(Pairs):
    """Its items are drawn."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


class Dividing(IterableDataset[Any]):  # type: ignore[misc]
    """Each worker takes its part, as torch's documentation has it."""

    def __init__(self, length: int = 23) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.length))
        size = -(-self.length // info.num_workers)
        return iter(range(info.id * size, min((info.id + 1) * size, self.length)))


class Repeated(Dividing):
    """Each worker takes everything."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Telling(IterableDataset[Any]):  # type: ignore[misc]
    """What torch says of its worker."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield info.id, info.num_workers, info.dataset is self, info.seed


class TellingMap(Pairs):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return None
        return info.id, info.num_workers, info.dataset is self, info.seed


def initial_seed(worker: int) -> int:
    """A worker_init_fn as torch's documentation has it."""
    info = get_worker_info()
    assert info is not None
    seed: int = torch.initial_seed()
    assert seed == info.seed
    return seed


class Points(Dataset[Any]):  # type: ignore[misc]
    """A line with noise, to fit a small network to."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(256, 4, generator=generator)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.1

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


# Where a tensor lies


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory that a worker shares with its parent."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith("/memfd:aioprefetch (deleted)")
    return False


def collate_and_look(items: list[Any]) -> tuple[Any, bool]:
    """The batch, and whether it was stacked where it is delivered."""
    batch = collate(items)
    return batch, is_shared(batch)


async def collate_and_look_later(items: list[Any]) -> tuple[Any, bool]:
    return collate_and_look(items)


class Given:
    """Map-style: these items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def what_is_imported(items: list[Any]) -> list[str]:
    assert collate(items) is not None
    return [name for name in ("aioprefetch.torch", "aioprefetch._pool") if name in sys.modules]


def grow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(1)
