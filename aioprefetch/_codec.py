"""Objects to and from segments and shared memory: results, and the shipped source.

Plain pickle is tried first and cloudpickle when it fails. Large buffers leave the pickle
and become segments of their own, so that no array is copied into it.
"""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from ._arena import Block, Reader, Writer
from ._culprit import explain
from ._errors import SerializationError
from ._tensors import reducers, tensor_type
from ._wire import LARGE, Segment

_ALIGN = 64
_WORTH_A_BLOCK = 1024  # bytes of small buffers from which they go through shared memory


_Buffers = Callable[[pickle.PickleBuffer], Any] | None
Dumps = Callable[..., bytes]


class Slice(NamedTuple):
    """Part of a block of shared memory, by the place of the block in its list."""

    block: int
    start: int
    nbytes: int


# Where a buffer is: a slice of a block, bytes of its own, or the number of the segment that
# follows the message, when there was no shared memory for it.
Place = Slice | bytearray | int


class Packed(NamedTuple):
    """A result on its way: its pickle, and where the buffers that left it are."""

    pickled: bytes | Slice
    blocks: tuple[Block, ...] = ()
    buffers: tuple[Place, ...] = ()


class Delivery(NamedTuple):
    """A result that has come: decoded when it is delivered, from the memory it lies in."""

    pickled: Any
    buffers: Sequence[Any]
    nbytes: int

    def open(self) -> Any:
        return pickle.loads(self.pickled, buffers=self.buffers)


_received: frozenset[str] = frozenset()  # trackers of the classes that came with the source


def remember_received_classes() -> None:
    """In a worker, once its source is loaded: these classes are the parent's own."""
    global _received
    _received = frozenset(_cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.keys())


def _own_class(tracker: str) -> type:
    return _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]  # type: ignore[no-any-return]


