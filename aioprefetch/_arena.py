"""Memory between one writer and its readers, handed over block by block and never copied.

    head │ stacks │ a byte for each block │ blocks

The writer of an arena is its only allocator: it sets a block's byte when it takes it. A
reader frees: it clears the byte when its last view of the block has died. Neither asks the
other, and a writer is known to be dead before its memory is given to anyone else.

Blocks have powers of two as sizes, in address space, which costs nothing; in memory each is
as large as the most it ever held. The lowest free one is taken, whose pages are warm.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._memory import close_quietly, memory_file, punch, refuse_to_exhaust
from ._page import Page
from ._wire import LARGE, Segment

_FIRST_CLASS = 6  # blocks of 64 bytes, and so every block is aligned to that
_CLASSES = 36  # up to 2 TiB
BLOCKS = 1 << 15  # of a class, at most
_SLAB = 1 << 20  # what smaller blocks are cut from
_STACKS = 1 << 24  # bytes of address space, more than a hundred threads can fill
_LARGEST = 1 << 36  # address space of an arena; halved until the system agrees
_SMALLEST = 1 << 26
_WATCHED = 1 << 20  # growth from which available memory is looked at
_LOOK = 32  # calls for one look at what is lent
STALE = 10.0  # seconds after which the pages of an unused block are given back


class Block(NamedTuple):
    """A piece of an arena."""

    number: int  # of its byte
    offset: int
    nbytes: int  # as much as is used


class Space:
    """The memory file of an arena, as mapped in this process."""

    def __init__(self, fd: int, size: int, records: int) -> None:
        self.fd = fd
        self.size = size
        self.records = records
        self.memory = mmap.mmap(fd, size)
        self.page = Page(self.memory, records)
        self.stacks = Page.nbytes(records)  # of a worker that crashed or is stuck, as text
        self.flags = self.stacks + _STACKS
        self.blocks = self.flags + _CLASSES * BLOCKS
        self.blocks += -self.blocks % mmap.PAGESIZE

    @classmethod
    def create(cls, records: int) -> Space:
        """As much address space as the system allows, none of it used.

        Raises
        ------
        OSError
            Not even the least is to be had.
        """
        fd = memory_file("aioprefetch")
        try:
            size = _LARGEST
            while True:
                try:
                    os.truncate(fd, size)
                    return cls(fd, size, records)
                except (OSError, ValueError, OverflowError):
                    if size <= _SMALLEST:
                        raise
                    size //= 2
        except BaseException:
            os.close(fd)
            raise

    def close_fd(self) -> None:
        """The mapping stays; the descriptor has been handed over."""
        fd, self.fd = self.fd, -1
        close_quietly(fd)

    def array(self, block: Block) -> NDArray[np.uint8]:
        """The bytes of a block."""
        return np.frombuffer(self.memory, np.uint8, block.nbytes, block.offset)


class _Class:
    """The blocks of one size."""

    def __init__(self, first: int) -> None:
        self.first = first  # number of its first byte
        self.offsets: list[int] = []
        self.held: list[int] = []  # the most bytes that each held since it was last punched
        self.taken: list[float] = []  # when each was last taken


class Writer:
    """The allocator of an arena; one thread's."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._classes = [_Class(space.flags + n * BLOCKS) for n in range(_CLASSES)]
        self._next = space.blocks
        self._look = time.monotonic() + STALE
        self._open: dict[int, Block] = {}  # taken and not yet sent, by address
        self._base = space.array(Block(0, 0, 1)).ctypes.data

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array in a block of its own, or in private memory when there is no room."""
        nbytes = dtype.itemsize * math.prod(shape)
        block = self.take(nbytes) if nbytes >= LARGE else None  # small ones are sent together
        if block is None:
            return np.empty(shape, dtype)
        self._open[self._base + block.offset] = block
        return self._space.array(block).view(dtype).reshape(shape)

    def opened(self, buffer: Segment) -> Block | None:
        """The block that an array from `empty` fills, from now on to be sent."""
        if not self._open:
            return None
        block = self._open.get(_address(buffer))
        if block is None or block.nbytes != memoryview(buffer).nbytes:
            return None
        return self._open.pop(_address(buffer))

    def view(self, block: Block) -> memoryview:
        """The bytes of a block."""
        return memoryview(self._space.memory)[block.offset : block.offset + block.nbytes]

    def copy(self, block: Block, buffer: Segment) -> None:
        """Fill a block; other threads run meanwhile."""
        np.copyto(self._space.array(block), np.frombuffer(buffer, np.uint8))

    def drop_opened(self) -> None:
        """Free the blocks of arrays that will not be sent."""
        for block in self._open.values():
            self.free(block)
        self._open.clear()

    def take(self, nbytes: int) -> Block | None:
        """A block, or None when the arena has no more of that size.

        Raises
        ------
        MemoryError
            It needs memory that the machine, or the control group, does not have.
        """
        order = max((nbytes - 1).bit_length(), _FIRST_CLASS)
        if order - _FIRST_CLASS >= _CLASSES:
            return None
        self.trim()
        kind = self._classes[order - _FIRST_CLASS]
        number = self._free(kind)
        if number is None:
            number = self._grow(kind, 1 << order)
            if number is None:
                return None
        index = number - kind.first
        self._reserve(kind, index, nbytes)
        self._space.memory[number] = 1
        kind.taken[index] = time.monotonic()
        return Block(number, kind.offsets[index], nbytes)

    def free(self, block: Block) -> None:
        """Take back a block that was not sent."""
        if not self._space.memory[block.number]:
            raise RuntimeError(f"block {block.number} of {block.nbytes} bytes is free already")
        self._space.memory[block.number] = 0

    def trim(self, *, now: bool = False) -> None:
        """Give back the pages of blocks that have long been free; looks every few seconds."""
        instant = time.monotonic()
        if instant < self._look and not now:
            return
        self._look = instant + STALE / 2
        before = instant - STALE
        for kind in self._classes:
            for index, taken in enumerate(kind.taken):
                free = not self._space.memory[kind.first + index]
                if taken < before and free and kind.held[index] >= _SLAB:
                    punch(self._base + kind.offsets[index], kind.held[index])
                    kind.held[index] = 0

    def _free(self, kind: _Class) -> int | None:
        number = self._space.memory.find(b"\0", kind.first, kind.first + len(kind.offsets))
        return None if number < 0 else number

    def _grow(self, kind: _Class, size: int) -> int | None:
        """Number of a new block; the first of several where they are small."""
        slab = max(size, _SLAB)
        if len(kind.offsets) + slab // size > BLOCKS or self._next + slab > self._space.size:
            return None
        number = kind.first + len(kind.offsets)
        starts = range(self._next, self._next + slab, size)
        kind.offsets.extend(starts)
        kind.held.extend([0] * len(starts))
        kind.taken.extend([0.0] * len(starts))
        self._next += slab
        return number

    def _reserve(self, kind: _Class, index: int, nbytes: int) -> None:
        # Above what it held only: reserving pages that are there costs a third of writing them.
        more = nbytes - kind.held[index]
        if more <= 0:
            return
        if more >= _WATCHED:
            refuse_to_exhaust(more)
            if hasattr(os, "posix_fallocate"):
                with suppress(OSError):  # not every file system can
                    os.posix_fallocate(self._space.fd, kind.offsets[index] + kind.held[index], more)
        kind.held[index] = nbytes


class Reader:
    """The views of an arena that a process holds; a block is freed with the last of them."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._lent: dict[int, Block] = {}

    @property
    def nbytes(self) -> int:
        """Bytes lent."""
        return sum(block.nbytes for block in self.lent)

    @property
    def lent(self) -> list[Block]:
        """The blocks that someone holds a view of."""
        return list(self._lent.values())

    def lend(self, block: Block) -> NDArray[np.uint8]:
        """The bytes of a block, writable; every view of them keeps it.

        The views outlive the writer, the pool and this reader.
        """
        if block.number in self._lent:
            raise RuntimeError(
                f"block {block.number} of {block.nbytes} bytes was sent again while it is lent"
            )
        root = self._space.array(block)
        self._lent[block.number] = block
        memory, lent = self._space.memory, self._lent
        finalizer = weakref.finalize(root, _free, memory, lent, block.number, os.getpid())
        finalizer.atexit = False
        return root

    def abandon(self) -> None:
        """The writer is dead: give back every page that is not lent. May take its time."""
        base = self._space.array(Block(0, 0, 1)).ctypes.data
        at = self._space.blocks
        for block in sorted(self.lent, key=lambda block: block.offset):
            punch(base + at, block.offset - at)
            at = block.offset + block.nbytes
        punch(base + at, self._space.size - at)


