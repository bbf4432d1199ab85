"""Functions and sources whose workers die, hang or are killed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import aioprefetch
from tests.faulty import BAD
from tests.processes import send, workers


def same(item: Any) -> Any:
    return item


def drawn(item: Any) -> Any:
    """The item and a number drawn at its place."""
    return item, float(aioprefetch.rng().random())


def die(_: Any) -> Any:
    os._exit(3)


class Tries:
    """Notes each try of each item in a file; the first few of some kill the worker."""

    def __init__(
        self, folder: Path, fatal: dict[int, int], function: Callable[[Any], Any] = same
    ) -> None:
        self._folder = str(folder)
        self._fatal = fatal
        self._function = function

    def made(self) -> dict[int, int]:
        """How often each item was tried."""
        found = Counter(int(re.findall(r"\d+", name)[0]) for name in os.listdir(self._folder))
        return dict(sorted(found.items()))

    def __call__(self, item: int) -> Any:
        for number in itertools.count():
            file = os.path.join(self._folder, f"{item} {number}")
            try:
                os.close(os.open(file, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            break
        if number < self._fatal.get(item, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._function(item)


def blocks(count: int) -> Iterator[Any]:
    for number in range(count):
        yield np.full(50_000, float(number))


class AddInPlaceThenDie:
    def __init__(self, folder: Path, bad: int) -> None:
        self._once = DiesOnce(folder, 9)
        self._bad = bad

    def __call__(self, item: Any) -> Any:
        number = item[0]
        item += 1
        if number == self._bad:
            self._once(0)
        return item


class DiesOnce:
    """Dies when it is first called, in whichever process."""

    def __init__(self, folder: Path, how: int) -> None:
        self._file = str(folder / "died")
        self._how = how

    def __call__(self, _: Any) -> None:
        if not os.path.exists(self._file):
            open(self._file, "w").close()
            os.kill(os.getpid(), self._how)


class WorksTwice:
    """An init function that works in the first two workers."""

    def __init__(self, folder: Path) -> None:
        self._tries = Tries(folder, {})

    def __call__(self, _: int) -> None:
        self._tries(7)
        if self._tries.made()[7] > 2:
            raise RuntimeError("that is enough")


class Flow:
    """Two streams of numbers, 0… and 100…, by ``shard`` or by worker, with state or without.

    ``function`` is called where they are read.
    """

    def __init__(
        self, length: int, kind: str, function: Callable[[int], Any] = same, first: int = 0
    ) -> None:
        self._length = length
        self._kind = kind
        self._function = function
        self._first = first
        self._start = 0
        if kind == "state":
            self.state_dict = self._state
            self.load_state_dict = self._load

    def _state(self) -> Any:
        return {"next": self._start}

    def _load(self, state: Any) -> None:
        self._start = state["next"]

    def shard(self, num_shards: int, index: int) -> Flow:
        assert num_shards <= 2
        return Flow(self._length, self._kind, self._function, 100 * index)

    def __iter__(self) -> Iterator[Any]:
        info = aioprefetch.worker_info()
        assert info is not None
        if self._kind == "iterator state":
            return FlowIterator(self._length, self._function, self._first or 100 * info.id)
        return self._read(self._first or 100 * info.id)

    def _read(self, first: int) -> Iterator[Any]:
        start, self._start = self._start, 0
        for number in range(start, self._length):
            self._start = number + 1
            yield self._function(first + number)
        self._start = 0


class FlowIterator:
    def __init__(self, length: int, function: Callable[[int], Any], first: int) -> None:
        self._length = length
        self._function = function
        self._first = first
        self._next = 0

    def __iter__(self) -> FlowIterator:
        return self

    def __next__(self) -> Any:
        if self._next == self._length:
            raise StopIteration
        self._next += 1
        return self._function(self._first + self._next - 1)

    def state_dict(self) -> int:
        return self._next

    def load_state_dict(self, state: int) -> None:
        self._next = state


class Fickle:
    """Dies once at its tenth item, and is another when it is read again."""

    def __init__(self, length: int, change: str, folder: Path) -> None:
        self._length = length
        self._change = change
        self._dies = DiesOnce(folder, 9)
        self._file = folder / "died"

    def __iter__(self) -> Iterator[int]:
        again = self._file.exists()
        for number in range(self._length):
            if number == 10:
                time.sleep(0.1)  # what comes before has been reported
                self._dies(0)
            if again and number == 5:
                if self._change == "shorter":
                    return
                yield 1000
            else:
                yield number


class Slow:
    """Takes its time for each item."""

    def __init__(self, length: int, seconds: float) -> None:
        self._length = length
        self._seconds = seconds

    def __iter__(self) -> Iterator[int]:
        for number in range(self._length):
            time.sleep(self._seconds)
            yield number


class Sleeps:
    """Items that take a while."""

    def __init__(self, length: int, seconds: float) -> None:
        self._length = length
        self._seconds = seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        return index


class Hangs:
    """A function that does not come back from the bad item, in one of the ways."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __call__(self, item: Any) -> Any:
        if item == BAD or (isinstance(item, list) and BAD in item):
            if self._how == "sleep":
                time.sleep(1000)
            elif self._how == "lock":
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
            elif self._how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:  # holds the interpreter
                re.match(r"(a+)+$", "a" * 60 + "b")
        return item


