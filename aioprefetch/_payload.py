"""Keys and items on their way to a worker, in the memory that this process writes for all of them.

Each is encoded by itself, so that one that cannot travel is lost alone. A task that runs
again is the same blocks again: they are free when the task's request has been dropped.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ._arena import Block, Reader, Space, Writer
from ._codec import Packing, Place, encode, found
from ._errors import SerializationError, shorten
from ._messages import Lost
from ._wire import Segment


class Live(NamedTuple):
    """An object that never left this process, or only ints."""

    value: Any

    @property
    def nbytes(self) -> int:
        """Unknown, and the user's own."""
        return 0

    def open(self) -> Any:
        return self.value


class Parcel(NamedTuple):
    """Keys or items, encoded."""

    values: list[tuple[bytes, int]]  # the pickle of each, and how many buffers left it
    buffers: Sequence[Place]
    segments: Sequence[Segment] = ()
    blocks: Sequence[Block] = ()
    roots: Sequence[Any] = ()  # the blocks as this process maps them

    @property
    def nbytes(self) -> int:
        """Bytes that do not lie in shared memory."""
        return sum(memoryview(segment).nbytes for segment in self.segments)

    def open(self) -> list[Any]:
        return list(_rebuilt(self.values, found(self.buffers, self.roots, self.segments)))


Payload = Parcel | Live
Sent = list[Any] | tuple[list[tuple[bytes, int]], Sequence[Place], Sequence[Block]]


def encode_values(values: Sequence[Any]) -> Payload:
    """Keys or items as a worker is sent them; one that cannot be is replaced by a `Lost`."""
    if all(type(value) is int for value in values):
        return Live(list(values))
    encoded: list[tuple[bytes, int]] = []
    segments: list[Segment] = []
    for value in values:
        pickled, *left = _encode_or_lose(value)
        encoded.append((bytes(pickled), len(left)))
        segments += left
    return Parcel(encoded, range(len(segments)), segments)


def encode_value(value: Any, within: bytes = b"") -> Parcel:
    """One item as a worker is sent it; ``within`` is as `encode` has it.

    Raises
    ------
    SerializationError
        It cannot be.
    """
    pickled, *segments = encode(value, within)
    return Parcel([(bytes(pickled), len(segments))], range(len(segments)), segments)


def _encode_or_lose(value: Any) -> list[Segment]:
    try:
        return encode(value)
    except SerializationError as error:
        return encode(Lost(error, shorten(value)))


def _rebuilt(values: list[tuple[bytes, int]], buffers: list[Any]) -> Iterator[Any]:
    start = 0
    for pickled, count in values:
        try:
            yield pickle.loads(pickled, buffers=buffers[start : start + count])
        except BaseException as error:  # a __setstate__ of the user's
            yield Lost(error, "a key that cannot be rebuilt in the worker")
        start += count


class Store:
    """The memory that this process writes and every worker of a pool reads."""

    def __init__(self) -> None:
        self.space = Space.create(0)
        self._writer = Writer(self.space)
        self._reader = Reader(self.space)
        self._lock = threading.Lock()

    def put(self, payload: Payload) -> Payload:
        """The payload with its buffers in shared memory, as far as there is room; any thread."""
        if not isinstance(payload, Parcel) or not payload.segments:
            return payload
        packing = Packing(self._writer)
        try:
            with self._lock:
                buffers = packing.place(payload.segments)
        except MemoryError:  # then they go by the channel, from where they are
            return payload
        roots = [self._reader.lend(block) for block in packing.blocks]
        return Parcel(payload.values, buffers, packing.segments, packing.blocks, roots)

    def trim(self) -> None:
        """Give unused memory back; may take its time."""
        with self._lock:
            self._writer.trim(now=True)

    def close(self) -> None:
        """The workers are gone: give back what no payload lies in. May take its time."""
        self.space.close_fd()
        self._reader.abandon()


def sent(payload: Payload) -> Sent:
    """What of a payload is in the message itself."""
    if isinstance(payload, Live):
        values: list[Any] = payload.value
        return values
    return payload.values, payload.buffers, payload.blocks


class Intake:
    """A worker's end of it.

    Parameters
    ----------
    space
        The memory that the parent writes.
    keeps
        Whether the user's functions get a copy of what lies there. They may write into it,
        and if this worker dies another is given the same memory.
    """

    def __init__(self, space: Space | None, *, keeps: bool) -> None:
        self._space = space
        self._keeps = keeps

    def open(self, sent: Sent, segments: Sequence[Segment]) -> list[Any]:
        """Keys or items as they have come."""
        if isinstance(sent, list):
            return sent
        values, buffers, blocks = sent
        return list(_rebuilt(values, found(buffers, self._roots(blocks), segments)))

    def _roots(self, blocks: Sequence[Block]) -> list[Any]:
        if self._space is None:
            return []
        roots = [self._space.array(block) for block in blocks]
        return [root.copy() for root in roots] if self._keeps else roots
