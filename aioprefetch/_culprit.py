"""Which part of an object cannot be pickled."""

from __future__ import annotations

import contextlib
import functools
import pickle
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle

from ._errors import describe_error, shorten

_DEPTH = 12
_BREADTH = 1_000  # parts of one object that are looked at


def explain(value: Any, name: str) -> str:
    """Which part of ``value`` cannot be pickled, in a sentence."""
    path, part, error = _culprit(value, name)
    why = "it cannot be rebuilt" if error is None else describe_error(error)
    where = path.lstrip(".")
    return (
        f"{where} cannot be pickled: {type(part).__name__} {shorten(part)} "
        f"({why}). Create it in the worker instead (on "
        "first use, in worker_init_fn, or from a function given as the source), "
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
        pickle.loads(cloudpickle.dumps(value))
    except BaseException as error:
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
