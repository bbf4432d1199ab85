"""Objects to and from segments: results, arguments, errors, and the shipped source.

Plain pickle is tried first and cloudpickle when it fails. Large buffers leave the pickle
and become segments of their own, so that no array is copied into it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from ._culprit import explain
from ._errors import RemoteError, RemoteTraceback, SerializationError, TaskError, shorten
from ._wire import LARGE, Segment

_TEXT = 20_000  # characters of a remote traceback that travel
_MESSAGE = 2_000  # characters of the text of an exception that cannot travel
_ERROR = 1 << 20  # bytes of a pickled exception that travel


class Parcel(NamedTuple):
    """An encoded object; decoded when it is delivered."""

    segments: Sequence[Segment]

    def open(self) -> Any:
        return decode(self.segments)


class Live(NamedTuple):
    """An object that never left this process."""

    value: Any

    def open(self) -> Any:
        return self.value


Payload = Parcel | Live

_Buffers = Callable[[pickle.PickleBuffer], Any] | None
Dumps = Callable[..., bytes]


_received: frozenset[str] = frozenset()  # trackers of the classes that came with the source


def remember_received_classes() -> None:
    """In a worker, once its source is loaded: these classes are the parent's own."""
    global _received
    _received = frozenset(_cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.keys())


def _own_class(tracker: str) -> type:
    return _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]  # type: ignore[no-any-return]


class _Homeward(cloudpickle.Pickler):  # type: ignore[misc]
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


def encode_result(value: Any) -> list[Segment]:
    """The segments of what a worker has made.

    Raises
    ------
    SerializationError
        Naming the part that cannot be pickled.
    """
    try:
        return _encode(value, _plain_dumps)
    except Exception:  # a class or function of __main__, say
        return _explained(value, _dumps_with(_Homeward))


def encode(value: Any) -> list[Segment]:
    """The segments of what a worker is sent; raises as `encode_result` does."""
    try:
        segments = _encode(value, _plain_dumps)
    except Exception:
        segments = []
    # A reference to __main__ means this process's, and the worker's is another.
    if segments and b"__main__" not in segments[0]:
        return segments
    return _explained(value, _dumps_with(cloudpickle.Pickler))


def encode_source(program: Any) -> list[Segment]:
    """As `encode`, letting other threads run; the parts of the program are named by its fields."""
    return _explained(program, _dumps_with(_Patient), name="")


def _explained(value: Any, dumps: Dumps, name: str | None = None) -> list[Segment]:
    try:
        return _encode(value, dumps)
    except Exception as error:
        name = type(value).__name__ if name is None else name
        raise SerializationError(explain(value, name)) from error


def _encode(value: Any, dumps: Dumps) -> list[Segment]:
    buffers: list[Segment] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    return [dumps(value, buffer_callback=in_band), *buffers]


def _plain_dumps(value: Any, buffer_callback: _Buffers = None) -> bytes:
    return pickle.dumps(value, protocol=5, buffer_callback=buffer_callback)


def _dumps_with(pickler: type[pickle.Pickler]) -> Dumps:
    def dumps(value: Any, buffer_callback: _Buffers = None) -> bytes:
        file = io.BytesIO()
        pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()

    return dumps


def decode(segments: Sequence[Segment]) -> Any:
    """The object; its arrays lie in the memory of the segments."""
    return pickle.loads(segments[0], buffers=segments[1:])


class PackedError(NamedTuple):
    """An exception on its way; ``pickled`` is None when it cannot be rebuilt."""

    fields: TaskError | None
    pickled: bytes | None
    type_name: str
    message: str
    text: str


def pack_error(error: BaseException) -> PackedError:
    """Pack a TaskError with its cause, or any other exception; never fails."""
    fields = error if isinstance(error, TaskError) else None
    original = error if fields is None else (fields.__cause__ or fields)
    return PackedError(
        _portable(fields),
        _pickled(original),
        type(original).__qualname__,
        _text(lambda: str(original))[:_MESSAGE],
        _text(lambda: "".join(traceback.format_exception(original))),
    )


def unpack_error(packed: PackedError) -> BaseException:
    """The exception that `pack_error` was given, its remote traceback at its cause."""
    original: BaseException | None = None
    if packed.pickled is not None:
        with contextlib.suppress(Exception):
            original = pickle.loads(packed.pickled)
    if not isinstance(original, BaseException):
        original = RemoteError(f"{packed.type_name}: {packed.message}")
    original.__cause__ = RemoteTraceback(packed.text)
    if packed.fields is None:
        return original
    if type(original) is not type(packed.fields):
        packed.fields.__cause__ = original
    return packed.fields


def _portable(error: TaskError | None) -> TaskError | None:
    """``error``, its keys shown as text when they cannot travel."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error.index = None if error.index is None else shorten(error.index)
        error.indices = tuple(map(shorten, error.indices))
    return error


def _pickled(error: BaseException) -> bytes | None:
    """The exception pickled, if it can be rebuilt from that."""
    try:
        data = _in_band(error)
        rebuilt = pickle.loads(data)
    except BaseException:  # its own __reduce__ or __init__ may raise anything
        return None
    return data if len(data) <= _ERROR and type(rebuilt) is type(error) else None


def _in_band(value: Any) -> bytes:
    try:
        return _plain_dumps(value)
    except Exception:
        return _dumps_with(_Homeward)(value)


def _text(make: Callable[[], str]) -> str:
    try:
        text = make()
    except BaseException as error:  # a __str__ of the user's
        text = f"<its text could not be made: {type(error).__name__}>"
    if len(text) <= _TEXT:
        return text
    return (
        f"{text[: _TEXT // 2]}\n… {len(text) - _TEXT} characters left out …\n{text[-_TEXT // 2 :]}"
    )
