"""Memory that processes share, and how much of it there is.

Everything here is anonymous: a descriptor that is handed over, with no name that could be
left behind.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ._wire import Segment

_ALIGN = 64
SOME_MEMORY = 16 << 30  # bytes that a machine is taken to have where that cannot be told
_MARGIN = 64 << 20  # bytes that must stay available to everyone else


def memory_file(name: str) -> int:
    """A descriptor of anonymous memory: a memfd, else an unlinked temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def close_quietly(fd: int) -> None:
    """Close a descriptor, if nobody else has."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


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
            self.shipped = self._address()
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

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """A copy of them."""
        return [os.pread(self.fd, nbytes, offset) for offset, nbytes in self.extents]

    def _address(self) -> Shipped | None:
        """Where a process that is already there can open it; None where it cannot."""
        path = f"/proc/{os.getpid()}/fd/{self.fd}"
        return Shipped(path, self.extents) if os.path.exists(path) else None

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        close_quietly(fd)


class Shipped(NamedTuple):
    """Where a shipment is, while its owner keeps it open."""

    path: str
    extents: Sequence[Extent]


def open_shipped(shipped: Shipped) -> list[memoryview]:
    """The segments of a shipment that another process keeps open."""
    fd = os.open(shipped.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return open_shipment(fd, shipped.extents)
    finally:
        os.close(fd)


def open_shipment(fd: int, extents: Sequence[Extent]) -> list[memoryview]:
    """The segments of a shipment in this process's own, writable, copy-on-write memory."""
    private = mmap.ACCESS_COPY  # MAP_PRIVATE with read and write, on every platform
    view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=private))
    return [view[offset : offset + nbytes] for offset, nbytes in extents]


# How much there is


def available() -> int | None:
    """Bytes that this process may still take: the machine's, or its control group's if fewer."""
    known = [size for size in (_machine_available(), _group_available()) if size is not None]
    return min(known, default=None)


def total() -> int | None:
    """Bytes of memory of the machine, or of the control group if fewer."""
    known = [size for size in (_meminfo("MemTotal:"), _group_limit()) if size is not None]
    return min(known, default=None)


def group_limited() -> bool:
    """Whether the control group allows less than the machine has."""
    group, machine = _group_limit(), _meminfo("MemTotal:")
    return group is not None and (machine is None or group < machine)


def refuse_to_exhaust(nbytes: int) -> None:
    """Raise before memory runs out: a container's answer to that is no exception.

    Raises
    ------
    MemoryError
        Naming the bytes needed and those available.
    """
    room = available()
    if room is not None and nbytes + _MARGIN > room:
        raise MemoryError(
            f"{nbytes} bytes of shared memory are needed and {room} are available: make batches "
            "smaller, lower num_prefetch or max_bytes, or let go of arrays that are still held"
        )


def _meminfo(name: str) -> int | None:
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _machine_available() -> int | None:
    return _meminfo("MemAvailable:")


def _group_available() -> int | None:
    limit, used = _group_limit(), _group_number("memory.current", "memory.usage_in_bytes")
    return None if limit is None or used is None else max(0, limit - used)


def _group_limit() -> int | None:
    limit = _group_number("memory.max", "memory.limit_in_bytes")
    return limit if limit is not None and limit < 1 << 60 else None


@functools.cache
def _group_folders() -> list[str]:
    folders = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"]
    with suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers in ("", "memory"):
                folders.insert(0, f"/sys/fs/cgroup/{controllers}{path}")
    return folders


def _group_number(*names: str) -> int | None:
    for folder in _group_folders():
        for name in names:
            with suppress(OSError, ValueError), open(f"{folder}/{name}") as file:
                return int(file.read())
    return None


def oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory, since it was started."""
    with suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


# Giving pages back


def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_REMOVE: int = getattr(mmap, "MADV_REMOVE", 0)  # Linux alone has it
_advise = _madvise() if _REMOVE else None


def punch(address: int, nbytes: int) -> None:
    """Give back the whole pages of shared memory in a range, if the platform can.

    By ctypes, which lets other threads run meanwhile; mmap.madvise does not.
    """
    start = address + -address % mmap.PAGESIZE
    length = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if _advise is not None and length > 0:
        _advise(start, length, _REMOVE)
