"""Sources that the tests' workers run: importable there, and quick to import."""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import random
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import aioprefetch


class Journal:
    """A file to which every process may add a line, in one order for all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, *words: object) -> None:
        line = " ".join(map(str, words)) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)

    def lines(self) -> list[list[str]]:
        text = self.path.read_text() if self.path.exists() else ""
        return [line.split() for line in text.splitlines()]


class Delays:
    """Each item takes its own time, again and again the same."""

    def __init__(self, delays: Sequence[float] = ()) -> None:
        self.delays = tuple(delays)

    def of(self, item: int) -> float:
        return self.delays[item % len(self.delays)] if self.delays else 0.0

    def sleep(self, item: int) -> None:
        if seconds := self.of(item):
            time.sleep(seconds)


class Numbers:
    """Map-style: item i is i."""

    def __init__(self, length: int, delays: Sequence[float] = ()) -> None:
        self.length = length
        self.delays = Delays(delays)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"{index} is not in range({self.length})")
        self.delays.sleep(index)
        return index


class AsyncNumbers(Numbers):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(self.delays.of(index))
        return index


class Groups(Numbers):
    """Gives whole batches, marked as such."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [index + 1000 for index in indices]


class AsyncGroups(Numbers):
    async def __getitems__(self, indices: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return [index + 1000 for index in indices]


class AsyncItemsSyncGroups(AsyncNumbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [index + 1000 for index in indices]


class MiscountedGroups(Numbers):
    """Gives one result too many, or too few, for every batch that holds item 0."""

    def __init__(self, length: int, surplus: int) -> None:
        super().__init__(length)
        self.surplus = surplus

    def __getitems__(self, indices: list[int]) -> list[Any]:
        surplus = self.surplus if 0 in indices else 0
        return [*indices, 0][: len(indices) + surplus]


class BrokenGroups(Numbers):
    """Refuses whole batches; item by item only the odd ones fail."""

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            raise ValueError(f"{index} is odd")
        return index

    def __getitems__(self, indices: list[int]) -> list[Any]:
        raise OSError("no batches today")


class Flow:
    """Iterable: the numbers from 0."""

    def __init__(self, length: int, delays: Sequence[float] = ()) -> None:
        self.length = length
        self.delays = Delays(delays)

    def __iter__(self) -> Iterator[Any]:
        for item in range(self.length):
            self.delays.sleep(item)
            yield item


class AsyncFlow:
    def __init__(self, length: int, delays: Sequence[float] = ()) -> None:
        self.length = length
        self.delays = Delays(delays)

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in range(self.length):
            await asyncio.sleep(self.delays.of(item))
            yield item


class SizedFlow(Flow):
    """Has a length, by default the true one."""

    def __init__(
        self, length: int, delays: Sequence[float] = (), claimed: int | None = None
    ) -> None:
        super().__init__(length, delays)
        self.claimed = length if claimed is None else claimed

    def __len__(self) -> int:
        return self.claimed


def portion(length: int, num: int, index: int) -> list[int]:
    """Items of one of ``num`` streams: of very different lengths, some of none."""
    return [item for item in range(length) if item * item % num == index]


class Shards(Flow):
    """Can be read as any number of streams, and each of them again."""

    def __init__(self, length: int, delays: Sequence[float] = ()) -> None:
        super().__init__(length, delays)
        self.items: Sequence[int] = range(length)

    def shard(self, *, num_shards: int, index: int) -> Shards:
        shard = copy.copy(self)
        shard.items = [self.items[at] for at in portion(len(self.items), num_shards, index)]
        return shard

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.delays.sleep(item)
            yield item


class TwoShards(Shards):
    """Says into how many it is best split."""

    num_shards = 2


class Divided(Flow):
    """Divides itself among the streams by `worker_info`."""

    def __iter__(self) -> Iterator[Any]:
        info = aioprefetch.worker_info()
        num, index = (1, 0) if info is None else (info.num_proc, info.id)
        for item in portion(self.length, num, index):
            self.delays.sleep(item)
            yield item


class Replica(SizedFlow):
    """Each item tells which copy made it."""

    def __iter__(self) -> Iterator[Any]:
        info = aioprefetch.worker_info()
        assert info is not None
        for item in super().__iter__():
            yield info.id, item


class Ten(Numbers):
    """A class that can be called without arguments."""

    def __init__(self) -> None:
        super().__init__(10)


def ten() -> Iterator[int]:
    yield from range(10)


async def async_ten() -> AsyncIterator[int]:
    for item in range(10):
        yield item


def double(item: Any) -> Any:
    return item * 2


async def async_double(item: Any) -> Any:
    await asyncio.sleep(0)
    return item * 2


class DrawingReplica(Flow):
    """An endless copy that draws at random, with its own generator."""

    def __init__(self) -> None:
        super().__init__(5)

    def __iter__(self) -> Iterator[Any]:
        info = aioprefetch.worker_info()
        assert info is not None
        for _ in super().__iter__():
            yield info.id, float(aioprefetch.rng().random())


class EpochNumbers(Numbers):
    """Each item tells the epoch that it was made in."""

    def __getitem__(self, index: int) -> Any:
        info = aioprefetch.worker_info()
        assert info is not None
        return info.epoch, index


class Noted(Numbers):
    """Notes each item as it is begun."""

    def __init__(self, length: int, journal: Journal, delays: Sequence[float] = ()) -> None:
        super().__init__(length, delays)
        self.journal = journal

    def __getitem__(self, index: int) -> Any:
        self.journal.add("item", index)
        return super().__getitem__(index)


class AsyncNoted(Noted):
    async def __getitem__(self, index: int) -> Any:
        self.journal.add("item", index)
        await asyncio.sleep(self.delays.of(index))
        return index


class NotedFlow(Flow):
    """The same for what is iterated; each of its shards notes only its own."""

    def __init__(self, length: int, journal: Journal, delays: Sequence[float] = ()) -> None:
        super().__init__(length, delays)
        self.journal = journal
        self.items = range(length)

    def shard(self, *, num_shards: int, index: int) -> NotedFlow:
        shard = copy.copy(self)
        shard.items = self.items[index::num_shards]
        return shard

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.journal.add("item", item)
            self.delays.sleep(item)
            yield item


class AsyncNotedFlow(AsyncFlow):
    def __init__(self, length: int, journal: Journal, delays: Sequence[float] = ()) -> None:
        super().__init__(length, delays)
        self.journal = journal

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in range(self.length):
            self.journal.add("item", item)
            await asyncio.sleep(self.delays.of(item))
            yield item


def pid_and(batch: Any) -> tuple[int, Any]:
    """A collate_fn, or map_fn, that tells where it ran."""
    return os.getpid(), batch


class Keys:
    """A sampler that tells where it is read."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self.keys = keys
        self.places: set[tuple[int, int]] = set()
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        for key in self.keys:
            self.places.add((os.getpid(), threading.get_ident()))
            yield key


class AsyncKeys(Keys):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for key in self.keys:
            await asyncio.sleep(0)
            self.places.add((os.getpid(), threading.get_ident()))
            yield key


class Told(Numbers):
    """Notes what it is told; each item tells the epoch that its copy was told last."""

    def __init__(self, length: int, journal: Journal, delays: Sequence[float] = ()) -> None:
        super().__init__(length, delays)
        self.journal = journal
        self.epoch = -1

    def reset_state(self) -> None:
        self.journal.add("reset", os.getpid(), 0)
        self.epoch = -2

    def set_epoch(self, epoch: int) -> None:
        self.journal.add("epoch", os.getpid(), epoch)
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), self.epoch, super().__getitem__(index)


class ToldFlow(Told):
    """The same, iterable."""

    __getitem__ = None  # type: ignore[assignment]
    __len__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        for item in range(self.length):
            self.delays.sleep(item)
            yield os.getpid(), self.epoch, item


class AsyncToldFlow(ToldFlow):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in range(self.length):
            yield os.getpid(), self.epoch, item


class ToldShards(ToldFlow):
    def __init__(self, length: int, journal: Journal, delays: Sequence[float] = ()) -> None:
        super().__init__(length, journal, delays)
        self.is_shard = False

    def shard(self, *, num_shards: int, index: int) -> ToldShards:
        shard = copy.copy(self)
        shard.is_shard = True
        return shard

    def reset_state(self) -> None:
        if self.is_shard:
            super().reset_state()

    def set_epoch(self, epoch: int) -> None:
        if self.is_shard:
            super().set_epoch(epoch)


class LengthRaises(Numbers):
    """``len()`` of it raises."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__(10)
        self.error = error

    def __len__(self) -> int:
        raise self.error("no length")


class FlowLengthRaises(LengthRaises):
    __getitem__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter(range(10))


class TorchIterable:
    """Has all that torch's own base class has, and its name."""

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError


TorchIterable.__name__ = TorchIterable.__qualname__ = "IterableDataset"
TorchIterable.__module__ = "torch.utils.data.dataset"


class TorchFlow(TorchIterable):
    """As a user of torch writes it: one copy a worker, divided by the worker's id."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        info = aioprefetch.worker_info()
        assert info is not None
        return iter(portion(self.length, info.num_proc, info.id))


class TellsTorch(Shards):
    """Each item says whether torch would have the reader divide itself."""

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield item, sys.modules[TORCH_WORKER]._worker_info is not None


TORCH_WORKER = "torch.utils.data._utils.worker"


def tells_torch() -> TellsTorch:
    """A source that is made in the worker, where something like torch is."""
    module: Any = types.ModuleType(TORCH_WORKER)
    module.WorkerInfo = types.SimpleNamespace
    module._worker_info = None
    sys.modules[TORCH_WORKER] = module
    return TellsTorch(6)


class Counted:
    """A factory that notes each call."""

    def __init__(self, make: Callable[..., Any], journal: Journal) -> None:
        self.make = make
        self.journal = journal

    def __call__(self) -> Any:
        self.journal.add("made", os.getpid())
        return self.make()


class AsyncCounted(Counted):
    async def __call__(self) -> Any:
        await asyncio.sleep(0)
        return super().__call__()


class Overlapping(Numbers):
    """Awaits 50 ms an item, and tells how many of its items were in flight."""

    now = 0

    async def __getitem__(self, index: int) -> Any:
        Overlapping.now += 1
        seen = Overlapping.now
        await asyncio.sleep(0.05)
        seen = max(seen, Overlapping.now)
        Overlapping.now -= 1
        return index, seen


class Threads(Numbers):
    """Each item tells which libraries have how many threads, one loaded by the item itself."""

    def __getitem__(self, index: int) -> Any:
        import threadpoolctl

        for library in ("scipy.linalg", "sklearn.utils._openmp_helpers"):
            importlib.import_module(library)
        return [
            (library["user_api"], library["filepath"], library["num_threads"])
            for library in threadpoolctl.threadpool_info()
        ]


def draw() -> tuple[float, float, float]:
    """What each of the three generators gives next."""
    return float(aioprefetch.rng().random()), random.random(), float(np.random.random())


class Drawing(Numbers):
    """Each item draws from all generators."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return index, draw()


class AsyncDrawing(Numbers):
    """Each item draws twice, with other items in between."""

    async def __getitem__(self, index: int) -> Any:
        first = float(aioprefetch.rng().random())
        await asyncio.sleep(self.delays.of(index))
        return index, (first, float(aioprefetch.rng().random()))


class DrawingGroups(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, draw()) for index in indices]


class DrawingShards(Shards):
    """Draws where it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield item, draw()


class DrawingDivided(Divided):
    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield item, draw()


def and_draw(item: Any) -> Any:
    """A map_fn, or collate_fn, that draws too."""
    return item, draw()


def same_generator(item: Any) -> Any:
    return item[1] == id(aioprefetch.rng())


class Generators(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, id(aioprefetch.rng())


class Seeds(Numbers):
    """Each item tells the run's seed."""

    def __getitem__(self, index: int) -> Any:
        info = aioprefetch.worker_info()
        assert info is not None
        return info.seed
