"""What workers run, on which terms, and how the steps of it are called.

Every step is written once, as a coroutine. Where all the user's functions are synchronous
nothing in it suspends, and `drive` runs it as a plain call; where one is not, a loop runs it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ._delivered import EVERYTHING, Share
from ._source import Facts, Split, is_async_function

T = TypeVar("T")


class Program(NamedTuple):
    """Everything a worker runs; shipped once."""

    source: Any
    map_fn: Any = None
    collate_fn: Any = None
    on_error: Any = "raise"
    worker_init_fn: Any = None


@dataclass(frozen=True)
class Terms:
    """How the program is to be run."""

    seed: int
    num_proc: int
    batched: bool
    drop_last: bool
    concurrency: int
    is_async: bool  # a loop runs the work
    in_process: bool  # in the user's own process, whose generators are not touched
    split: Split | None = None  # None for a map-style source, and until a factory is called
    num_streams: int = 0  # of all hosts
    share: Share = EVERYTHING
    origin: tuple[int, ...] = ()  # where the run goes on, if a state says so
    traces: bool = False  # whether what workers do when is told


def is_async_program(program: Program, facts: Facts) -> bool:
    """Whether any step of it has to be awaited."""
    steps = (program.map_fn, program.collate_fn, program.on_error, program.worker_init_fn)
    return (
        facts.is_async
        or any(is_async_function(step) for step in steps)
        or inspect.isasyncgenfunction(program.worker_init_fn)
    )


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("synchronous work was suspended")


async def call_sync(function: Any, *args: Any) -> Any:
    """Call a synchronous function of the user's."""
    return checked(function, function(*args))


def checked(function: Any, value: Any) -> Any:
    """What a synchronous function gave, if it is one."""
    if type(value) is types.CoroutineType:
        value.close()
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise TypeError(f"{name} returned a coroutine: declare it with 'async def'")
    return value


async def call_async(function: Any, *args: Any) -> Any:
    """Call a function of the user's, and await what an asynchronous one gives."""
    value = function(*args)
    if type(value) is types.CoroutineType or is_async_function(function):
        return await value
    return value
