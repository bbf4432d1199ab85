"""Calls of functions, in the worker: a call is an item, and to make it is what is mapped over it.

A plain function is sent as a pickle of its own, the same each time, and loaded once; so what it
keeps in globals of its module is there for the next call, as it would be at home.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._errors import TaskTimeout
from ._program import Program, Terms, checked

CONCURRENCY = 64  # calls of async functions that a worker has in flight at once
_LOADED = 256  # functions that a worker remembers


class CallOf(NamedTuple):
    """What is sent of a call."""

    function: Any  # or its pickle
    args: Sequence[Any]
    timeout: float | None = None  # where it can be cancelled


@functools.lru_cache(_LOADED)
def _loaded(pickled: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = pickle.loads(pickled)
    return function


def _function_of(call: CallOf) -> Callable[..., Any]:
    function = call.function
    if type(function) is bytes:
        return _loaded(function)
    return function  # type: ignore[no-any-return]


def invoke(call: CallOf) -> Any:
    """Make a call of a synchronous function."""
    function = _function_of(call)
    return checked(function, function(*call.args))


async def invoke_async(call: CallOf) -> Any:
    """Make a call of an asynchronous one, and cancel it when its time is over."""
    function = _function_of(call)
    try:
        async with asyncio.timeout(call.timeout) as limit:
            return await function(*call.args)
    except TimeoutError:
        if not limit.expired():  # the function's own
            raise
        name = name_of(function)
        raise TaskTimeout(f"{name} took longer than timeout={call.timeout:g} s") from None


def program_of_calls(worker_init_fn: Callable[..., Any] | None) -> Program:
    """What the workers of a shared pool run before anyone joins."""
    return Program(None, invoke_async, worker_init_fn=worker_init_fn)


def terms_of_calls(num_proc: int, seed: int, *, in_process: bool) -> Terms:
    return Terms(
        seed=seed,
        num_proc=num_proc,
        batched=False,
        drop_last=False,
        concurrency=CONCURRENCY,
        is_async=True,
        in_process=in_process,
        split="parent",
    )


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in messages."""
    inner = getattr(function, "func", function)  # of a partial
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{name}()"