class Homeward(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, but a class that this process was sent goes back as a reference."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            tracker = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if tracker in _received:
                return _own_class, (tracker,)
        return super().reducer_override(obj)


class _Patient(cloudpickle.Pickler):  # type: ignore[misc]
    """Lets other threads run: the C pickler holds the interpreter, a Python hook lets go."""

    def persistent_id(self, obj: Any) -> None:
        return None


_ATOMS = (int, float, bool, type(None))


def encode_result(value: Any, writer: Writer | None) -> tuple[Packed | bytes, Sequence[Segment]]:
    """A result of a worker, its buffers in shared memory, and the segments for which there is none.

    Only its pickle, when nothing has left that.

    Arrays that were made there stay where they are; others are copied in, once.

    Raises
    ------
    SerializationError
        Naming the part that cannot be pickled.
    MemoryError
        Naming the bytes that are not to be had.
    """
    if type(value) in _ATOMS:
        return pickle.dumps(value, 5), ()
    try:
        pickled, *buffers = _encode(value, plain_dumps, in_band=0)
    except BaseException:  # a class or function of __main__, say, or what a __reduce__ raised
        pickled, *buffers = _explained(value, dumps_with(Homeward), in_band=0)
    if not buffers and len(pickled) < LARGE:
        return bytes(pickled), ()
    packing = Packing(writer)
    return packing.pack(pickled, buffers), packing.segments


class Packing:
    """Puts buffers in blocks: a large one in its own, small ones together."""

    def __init__(self, writer: Writer | None) -> None:
        self._writer = writer
        self.blocks: list[Block] = []
        self.segments: list[Segment] = []

    def pack(self, pickled: Segment, buffers: list[Segment]) -> Packed:
        """A result's."""
        with self._all_or_none():
            places = self._place(buffers)
            head = bytes(pickled) if len(pickled) < LARGE else self._place_pickle(pickled)
        return Packed(head, tuple(self.blocks), places)

    def place(self, buffers: Sequence[Segment]) -> tuple[Place, ...]:
        """Where they are now."""
        with self._all_or_none():
            return self._place(buffers)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for block in self.blocks:
                assert self._writer is not None
                self._writer.free(block)
            raise

    def _place(self, buffers: Sequence[Segment]) -> tuple[Place, ...]:
        small = iter(self._place_small([b for b in buffers if _size(b) < LARGE]))
        return tuple(next(small) if _size(b) < LARGE else self._place_large(b) for b in buffers)

    def _place_small(self, buffers: list[Segment]) -> Sequence[Place]:
        sizes = [_size(buffer) + -_size(buffer) % _ALIGN for buffer in buffers]
        block = None
        if self._writer is not None and sum(sizes) >= _WORTH_A_BLOCK:
            block = self._writer.take(sum(sizes))
        if block is None:
            return [bytearray(buffer) for buffer in buffers]
        return self._copy_all(block, buffers, sizes)

    def _copy_all(self, block: Block, buffers: list[Segment], sizes: list[int]) -> list[Slice]:
        assert self._writer is not None
        self.blocks.append(block)
        room = self._writer.view(block)
        slices, start = [], 0
        for buffer, size in zip(buffers, sizes, strict=True):
            slices.append(Slice(len(self.blocks) - 1, start, _size(buffer)))
            room[start : start + _size(buffer)] = buffer
            start += size
        return slices

    def _place_large(self, buffer: Segment) -> Slice | int:
        block = None
        if self._writer is not None:
            block = self._writer.opened(buffer)
            if block is None:
                block = self._writer.take(_size(buffer))
                if block is not None:
                    self._writer.copy(block, buffer)
        if block is None:
            self.segments.append(buffer)
            return len(self.segments) - 1
        self.blocks.append(block)
        return Slice(len(self.blocks) - 1, 0, _size(buffer))

    def _place_pickle(self, pickled: Segment) -> bytes | Slice:
        place = self._place_large(pickled)
        if isinstance(place, Slice):
            return place
        return bytes(self.segments.pop())


def found(places: Sequence[Place], roots: Sequence[Any], segments: Sequence[Segment]) -> list[Any]:
    """The buffers, of which the blocks are mapped as ``roots``."""
    return [
        _slice_of(roots, place)
        if isinstance(place, Slice)
        else (segments[place] if isinstance(place, int) else place)
        for place in places
    ]


def _size(buffer: Segment) -> int:
    return memoryview(buffer).nbytes


def receive(packed: Packed | bytes, segments: Sequence[Segment], reader: Reader | None) -> Delivery:
    """A result as it has come; the memory it lies in is kept until its last view dies."""
    if type(packed) is bytes:
        return Delivery(packed, (), len(packed))
    assert type(packed) is Packed
    roots = [reader.lend(block) for block in packed.blocks] if reader is not None else []
    buffers = found(packed.buffers, roots, segments)
    pickled = packed.pickled
    nbytes = sum(block.nbytes for block in packed.blocks) + sum(map(_size, segments))
    if isinstance(pickled, Slice):
        return Delivery(_slice_of(roots, pickled), buffers, nbytes)
    return Delivery(pickled, buffers, nbytes + len(pickled))


def _slice_of(roots: Sequence[Any], place: Slice) -> Any:
    root = roots[place.block]
    if place.start == 0 and place.nbytes == len(root):
        return root
    return root[place.start : place.start + place.nbytes]


_MAIN = b"__main__"


def encode(value: Any, within: bytes = b"") -> list[Segment]:
    """The segments of what a worker is sent; raises as `encode_result` does.

    ``within`` is a pickle that the value holds and that was made by this.
    """
    try:
        segments = _encode(value, plain_dumps)
    except BaseException:  # whatever a __reduce__ of the user's raises
        segments = []
    # A reference to __main__ means this process's, and the worker's is another.
    if segments and bytes(segments[0]).count(_MAIN) == within.count(_MAIN):
        return segments
    return _explained(value, dumps_with(cloudpickle.Pickler))


def encode_source(program: Any) -> list[Segment]:
    """As `encode`, letting other threads run; the parts of the program are named by its fields."""
    return _explained(program, dumps_with(_Patient), name="")


def _explained(
    value: Any, dumps: Dumps, name: str | None = None, in_band: int = LARGE
) -> list[Segment]:
    try:
        return _encode(value, dumps, in_band)
    except MemoryError:
        raise
    except BaseException as error:
        name = type(value).__name__ if name is None else name
        raise SerializationError(explain(value, name)) from error


def _encode(value: Any, dumps: Dumps, in_band: int = LARGE) -> list[Segment]:
    """The pickle, then the buffers of ``in_band`` bytes or more, which leave it."""
    buffers: list[Segment] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < in_band:
            return True
        buffers.append(view)
        return False

    return [dumps(value, buffer_callback=stays), *buffers]


def plain_dumps(value: Any, buffer_callback: _Buffers = None) -> bytes:
    if not tensor_type():
        return pickle.dumps(value, protocol=5, buffer_callback=buffer_callback)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=buffer_callback)
    pickler.dispatch_table = reducers()
    pickler.dump(value)
    return file.getvalue()


def dumps_with(pickler: Any) -> Dumps:
    def dumps(value: Any, buffer_callback: _Buffers = None) -> bytes:
        file = io.BytesIO()
        kind = _with_tensors(pickler) if tensor_type() else pickler
        kind(file, protocol=5, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()

    return dumps


@cache
def _with_tensors(pickler: Any) -> Any:
    """The same, but tensors are arrays to it."""
    # Its own table stands in the class, where one that an instance is given is not seen.
    table = ChainMap(reducers({}), pickler.dispatch_table)
    return type(pickler.__name__, (pickler,), {"dispatch_table": table})


def message(record: Any) -> list[Segment]:
    """The segment of a record of our own, all of whose types are importable."""
    return [pickle.dumps(record, protocol=5)]


def decode(segments: Sequence[Segment]) -> Any:
    """The object; its arrays lie in the memory of the segments."""
    return pickle.loads(segments[0], buffers=segments[1:])
