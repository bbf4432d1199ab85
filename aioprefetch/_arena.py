"""Memory that processes share: the shipped source, and a page that says what a worker does.

Everything here is anonymous: a descriptor that is handed over, with no name that could be
left behind.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from ._wire import Segment

_ALIGN = 64


def memory_file(name: str) -> int:
    """A descriptor of anonymous memory: a memfd, else an unlinked temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Extent(NamedTuple):
    """Where a segment lies in a shipment."""

    offset: int
    nbytes: int


class Shipment:
    """Segments in one memory file, written once and mapped privately by every reader.

    Readers may write what they map: the pages are shared until then.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.fd = memory_file("aioprefetch-source")
        try:
            self.extents = self._write(segments)
        except BaseException:
            self.close()
            raise

    def _write(self, segments: Sequence[Segment]) -> list[Extent]:
        extents = []
        offset = 0
        for segment in segments:
            view = memoryview(segment).cast("B")
            extents.append(Extent(offset, view.nbytes))
            while view:  # a write takes 2 GiB at most, and lets other threads run
                written = os.pwrite(self.fd, view, offset)
                view = view[written:]
                offset += written
            offset += -offset % _ALIGN
        os.truncate(self.fd, max(offset, mmap.PAGESIZE))
        return extents

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_shipment(fd: int, extents: Sequence[Extent]) -> list[memoryview]:
    """The segments of a shipment in this process's own, writable, copy-on-write memory."""
    private = mmap.ACCESS_COPY  # MAP_PRIVATE with read and write, on every platform
    view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=private))
    return [view[offset : offset + nbytes] for offset, nbytes in extents]


class InHand(NamedTuple):
    """An item that a worker is at work on."""

    ticket: int
    position: int  # of the item in its plan or stream
    since: float  # time.monotonic() of the worker, the machine's own


class Page:
    """What a worker has in hand, one record for each item it may run at once.

    The worker alone writes; the parent reads, and believes it once the worker is dead.
    A ticket is written last and cleared first, so that no record is half of another.
    """

    _RECORD = struct.Struct("<QQd")
    _TICKET = struct.Struct("<Q")

    def __init__(self, fd: int, records: int) -> None:
        self.fd = fd
        self.records = records
        self._memory = mmap.mmap(fd, self.nbytes(records))
        self._free = list(range(records))

    @classmethod
    def nbytes(cls, records: int) -> int:
        size = records * cls._RECORD.size
        return size + -size % mmap.PAGESIZE

    @classmethod
    def create(cls, records: int) -> Page:
        fd = memory_file("aioprefetch-page")
        os.truncate(fd, cls.nbytes(records))
        return cls(fd, records)

    def begin(self, ticket: int, position: int) -> int:
        """Note an item before it is started; gives the record to ``end``."""
        record = self._free.pop() if self._free else self.records - 1
        at = record * self._RECORD.size
        self._RECORD.pack_into(self._memory, at, 0, position, time.monotonic())
        self._TICKET.pack_into(self._memory, at, ticket)
        return record

    def end(self, record: int) -> None:
        self._TICKET.pack_into(self._memory, record * self._RECORD.size, 0)
        self._free.append(record)

    def read(self) -> list[InHand]:
        """The items in hand."""
        size = self._RECORD.size
        records = self._RECORD.iter_unpack(self._memory[: self.records * size])
        return [InHand(*record) for record in records if record[0]]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._memory.close()
