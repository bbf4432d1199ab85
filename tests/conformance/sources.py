"""Sources of the conformance tests, which workers import."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np


class Squares:
    """Item i is i squared."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


class Growing:
    def __init__(self) -> None:
        self.items = [0, 1, 2]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]


class SlowShard:
    """Two streams, of which the first is slow."""

    def __init__(self, stream: int = -1) -> None:
        self.stream = stream

    def shard(self, num_shards: int, index: int) -> SlowShard:
        assert num_shards == 2
        return SlowShard(index)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for item in range(5):
            if self.stream == 0:
                time.sleep(0.2)
            yield self.stream, item


class Part:
    """As torch's Subset: some of a source's items, fetched together where that can be."""

    def __init__(self, source: Any, indices: list[int]) -> None:
        self.source = source
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.source[self.indices[index]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.source[self.indices[index]] for index in indices]


class Iterated:
    """Writes a line to a file whenever it is iterated."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __iter__(self) -> Iterator[int]:
        with open(self.log, "a") as file:
            file.write("iterated\n")
        return iter(range(12))


class Arrays:
    """Large items, of which one fails."""

    def __init__(self, bad: int, elements: int = 1 << 18) -> None:
        self.bad = bad
        self.elements = elements

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"bad {index}")
        return np.full(self.elements, index)


def affinity(_: Any) -> int:
    return len(os.sched_getaffinity(0))


def stay_on_one(_: int) -> None:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


def fail_late(key: int) -> int:
    raise KeyError(key)
