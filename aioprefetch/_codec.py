"""Objects to and from segments: results, arguments, errors, and the shipped source.

Plain pickle is tried first and cloudpickle when it fails. Large buffers leave the pickle
and become segments of their own, so that no array is copied into it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from ._errors import RemoteError, RemoteTraceback, SerializationError, TaskError, shorten
from ._wire import LARGE, Segment

_TEXT = 20_000  # characters of a remote traceback that travel
_MESSAGE = 2_000  # characters of the text of an exception that cannot travel
_ERROR = 1 << 20  # bytes of a pickled exception that travel
_DEPTH = 12  # of the search for what cannot be pickled
_BREADTH = 1_000


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


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, but a class that this process was sent goes back as a reference."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            tracker = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if tracker in _received:
                return _own_class, (tracker,)
        return super().reducer_override(obj)


class _PatientPickler(_Pickler):
    """Lets other threads run: the C pickler holds the interpreter, a Python hook lets go."""

    def persistent_id(self, obj: Any) -> None:
        return None


_received: frozenset[str] = frozenset()  # trackers of the classes that came with the source


def remember_received_classes() -> None:
    """In a worker, once its source is loaded: these classes are the parent's own."""
    global _received
    _received = frozenset(_cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.keys())


def _own_class(tracker: str) -> type:
    return _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]  # type: ignore[no-any-return]


def encode(value: Any) -> list[Segment]:
    """The segments of any object.

    Raises
    ------
    SerializationError
        Naming the part that cannot be pickled.
    """
    try:
        return _encode(value, functools.partial(pickle.dumps, protocol=5))
    except Exception:  # a class or function of __main__, say
        return encode_by_value(value, _cloud_dumps)


def encode_by_value(
    value: Any, dumps: Callable[..., bytes], name: str | None = None
) -> list[Segment]:
    try:
        return _encode(value, dumps)
    except Exception as error:
        name = type(value).__name__ if name is None else name
        raise SerializationError(explain(value, name)) from error


def encode_source(program: Any) -> list[Segment]:
    """As `encode`, by value and letting other threads run; parts are named by their fields."""
    patient = functools.partial(_cloud_dumps, pickler=_PatientPickler)
    return encode_by_value(program, patient, name="")


def _encode(value: Any, dumps: Callable[..., bytes]) -> list[Segment]:
    buffers: list[Segment] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < LARGE:
            return True
        buffers.append(view)
        return False

    return [dumps(value, buffer_callback=in_band), *buffers]


def _cloud_dumps(
    value: Any,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
    pickler: type[_Pickler] = _Pickler,
) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol=5, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()


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
        data = b"".join(encode_by_value(error, _in_band_dumps))
        rebuilt = pickle.loads(data)
    except BaseException:  # its own __reduce__ or __init__ may raise anything
        return None
    return data if len(data) <= _ERROR and type(rebuilt) is type(error) else None


def _in_band_dumps(value: Any, buffer_callback: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        return _cloud_dumps(value)


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


def explain(value: Any, name: str) -> str:
    """Which part of ``value`` cannot be pickled, in a sentence."""
    path, part, error = _culprit(value, name)
    where = path.lstrip(".")
    return (
        f"{where} cannot be pickled: {type(part).__name__} {shorten(part)} "
        f"({type(error).__name__}: {shorten(str(error), 200)}). Create it in the worker instead "
        "(on first use, in worker_init_fn, or from a function given as the source), "
        "or leave it out with __getstate__."
    )


def _culprit(value: Any, path: str) -> tuple[str, Any, BaseException | None]:
    error = _why_not(value)
    for _ in range(_DEPTH):
        for name, part in _parts(value):
            trouble = _why_not(part)
            if trouble is not None:
                path, value, error = path + name, part, trouble
                break
        else:
            break
    return path, value, error


def _why_not(value: Any) -> BaseException | None:
    try:
        pickle.loads(_cloud_dumps(value))
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, each with how one writes it."""
    if isinstance(value, dict):
        for key, part in list(value.items())[:_BREADTH]:
            yield f"[{shorten(key)}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        names = getattr(value, "_fields", None)
        for number, part in enumerate(list(value)[:_BREADTH]):
            yield (f".{names[number]}" if names else f"[{number}]"), part
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    else:
        for name, part in list(getattr(value, "__dict__", {}).items())[:_BREADTH]:
            if not name.startswith("__"):
                yield f".{name}", part
        for name in getattr(type(value), "__slots__", ()):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" → variable {name}", cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield f" → global {name}", function.__globals__[name]
    for number, default in enumerate(function.__defaults__ or ()):
        yield f" → default {number}", default
