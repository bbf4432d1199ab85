"""What can go wrong, and what the caller is told.

PrefetchError
 · TaskError            an item or a batch failed
   · WorkerDied         its worker ended without a result, too often
   · TaskTimeout        it took longer than task_timeout, too often
 · WorkerStartError     a worker did not come up
 · SerializationError   an object cannot travel to a worker or back
 · PoolBroken           no worker is left
SkipItem                raised by the user's code: leave this item out
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, Literal

Stage = Literal["iterate", "fetch", "map", "collate", "result", "transfer", "on_error"]

_SHOWN = 60  # characters of a key that an error message shows


class PrefetchError(Exception):
    """Base of every error of this package."""


class WorkerStartError(PrefetchError):
    """A worker did not come up; the message says how far it got and what to try."""


class SerializationError(PrefetchError):
    """An object cannot be pickled, or not rebuilt; the message names the part that resists."""


class PoolBroken(PrefetchError):
    """No worker is left to do the work; chained to the last death."""


class SkipItem(Exception):
    """Raised by ``__getitem__``, ``map_fn`` or ``on_error``: leave this item out of its batch."""


class TaskError(PrefetchError):
    """An item or a batch failed; ``__cause__`` is the original exception.

    Attributes
    ----------
    index
        Key of the item at fault (its ordinal, for an iterable source), or None when the
        whole batch is.
    indices
        Keys of the batch.
    seq
        Number of the batch in its epoch.
    epoch
        The epoch.
    worker
        Id of the worker that ran it, or None.
    stage
        "iterate", "fetch", "map", "collate", "result", "transfer" or "on_error".
    """

    def __init__(
        self,
        message: str,
        *,
        index: Any = None,
        indices: Sequence[Any] = (),
        seq: int = 0,
        epoch: int = 0,
        worker: int | None = None,
        stage: Stage = "fetch",
    ) -> None:
        super().__init__(message)
        self.index = index
        self.indices = tuple(indices)
        self.seq = seq
        self.epoch = epoch
        self.worker = worker
        self.stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.__dict__)


class WorkerDied(TaskError):
    """Workers ended before the item or batch was done, one more than ``retries``.

    Attributes
    ----------
    pid
        Process id of the last.
    exitcode
        Its exit code, negative for a signal, None when unknown.
    stack
        Its Python stack when it crashed, where there was one.
    """

    pid: int | None = None
    exitcode: int | None = None
    stack: str | None = None


class TaskTimeout(TaskError):
    """An item or batch took longer than ``task_timeout``, once more than ``retries``.

    Attributes
    ----------
    pid
        Process id of the last worker, which was killed.
    stack
        Where it was stuck, where that could be read.
    """

    pid: int | None = None
    stack: str | None = None


class RemoteTraceback(Exception):
    """The traceback of an exception as the worker saw it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class RemoteError(Exception):
    """Stands in for an exception that could not travel; its text names the type."""


def _rebuild(cls: type[TaskError], message: str, attributes: dict[str, Any]) -> TaskError:
    error = cls(message)
    error.__dict__.update(attributes)
    return error


def shorten(value: object, limit: int = _SHOWN) -> str:
    """``repr(value)``, cut in the middle; never raises."""
    try:
        text = repr(value)
    except BaseException as error:  # a repr of the user's
        return f"<{type(value).__name__}: repr failed with {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}"


def text_of(error: BaseException, limit: int = 500) -> str:
    """``str(error)``, cut at its end; never raises."""
    try:
        text = str(error)
    except BaseException as raised:  # a __str__ of the user's
        return f"<its text could not be made: {type(raised).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}…"


def describe_error(error: BaseException) -> str:
    """Type and text of an exception, for a message; never raises."""
    return f"{type(error).__name__}: {text_of(error)}"


def describe_exit(exitcode: int | None) -> str:
    """An exit code in words: "was killed by SIGKILL", "exited with code 3"."""
    if exitcode is None:
        return "ended (exit code unknown)"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"
