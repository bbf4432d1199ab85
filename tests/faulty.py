"""Sources and functions that go wrong, for workers to run by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from aioprefetch import SkipItem, TaskError, worker_info

BAD = 2  # the item that goes wrong, where one does


class TwoArguments(Exception):
    """Its args are one text, so it cannot be rebuilt from them."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("it has a lock")
        self.lock = threading.Lock()


class CannotBeRebuilt(Exception):
    def __reduce__(self) -> Any:
        return _explode, ("rebuilding",)


class CannotComeHome(Exception):
    """Rebuilt in a worker without trouble; in the parent it ends the interpreter."""

    def __reduce__(self) -> Any:
        return _exit_in_parent, ()


class CannotBeShown(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _explode(text: str) -> NoReturn:
    raise ValueError(text)


def _exit_in_parent() -> CannotComeHome:
    if worker_info() is None:
        raise SystemExit("rebuilt in the parent")
    return CannotComeHome()


def _self_caused() -> BaseException:
    error = ValueError("its own cause")
    error.__cause__ = error
    return error


# What user code may raise: the name of the type that the error must tell, and how it is made.
ODD: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("plain"),
    "TwoArguments": lambda: TwoArguments(7, "seven"),
    "KeywordOnly": lambda: KeywordOnly(code=7),
    "HoldsALock": HoldsALock,
    "CannotBeRebuilt": CannotBeRebuilt,
    "CannotComeHome": CannotComeHome,
    "CannotBeShown": CannotBeShown,
    "OverflowError": lambda: OverflowError("x" * 10_000_000),
    "ValueError:": _self_caused,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError(1), KeyError(2)]),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [SystemExit(1)]),
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
    "TaskError": lambda: TaskError("of another Prefetcher", index=7, stage="map"),
}
NAMES = list(ODD)


def odd(index: int) -> int:
    """Raise the error of that number; beyond the last, give the index back."""
    if index < len(NAMES):
        raise ODD[NAMES[index]]()
    return index


async def odd_async(index: int) -> int:
    await asyncio.sleep(0)
    return odd(index)


def odd_on_error(error: TaskError) -> int:
    return odd(error.index)


class Map:
    """Map-style: what ``function`` makes of the index."""

    def __init__(self, length: int, function: Callable[[int], Any]) -> None:
        self.length = length
        self.function = function

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


class AsyncMap(Map):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return self.function(index)


class Groups(Map):
    """It fetches a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.function(index) for index in indices]


def identity(item: Any) -> Any:
    return item


def fail(item: Any) -> Any:
    """Fail at the bad item, or at the batch that holds it."""
    if item == BAD or (isinstance(item, list) and BAD in item):
        raise ValueError(f"bad {item}")
    return item


def leave_out(item: Any) -> Any:
    if item == BAD:
        raise SkipItem
    return item


def unpicklable(item: Any) -> Any:
    return threading.Lock() if item == BAD else item


def mend(error: TaskError) -> str:
    return f"mended {error.index}"


def mend_with_skip(error: TaskError) -> NoReturn:
    raise SkipItem


def mend_with_error(error: TaskError) -> NoReturn:
    raise KeyError("while mending")


def mend_by_raising_it(error: TaskError) -> NoReturn:
    raise error


def mend_with_lock(error: TaskError) -> Any:
    return threading.Lock()


async def mend_async(error: TaskError) -> str:
    await asyncio.sleep(0)
    return f"mended {error.index}"


# Sources that are iterated


class Items:
    """Iterable: the items 0 to length - 1, the bad one an error."""

    def __init__(self, length: int, bad: int = BAD) -> None:
        self.length = length
        self.bad = bad

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            if index == self.bad:
                raise ValueError(f"bad {index}")
            yield index


class AsyncItems(Items):
    def __aiter__(self) -> AsyncIterator[int]:
        return self._items()

    async def _items(self) -> AsyncIterator[int]:
        for index in self:
            await asyncio.sleep(0)
            yield index


class OddIterator:
    """Gives one item, then raises an error from ``__next__``, not from a generator."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.given = False

    def __iter__(self) -> OddIterator:
        return self

    def __next__(self) -> int:
        if self.given:
            odd(self.number)
            raise StopIteration
        self.given = True
        return self.number


class AsyncOddIterator(OddIterator):
    def __aiter__(self) -> AsyncOddIterator:
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        if self.given:
            odd(self.number)
            raise StopAsyncIteration
        self.given = True
        return self.number


