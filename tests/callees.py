"""Functions that tests have called in the workers of a pool."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import aioprefetch

counted = 0


def add(a: Any, b: Any) -> Any:
    return a + b


async def add_later(a: Any, b: Any) -> Any:
    await asyncio.sleep(0.001)
    return a + b


def pid(*_: Any) -> int:
    return os.getpid()


def count() -> int:
    """How often this worker was asked."""
    global counted
    counted += 1
    return counted


def double(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array * 2


def touch(path: Path) -> None:
    path.touch()


def raise_(error: BaseException) -> NoReturn:
    raise error


async def raise_later(error: BaseException) -> NoReturn:
    await asyncio.sleep(0.001)
    raise error


def exit_() -> NoReturn:
    sys.exit(3)


def skip() -> NoReturn:
    raise aioprefetch.SkipItem


def lock() -> Any:
    import threading

    return threading.Lock()


def die_at(path: Path, times: int) -> str:
    """Kill the worker so many times, then answer."""
    tries = len(list(path.iterdir()))
    (path / str(tries)).touch()
    if tries < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def nap(seconds: float, began: Path | None = None) -> int:
    if began is not None:
        began.touch()
    time.sleep(seconds)
    return os.getpid()


async def nap_async(seconds: float, notes: Path) -> None:
    """Note the begin, and the end by whichever way."""
    (notes / "began").touch()
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        (notes / "cancelled").touch()
        raise


def state(*_: Any) -> Any:
    info = aioprefetch.worker_info()
    assert info is not None
    return info.state


def model(worker: int) -> str:
    return f"model {worker}"


def draw() -> float:
    return float(aioprefetch.rng().random())


def draw_globally() -> float:
    return float(np.random.random())


class Adder:
    def __init__(self, number: int) -> None:
        self.number = number

    def plus(self, other: int) -> int:
        return self.number + other

    def __call__(self, other: int) -> int:
        return self.number + other


class Slow:
    """Items that take their time."""

    def __init__(self, length: int, seconds: float) -> None:
        self._length = length
        self._seconds = seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        return index


class CannotBeLoaded:
    """Its copy in a worker raises, or kills the worker."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.how == "raises":
            raise ValueError("not here")
        if self.how == "kills":
            os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once() -> NoReturn:
    os._exit(3)


def two_halves(_: int) -> Iterator[None]:
    yield


class Drawn:
    """Numbers drawn at their places."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, draw()
