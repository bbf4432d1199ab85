"""Sources of arrays, and of items that are slow or fatal, for workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE = 96


class Images:
    """A dict of a large array and a label an item."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.full((SIDE, SIDE), index, np.float32), "label": np.int64(index)}


class Slow:
    """Numbers, of which some take their time."""

    def __init__(self, length: int, seconds: dict[int, float]) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds.get(index, 0))
        return index


class Journal(Slow):
    """The same, which write down each run."""

    def __init__(self, path: Path, length: int, seconds: dict[int, float]) -> None:
        super().__init__(length, seconds)
        self.path = path

    def __getitem__(self, index: int) -> int:
        with open(self.path, "a", buffering=1) as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)

    def lines(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()]


class Fatal:
    """Numbers, one of which kills its worker."""

    def __init__(self, length: int, fatal: int) -> None:
        self.length = length
        self.fatal = fatal

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


VALUES: list[Any] = [
    np.arange(100_000, dtype=">i4"),
    np.zeros((30_000,), np.dtype([("a", "<i2"), ("b", "<f8")])),
    np.arange("2020-01-01", "2050-01-01", dtype="datetime64[D]"),
    np.array(3.5),
    np.empty((0, 7)),
    np.arange(200_000).reshape(400, 500)[::2, ::3],
    np.asfortranarray(np.arange(200_000).reshape(400, 500)),
    np.array([{"a": 1}, None], dtype=object),
    {"x": [np.ones(50_000), (np.zeros(3), "text")], "y": b"z" * 1_000_000},
    "t" * 200_000,
]


def assert_same(result: Any, value: Any) -> None:
    """Equal, of the same types, dtypes and shapes."""
    assert type(result) is type(value)
    if isinstance(value, np.ndarray):
        assert (result.dtype, result.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(result, value)
    elif isinstance(value, dict):
        assert list(result) == list(value)
        for key in value:
            assert_same(result[key], value[key])
    elif isinstance(value, (list, tuple)):
        assert len(result) == len(value)
        for one, other in zip(result, value, strict=True):
            assert_same(one, other)
    else:
        assert result == value


class Values:
    """The one value, again and again."""

    def __init__(self, value: Any, length: int) -> None:
        self.value = value
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.value


class BegunBy(Fatal):
    """Writes down which process begins each item, before it may be fatal."""

    def __init__(self, path: Path, length: int, fatal: int) -> None:
        super().__init__(length, fatal)
        self.path = path

    def __getitem__(self, index: int) -> int:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{index} {os.getpid()}\n".encode())
        os.close(fd)
        return super().__getitem__(index)

    def begun(self) -> list[tuple[int, int]]:
        """Items and processes, in the order begun."""
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [(int(index), int(pid)) for index, pid in lines]


class Pair(NamedTuple):
    """What `as_pair` makes of a batch."""

    images: Any
    labels: list[int]


def as_pair(items: list[dict[str, Any]]) -> Pair:
    """A collate_fn of the user's."""
    labels = [int(item["label"]) for item in items]
    return Pair(np.stack([item["image"] for item in items]), labels)