def block(seconds: float) -> None:
    """What a step that does not yield does to the loop."""
    time.sleep(seconds)


async def hangs_async(item: Any) -> Any:
    await asyncio.sleep(1000 if item == BAD else 0.01)
    return item


def oom_score(_: Any) -> int:
    with open("/proc/self/oom_score_adj") as file:
        return int(file.read())


async def kill_all_again_and_again() -> None:
    while True:
        await asyncio.sleep(0.05)
        for worker in workers():
            send(worker)


class Mapped:
    """Items 0… as a function makes them."""

    def __init__(self, length: int, function: Callable[[int], Any]) -> None:
        self._length = length
        self._function = function

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._function(index)


class FatalKey:
    """A key that kills the first worker that unpickles it."""

    def __init__(self, folder: Path | None, key: int) -> None:
        self.folder = folder
        self.key = key

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.folder is not None and multiprocessing.parent_process() is not None:
            DiesOnce(self.folder, 9)(0)


class Keyed:
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: FatalKey) -> int:
        return key.key


class Texts:
    """Long texts that begin with their number; they travel in the pickle."""

    def __init__(self, length: int, size: int) -> None:
        self._length = length
        self._size = size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> str:
        return f"{index:08}" + "x" * (self._size // 2)


def kill_self(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigterm(_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def fail(_: Any) -> None:
    raise ValueError("it cannot work here")


def exit_0_at_2(item: int) -> int:
    if item == BAD:
        os._exit(0)
    return item


def segfault_at_2(item: int) -> int:
    if item == BAD:
        ctypes.string_at(0)
    return item


def memory_error_at_2(item: int) -> Any:
    if item == BAD:
        np.ones(1 << 50)
    return item


def recurse_at_2(item: int) -> int:
    return recurse_at_2(item) if item == BAD else item


def fork_then_sleep(item: int) -> int:
    """Leaves a child that holds everything of the worker's open for a while."""
    time.sleep(0.01)
    if item == 5 and os.fork() == 0:
        os.setsid()
        time.sleep(2)
        os._exit(0)
    return item


def leave_a_thread(_: Any) -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


def leave_a_subprocess(_: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


class Uneven:
    """Arrays, some of which take a while, and some of which are errors."""

    def __init__(self, length: int, raising: frozenset[int]) -> None:
        self._length = length
        self.raising = raising

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if index in self.raising:
            raise ValueError(index)
        time.sleep((0.0, 0.002, 0.02)[index % 3])
        return np.full(5000, float(index))


class WritesRubbish:
    """Once, to every socket that its process has."""

    def __init__(self, folder: Path, rubbish: bytes) -> None:
        self._file = str(folder / "written")
        self._rubbish = rubbish

    def __call__(self, item: int) -> int:
        if item == 5 and not os.path.exists(self._file):
            open(self._file, "w").close()
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        os.write(fd, self._rubbish)
        return item


def fork_and_return(item: int) -> int:
    """As one does who thinks that it is a program of his own."""
    if item == 5:
        os.fork()
    return item


class ClosesAll:
    """Closes, once, every descriptor of its process but the standard ones."""

    def __init__(self, folder: Path) -> None:
        self._file = str(folder / "closed")

    def __call__(self, item: int) -> int:
        if item == 5 and not os.path.exists(self._file):
            open(self._file, "w").close()
            os.closerange(3, 256)
        return item


class HangsSecond:
    """An init function that does not come back in the second worker."""

    def __init__(self, folder: Path) -> None:
        self._tries = Tries(folder, {})

    def __call__(self, _: int) -> None:
        self._tries(7)
        if self._tries.made()[7] == 2:
            time.sleep(1000)


class SegfaultsAt:
    """A function that crashes at the middle of every so many items."""

    def __init__(self, every: int) -> None:
        self._every = every

    def __call__(self, item: int) -> int:
        if item % self._every == self._every // 2:
            ctypes.string_at(0)
        return item


class ClosedFlow:
    """An async generator that notes when it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def closed(self) -> int:
        return len(os.listdir(self._folder))

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            for number in itertools.count():
                await asyncio.sleep(0.02)
                yield number
        finally:
            os.close(os.open(f"{self._folder}/{time.monotonic_ns()}", os.O_CREAT))