class Loans:
    """What the readers of a pool have lent, and one warning when it grows out of bounds.

    Parameters
    ----------
    limit
        Bytes from which the user is told what is held.
    readers
        Gives those of the workers that live. (None is kept here: a reader keeps a mapping.)
    """

    def __init__(self, limit: int, readers: Callable[[], Iterable[Reader]]) -> None:
        self._limit = limit
        self._readers = readers
        self._calls = 0
        self._warned = False

    def check(self) -> None:
        """Warn, once, when what is lent is past the limit; looks now and then."""
        self._calls += 1
        if self._warned or self._calls % _LOOK:
            return
        blocks = [block.nbytes for reader in self._readers() for block in reader.lent]
        if sum(blocks) <= self._limit:
            return
        self._warned = True
        sizes = Counter(blocks).most_common()
        held = ", ".join(
            f"{count} of {size / 1e6:.1f} MB"
            for size, count in sorted(sizes, key=lambda entry: -entry[0] * entry[1])[:3]
        )
        warnings.warn(
            f"{sum(blocks) / 1e9:.1f} GB of batches are held by this process, most of it in arrays "
            f"{held}: every view of an array keeps all of it. Copy what you keep, or lower "
            "num_prefetch",
            ResourceWarning,
            stacklevel=2,
        )


def _address(buffer: Segment) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _free(memory: mmap.mmap, lent: dict[int, Block], number: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child's copy of a view, while the parent has its own
        return
    # One byte, stored at once under the interpreter's lock: no lock of ours, in any thread.
    # That the loads of the dead views came before is certain where stores are not moved before
    # older loads (x86), and in practice anywhere: thousands of instructions lie between.
    lent.pop(number, None)
    memory[number] = 0