class OddEpochs:
    """Iterable: in each epoch its iterator raises another error."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return OddIterator(self.epoch)


class AsyncOddEpochs(OddEpochs):
    def __aiter__(self) -> AsyncIterator[int]:
        return AsyncOddIterator(self.epoch)


class OddIter(OddEpochs):
    """In each epoch its ``__iter__`` itself raises another error."""

    def __iter__(self) -> Iterator[int]:
        return iter([odd(self.epoch)])


class AsyncOddIter(OddEpochs):
    def __aiter__(self) -> AsyncIterator[int]:
        odd(self.epoch)
        return AsyncOddIterator(self.epoch)


class OddSetEpoch(OddEpochs):
    """In each epoch its ``set_epoch`` raises another error."""

    def set_epoch(self, epoch: int) -> None:
        odd(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([0])


class OddShards:
    """Every shard gives its number and raises an error of its own."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def shard(self, num_shards: int, index: int) -> OddShards:
        return type(self)(index)

    def __iter__(self) -> Iterator[int]:
        return OddIterator(self.index)


class AsyncOddShards(OddShards):
    def __aiter__(self) -> AsyncIterator[int]:
        return AsyncOddIterator(self.index)


class Shards:
    """Two shards of four items; an item is what ``function`` makes of 10 · shard + ordinal."""

    def __init__(self, function: Callable[[int], Any], shards: Sequence[int] = (0, 1)) -> None:
        self.function = function
        self.shards = shards

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.function, self.shards[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        places = (10 * shard + ordinal for shard in self.shards for ordinal in range(4))
        return map(self.function, places)


# Deaths

DEATHS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "SIGKILL"),
    "exit 0": (lambda: os._exit(0), 0, "code 0"),
    "exit 3": (lambda: os._exit(3), 3, "code 3"),
    "segfault": (lambda: ctypes.string_at(0), -11, "SIGSEGV"),
    "abort": (os.abort, -6, "SIGABRT"),
}


class Die:
    """A function that dies at the bad item, in one of the ways."""

    def __init__(self, how: str, bad: Any = BAD) -> None:
        self.how = how
        self.bad = bad

    def __call__(self, item: Any) -> Any:
        if item == self.bad or (isinstance(item, list) and self.bad in item):
            DEATHS[self.how][0]()
        return item


class PidThenDie(Die):
    """Gives the worker's pid until it dies."""

    def __call__(self, item: Any) -> Any:
        super().__call__(item)
        return os.getpid()


# Things that do not travel


class Resisting:
    """Cannot be pickled, by its attribute ``handle``."""

    def __init__(self) -> None:
        self.fine = 1
        self.handle = threading.Lock()


class Holder:
    """Holds a thing two attributes down."""

    def __init__(self, thing: Any) -> None:
        self.config = {"inner": [1, thing]}

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __call__(self, item: Any) -> Any:
        return item


class FailsIn:
    """Its ``__setstate__`` raises in the worker, or in the parent."""

    def __init__(self, where: str, value: int = 0) -> None:
        self.where = where
        self.value = value
        self.parent = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        here = "parent" if os.getpid() == self.parent else "worker"
        if here == self.where:
            raise RuntimeError(f"not in the {here}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FailsIn) and other.value == self.value

    def __hash__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


class MadeWithPid:
    """Map-style: an item whose ``__setstate__`` raises in the parent, at the bad index."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index != BAD:
            return index
        item = FailsIn("parent")
        item.parent = self.parent
        return item


class OddReduce:
    """A result whose pickling raises the error of its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return int, (odd(self.number),)


class OddSetState:
    """A result whose rebuilding in the parent raises the error of its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.maker = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.maker:
            odd(self.number)


# Things that do not end

released = threading.Event()  # lets go of what is stuck in this process


class Marked:
    """A function that makes a file when it comes to the bad item."""

    def __init__(self, file: Path, function: Callable[[int], int]) -> None:
        self.file = file
        self.function = function

    def __call__(self, index: int) -> int:
        if index == BAD:
            self.file.touch()
        return self.function(index)


def quick(index: int) -> int:
    return index


def slow(index: int) -> int:
    time.sleep(0.002)
    return index


def stuck(index: int) -> int:
    """Beyond the first items it hangs; in a worker for ever."""
    if index >= BAD:
        released.wait(1000)
    return index


def stuck_in_c(index: int) -> int:
    """The same in C code that keeps the interpreter."""
    if index >= BAD:
        ctypes.PyDLL(None).sleep(1000)
    return index


def stuck_with_child(index: int) -> int:
    """The same, with a process of its own that would outlive it."""
    if index >= BAD:
        subprocess.run(["sleep", "1000"], check=False)
    return index
