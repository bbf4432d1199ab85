"""The kinds of source, who iterates which, and the streams that an iterable is read as."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from dataclasses import dataclass
from typing import Any, Literal

log = logging.getLogger("aioprefetch")

Kind = Literal["map", "iterable", "factory"]
Split = Literal["parent", "shard", "worker", "replicate"]

SPLITS: tuple[Split, ...] = ("parent", "shard", "worker", "replicate")

_KINDS = (
    "a map-style dataset (__len__ and __getitem__), an iterable (__iter__), an async iterable "
    "(__aiter__), a generator function, or a function without arguments that returns one of these"
)


@dataclass(frozen=True)
class Facts:
    """What a source is, as far as can be told without reading it."""

    kind: Kind
    name: str
    is_async: bool = False  # its __getitem__ or its iterator is
    one_shot: bool = False  # an iterator: it can be read once
    is_torch: bool = False  # a torch IterableDataset: it splits itself by worker_info
    shardable: bool = False
    num_shards: int | None = None
    length: int | None = None


def is_async_function(function: Any) -> bool:
    """Whether calling it gives an awaitable: ``async def``, also behind partial or __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004 - which kind, not whether
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def describe(source: Any) -> Facts:
    """Recognise a source.

    Raises
    ------
    TypeError
        It is none of the kinds.
    """
    kind = type(source)
    name = getattr(source, "__qualname__", kind.__qualname__)
    if is_generator_function(source):
        return Facts("iterable", name, is_async=inspect.isasyncgenfunction(_unwrap(source)))
    is_torch = is_torch_s(kind, "IterableDataset")
    if not is_torch and _is_map_style(kind):
        return _map_style(source, name)
    if is_torch or _has(kind, "__aiter__") or _has(kind, "__iter__"):
        return _iterable(source, name, is_torch)
    if callable(source) and _takes_nothing(source):
        return Facts("factory", name, is_async=is_async_function(source))
    raise TypeError(f"{name} is not a source: give {_KINDS}")


def _has(kind: type, method: str) -> bool:
    return getattr(kind, method, None) is not None


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_generator_function(source: Any) -> bool:
    function = _unwrap(source)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def is_async_iterable(iterable: Any) -> bool:
    """Whether it is read with ``async for``."""
    if is_generator_function(iterable):
        return inspect.isasyncgenfunction(_unwrap(iterable))
    return _has(type(iterable), "__aiter__")


def is_torch_s(kind: type, name: str) -> bool:
    """Whether it has this base class of ``torch.utils.data``, which is not imported for that."""
    return any(
        base.__name__ == name and base.__module__.startswith("torch.utils.data")
        for base in kind.__mro__
    )


def _is_map_style(kind: type) -> bool:
    if _has(kind, "__getitem__") and _has(kind, "__len__"):
        return True
    # Beside a sampler torch's need no length. What one has to override is there in any case.
    return is_torch_s(kind, "Dataset") and not _has(kind, "__iter__")


def _map_style(source: Any, name: str) -> Facts:
    methods = (type(source).__getitem__, getattr(type(source), "__getitems__", None))
    is_async = any(map(is_async_function, methods))
    return Facts("map", name, is_async=is_async, length=length_of(source))


def _iterable(source: Any, name: str, is_torch: bool) -> Facts:
    kind = type(source)
    is_async = _has(kind, "__aiter__")
    shardable = callable(getattr(source, "shard", None))
    shards = getattr(source, "num_shards", None) if shardable else None
    return Facts(
        "iterable",
        name,
        is_async=is_async,
        one_shot=_is_iterator(source, is_async),
        is_torch=is_torch,
        shardable=shardable,
        num_shards=shards if isinstance(shards, int) else None,
        length=length_of(source),
    )


def _is_iterator(source: Any, is_async: bool) -> bool:
    if is_async:
        return _has(type(source), "__anext__") and source.__aiter__() is source
    return _has(type(source), "__next__") and iter(source) is source


def _takes_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def length_of(sized: Any) -> int | None:
    """``len(sized)``, or None when it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def choose_split(
    facts: Facts, split: Split | None, *, has_map: bool, num_proc: int, ordered: bool
) -> Split:
    """Who iterates an iterable source: what was asked for, or the first rule that holds.

    Raises
    ------
    ValueError
        The source cannot be split as asked, or no rule holds.
    """
    chosen = split or _first_rule(facts, has_map=has_map, num_proc=num_proc, ordered=ordered)
    if chosen is None:
        raise ValueError(
            f"{facts.name} is iterable and num_proc={num_proc}: say who iterates it. "
            "split='parent': this process reads it, workers map and collate; "
            "split='shard': each worker reads source.shard(num_shards=, index=); "
            "split='worker': each worker iterates a copy that divides itself by worker_info(); "
            "split='replicate' with ordered=False: independent copies, i.i.d. items"
        )
    if chosen == "shard" and not facts.shardable:
        raise ValueError(
            f"split='shard' needs a source with shard(num_shards=, index=); {facts.name} has none"
        )
    if facts.one_shot and chosen != "parent":
        raise ValueError(
            f"{facts.name} is an iterator, which can be read once and by this process alone: "
            f"use split='parent' instead of {chosen!r}, or give the function that makes it"
        )
    if chosen == "replicate" and ordered:
        raise ValueError(
            "split='replicate' gives items in no order: pass ordered=False, or choose another split"
        )
    return chosen


def _first_rule(facts: Facts, *, has_map: bool, num_proc: int, ordered: bool) -> Split | None:
    if facts.shardable:
        return "shard"
    if facts.one_shot or has_map:
        return "parent"
    if facts.is_torch or num_proc <= 1:
        return "worker"
    return None if ordered else "replicate"


def start_epoch(source: Any, epoch: int) -> None:
    """Tell a source, sampler or copy which epoch begins, if it wants to know."""
    tell = getattr(source, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def reset(source: Any) -> None:
    """Tell a copy, once, that it is one and in its place."""
    tell = getattr(source, "reset_state", None)
    if callable(tell):
        tell()


def was_cancelled(error: BaseException) -> bool:
    """Whether ``error`` is the cancellation of the running asyncio task, not the user's own."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop, nothing to cancel
        return False
    return task is not None and task.cancelling() > 0


_TORCH_WORKER = "torch.utils.data._utils.worker"


def torch_worker_info(worker: int, num_workers: int, seed: int, source: Any) -> None:
    """Make ``torch.utils.data.get_worker_info()`` true in this worker, if torch is there."""
    module: Any = sys.modules.get(_TORCH_WORKER)
    if module is not None:
        module._worker_info = module.WorkerInfo(
            id=worker, num_workers=num_workers, seed=seed, dataset=source
        )


def no_torch_worker_info() -> None:
    """Take it back: what is divided already, by `shard` say, must not divide itself once more."""
    module: Any = sys.modules.get(_TORCH_WORKER)
    if module is not None:
        module._worker_info = None
