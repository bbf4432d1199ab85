"""Clocks, processor time, memory and lateness."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil


class Meter:
    """Called with each item of a stream; true when enough has been seen.

    Nothing is measured while workers start and windows fill: that is the first ``warm``
    seconds after the first item, in which ``check`` looks at what comes.
    """

    def __init__(
        self,
        seconds: float,
        warm: float = 0.5,
        at_least: int = 5,
        check: Callable[[Any], object] | None = None,
    ) -> None:
        self._seconds = seconds
        self._warm = warm
        self._at_least = at_least
        self._check = check
        self._opened = time.perf_counter()
        self._first: float | None = None
        self._start: float | None = None
        self._cpu = self._all_cpu = 0.0
        self.count = 0
        self.elapsed = 0.0
        self.cpu = 0.0  # of this process, all its threads
        self.all_cpu = 0.0  # of the workers too

    def __call__(self, item: Any) -> bool:
        now = time.perf_counter()
        if self._start is not None:
            self.count += 1
            if now - self._start < self._seconds or self.count < self._at_least:
                return False
            self.elapsed = now - self._start
            self.cpu = time.process_time() - self._cpu
            self.all_cpu = cpu_seconds() - self._all_cpu
            return True
        self._warm_up(item, now)
        return False

    def _warm_up(self, item: Any, now: float) -> None:
        if self._first is None:
            self._first = now
        if self._check is not None:
            self._check(item)
        if now - self._first >= self._warm:
            self._all_cpu = cpu_seconds()
            self._cpu = time.process_time()
            self._start = time.perf_counter()

    @property
    def first(self) -> float:
        """Seconds from the making of this meter to the first item."""
        assert self._first is not None
        return self._first - self._opened

    @property
    def rate(self) -> float:
        """Items a second."""
        return self.count / self.elapsed


class First:
    """A meter that stops at the first item."""

    def __init__(self) -> None:
        self._opened = time.perf_counter()
        self.seconds = 0.0

    def __call__(self, item: Any) -> bool:
        self.seconds = time.perf_counter() - self._opened
        return True


class Heartbeat:
    """A task that sleeps again and again, and notes by how much it is woken late."""

    def __init__(self, period: float = 0.002) -> None:
        self._period = period
        self._task: asyncio.Task[None] | None = None
        self.late: list[float] = []

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + self._period
            await asyncio.sleep(self._period)
            self.late.append(max(0.0, time.perf_counter() - due))

    def percentile(self, percent: float) -> float:
        late = sorted(self.late)
        return late[min(len(late) - 1, int(len(late) * percent / 100))]


def workers_nanoseconds() -> int:
    """Processor time of what this process has started, finer than the system's ticks."""
    total = 0
    for process in family():
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            total += int(file.read_text().split()[0])
    return total


def family() -> Iterator[psutil.Process]:
    """The processes that this one has started, and those that they have."""
    yield from psutil.Process().children(recursive=True)


def pss(process: psutil.Process) -> int:
    """Bytes in memory, shared ones divided among those who share them."""
    return int(process.memory_full_info().pss)


def cpu_seconds() -> float:
    """Of this process and all that it has started."""
    total = 0.0
    for process in (psutil.Process(), *family()):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
