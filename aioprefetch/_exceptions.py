"""Exceptions on their way from a worker: rebuilt where they can be, told in words where not."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ._codec import Homeward
from ._errors import RemoteError, RemoteTraceback, TaskError, shorten, text_of
from ._tensors import reducers, tensor_type

_TEXT = 20_000  # characters of a remote traceback that travel
_MESSAGE = 2_000  # characters of the text of an exception that cannot
_LARGEST = 1 << 20  # bytes of a pickled exception that travel


class PackedError(NamedTuple):
    """An exception on its way.

    Pickles are bytes here, loaded where failing is no harm: a message that cannot be rebuilt
    would take others with it.
    """

    task_error: tuple[bytes | None, bytes] | None  # with its keys, and with their text
    pickled: bytes | None  # the original, or None when it cannot be rebuilt
    type_name: str
    message: str
    text: str


def pack_error(error: BaseException) -> PackedError:
    """Pack a TaskError with its cause, or any other exception; never fails."""
    task_error, original = None, error
    if isinstance(error, TaskError):
        task_error = (_pickled(error), _dumps(_in_words(error), pickle.Pickler))
        original = error.__cause__ or RemoteError("")
    return PackedError(
        task_error,
        _pickled(original),
        type(original).__qualname__,
        text_of(original, _MESSAGE),
        _shortened(lambda: "".join(traceback.format_exception(original))),
    )


def unpack_error(packed: PackedError) -> BaseException:
    """The exception that `pack_error` was given, its remote traceback at its cause."""
    original = _loaded(packed.pickled)
    if original is None:
        original = RemoteError(f"{packed.type_name}: {packed.message}")
    original.__cause__ = RemoteTraceback(packed.text)
    if packed.task_error is None:
        return original
    with_keys, in_words = packed.task_error
    error = _loaded(with_keys) or _loaded(in_words)
    assert error is not None
    error.__cause__ = original
    return error


def _in_words(error: TaskError) -> TaskError:
    """``error``, its keys shown as text."""
    shown = copy.copy(error)
    shown.index = None if error.index is None else shorten(error.index)
    shown.indices = tuple(map(shorten, error.indices))
    return shown


def _loaded(pickled: bytes | None) -> BaseException | None:
    if pickled is not None:
        with contextlib.suppress(
            BaseException
        ):  # its own __reduce__ or __init__ may raise anything
            error = pickle.loads(pickled)
            return error if isinstance(error, BaseException) else None
    return None


def _pickled(error: BaseException) -> bytes | None:
    """The exception pickled, if it can be rebuilt from that."""
    try:
        data = _in_band(error)
        rebuilt = pickle.loads(data)
    except BaseException:
        return None
    return data if len(data) <= _LARGEST and type(rebuilt) is type(error) else None


def _in_band(value: Any) -> bytes:
    try:
        return _dumps(value, pickle.Pickler)
    except BaseException:
        return _dumps(value, Homeward)


def _dumps(value: Any, pickler: Any) -> bytes:
    """Pickle an error by its own rules.

    Other libraries (tblib, which distributed brings) have every exception of a process pickled
    with its traceback and all that hangs on it.
    """
    table = copyreg.dispatch_table if pickler is pickle.Pickler else pickler.dispatch_table
    own = {kind: reduce for kind, reduce in table.items() if not _is_exception(kind)}
    kind = type(
        pickler.__name__, (pickler,), {"dispatch_table": reducers(own) if tensor_type() else own}
    )
    file = io.BytesIO()
    kind(file, protocol=5).dump(value)
    return file.getvalue()


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _shortened(make: Callable[[], str]) -> str:
    try:
        text = make()
    except BaseException as error:  # a __str__ of the user's
        text = f"<the traceback could not be made: {type(error).__name__}>"
    if len(text) <= _TEXT:
        return text
    return (
        f"{text[: _TEXT // 2]}\n… {len(text) - _TEXT} characters left out …\n{text[-_TEXT // 2 :]}"
    )
