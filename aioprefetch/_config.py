"""What a Prefetcher is given, checked where it is given."""

from __future__ import annotations

import multiprocessing
import operator
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np

from . import _seeds
from ._delivered import TAILS, Share, Tail
from ._line import Rules
from ._program import Program, Terms, is_async_program
from ._source import SPLITS, Facts, Split, choose_split, describe, is_async_function, length_of
from ._state import Layout
from ._stats import Setting

_SHARE = 4  # the window may take a quarter of the memory that this process may
_MANY_ITEMS = 256  # items prefetched at least where each is delivered alone


def default_start_method() -> str:
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"


@dataclass(frozen=True)
class Staff:
    """How many workers, of which kind; wrong arguments are refused by ``check``."""

    num_proc: int
    mp_context: str | BaseContext | None
    worker_init_fn: Callable[..., Any] | None
    worker_threads: int | None

    def check(self, *, least: int, stacklevel: int) -> None:
        """Raise TypeError or ValueError for what cannot be meant."""
        check_number("num_proc", self.num_proc, least)
        if self.worker_threads is not None:
            check_number("worker_threads", self.worker_threads, 1)
        check_function("worker_init_fn", self.worker_init_fn)
        if self.mp_context is not None:
            self._check_context(self.mp_context, stacklevel + 1)

    def _check_context(self, context: str | BaseContext, stacklevel: int) -> None:
        if self.num_proc == 0:
            raise ValueError("mp_context is for worker processes, and num_proc=0 has none")
        if isinstance(context, str):
            methods = multiprocessing.get_all_start_methods()
            if context not in methods:
                raise ValueError(
                    f"mp_context must be one of {', '.join(methods)} here, not {context!r}"
                )
        elif not hasattr(context, "get_start_method"):
            raise TypeError(
                f"mp_context must be the name of a start method or what "
                f"multiprocessing.get_context() gives, not {context!r}"
            )
        if self.context().get_start_method() == "fork":
            warnings.warn(
                "mp_context='fork' copies a process that has threads (the event loop's, numpy's): "
                "a lock that one of them holds stays locked in the worker for ever. "
                "'forkserver' and 'spawn' are safe",
                RuntimeWarning,
                stacklevel=stacklevel,
            )

    def context(self) -> BaseContext:
        """The multiprocessing context that workers are started from."""
        context = self.mp_context or default_start_method()
        return multiprocessing.get_context(context) if isinstance(context, str) else context


@dataclass(frozen=True, kw_only=True)
class Config:
    """The arguments of a Prefetcher; wrong ones, and combinations, are refused here."""

    source: Any
    map_fn: Callable[..., Any] | None = None
    batch_size: int | None = None
    drop_last: bool = False
    collate_fn: Callable[..., Any] | None = None
    shuffle: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    seed: int | None = 0
    epochs: int | None = 1
    split: Split | None = None
    num_shards: int | None = None
    rank: int = 0
    world_size: int = 1
    tail: Tail = "exact"
    num_proc: int = 1
    mp_context: str | BaseContext | None = None
    worker_init_fn: Callable[..., Any] | None = None
    worker_threads: int | None = 1
    concurrency: int = 16
    pool: Any = None
    num_prefetch: int | None = None
    max_bytes: int | None = None
    ordered: bool = True
    transfer: Callable[[Any], Any] | None = None
    trace: str | os.PathLike[str] | None = None
    on_error: Any = "raise"
    retries: int = 2
    task_timeout: float | None = None
    shutdown_timeout: float = 5.0
    facts: Facts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", describe(self.source))
        self._check_switches()
        self._check_numbers()
        self._check_hosts()
        self._check_functions()
        self._check_trace()
        self._check_batching()
        self._check_pool()
        self._check_source()
        self.staff.check(least=0, stacklevel=5)

    def arguments(self) -> dict[str, Any]:
        """The arguments as they were given."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    # Checks

    def _check_switches(self) -> None:
        for name in ("drop_last", "shuffle", "ordered"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{name} must be True or False, not {value!r}")

    def _check_numbers(self) -> None:
        check_number("concurrency", self.concurrency, 1)
        check_number("retries", self.retries, 0)
        for name in (
            "batch_size",
            "epochs",
            "num_prefetch",
            "max_bytes",
            "num_shards",
        ):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1)
        if self.seed is not None:
            check_number("seed", self.seed, 0)
            if self.seed >= 1 << _seeds.SEED_BITS:
                raise ValueError(f"seed must be below 2**{_seeds.SEED_BITS}, not {self.seed}")
        check_seconds("shutdown_timeout", self.shutdown_timeout)
        if self.task_timeout is not None:
            check_seconds("task_timeout", self.task_timeout, positive=True)
        if self.task_timeout is not None and self.num_proc == 0:
            raise ValueError(
                "task_timeout needs worker processes: with num_proc=0 a thread does the work, and "
                "a thread cannot be ended"
            )

    def _check_hosts(self) -> None:
        check_number("world_size", self.world_size, 1)
        check_number("rank", self.rank, 0)
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank must be below world_size={self.world_size}, from 0 on, not {self.rank}"
            )
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {self.tail!r}")

    def _check_functions(self) -> None:
        for name in ("map_fn", "collate_fn", "transfer"):
            check_function(name, getattr(self, name))
        if is_async_function(self.transfer):
            raise TypeError(
                "transfer runs on a thread of its own, off the event loop, and cannot be async: "
                "give a plain function"
            )
        if self.on_error not in ("raise", "skip") and not callable(self.on_error):
            raise ValueError(
                f"on_error must be 'raise', 'skip' or a function of a TaskError, "
                f"not {self.on_error!r}"
            )

    def _check_trace(self) -> None:
        if self.trace is None:
            return
        if not isinstance(self.trace, (str, os.PathLike)):
            raise TypeError(f"trace must be the path of a file, not {self.trace!r}")
        path = os.path.abspath(self.trace)
        folder = os.path.dirname(path)
        if os.path.isdir(path):
            raise ValueError(f"trace must be the path of a file, and {path} is a directory")
        if not os.path.isdir(folder):
            raise ValueError(f"trace={path} cannot be written: there is no directory {folder}")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise ValueError(f"trace={path} cannot be written: permission is denied")

    def _check_batching(self) -> None:
        if self.drop_last and self.batch_size is None and self.batch_sampler is None:
            raise ValueError("drop_last needs a batch_size: without one no batch is short")
        if self.sampler is not None and self.shuffle:
            raise ValueError("sampler says the order, and so does shuffle: give one of them")
        if self.batch_sampler is not None:
            for name in ("batch_size", "shuffle", "sampler", "drop_last"):
                if _given(getattr(self, name)):
                    raise ValueError(f"batch_sampler makes the batches: do not give {name} too")
        for name in ("sampler", "batch_sampler"):
            value = getattr(self, name)
            if value is not None and describe_iterable(value) is None:
                raise TypeError(f"{name} must be an iterable or async iterable, not {value!r}")

    def _check_source(self) -> None:
        if self.split is not None and self.split not in SPLITS:
            raise ValueError(
                f"split must be one of {', '.join(SPLITS)} or None, not {self.split!r}"
            )
        if self.facts.kind != "factory":
            self.check_facts(self.facts)

    def check_facts(self, facts: Facts) -> None:
        """Refuse what this kind of source cannot do."""
        if facts.kind == "map":
            self._check_map_style(facts)
            return
        for name in ("shuffle", "sampler", "batch_sampler"):
            if _given(getattr(self, name)):
                raise ValueError(
                    f"{name} needs a map-style source (__getitem__ and __len__), and "
                    f"{facts.name} is iterable: order its items in its __iter__"
                )
        if self.tail != "exact" and self.split_of(facts) != "parent":
            raise ValueError(
                f"tail={self.tail!r} evens out the items of hosts, and {facts.name} is read as "
                "streams of unknown length: only tail='exact' holds there"
            )
        if self.split is None and facts.length is not None:
            self._warn_of_repeats(self.split_of(facts), facts)
        self.split_of(facts)

    def _check_map_style(self, facts: Facts) -> None:
        for name in ("split", "num_shards"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{facts.name} is map-style: its plan is cut among the workers batch by "
                    f"batch, so it takes no {name}"
                )
        if facts.length is None and self.sampler is None and self.batch_sampler is None:
            raise TypeError(
                f"{facts.name} has no len(): give a sampler or batch_sampler that says which keys"
            )

    def split_of(self, facts: Facts) -> Split:
        """Who iterates an iterable source with these facts."""
        split = choose_split(
            facts,
            self.split,
            has_map=self.map_fn is not None,
            num_proc=self.num_proc,
            ordered=self.ordered,
        )
        if self.num_shards is not None and split != "shard":
            raise ValueError(f"num_shards is for split='shard', and the split is {split!r}")
        if split != "parent" and self.pool is not None and not self.pool._reads_streams:
            raise ValueError(
                f"split={split!r} has each worker go on with streams of its own, and a "
                f"{type(self.pool).__name__} may find another worker each time: only "
                "split='parent' works on it"
            )
        return split

    def _warn_of_repeats(self, split: Split, facts: Facts) -> None:
        if split == "replicate":
            warnings.warn(
                f"{facts.name} is iterable and every worker iterates a copy of its own: items "
                f"repeat, and an epoch of {facts.length} items need not hold each. Say "
                "split='replicate' if that is meant, or choose another split",
                UserWarning,
                stacklevel=7,
            )

    def _check_pool(self) -> None:
        if self.pool is None:
            return
        if not hasattr(self.pool, "_admit"):
            raise TypeError(f"pool must be a pool of this package, or None, not {self.pool!r}")
        belongs = {"mp_context": None, "worker_init_fn": None, "worker_threads": 1}
        given = [name for name, default in belongs.items() if getattr(self, name) != default]
        if self.num_proc not in (1, self.pool.num_proc):
            given.insert(0, "num_proc")
        if given:
            raise ValueError(
                f"the workers are the pool's: give {', '.join(given)} to the pool, not beside it"
            )
        if self.task_timeout is not None and not self.pool._ends_calls:
            raise ValueError(
                f"a {type(self.pool).__name__} cannot end what takes too long, so there is no "
                "task_timeout on it: a ProcessPool can"
            )
        object.__setattr__(self, "num_proc", self.pool.num_proc)

    # What follows from it

    def facts_now(self) -> Facts:
        """What is known of the source, which may have grown since it was given."""
        return self.facts if self.facts.kind == "factory" else describe(self.source)

    @property
    def staff(self) -> Staff:
        """The workers that it asks for."""
        return Staff(self.num_proc, self.mp_context, self.worker_init_fn, self.worker_threads)

    @property
    def rules(self) -> Rules:
        """What its items are forgiven."""
        return Rules(self.on_error, self.retries, self.task_timeout, late=self.retries)

    def program(self, split: Split | None) -> Program:
        """What workers are sent; a source that this process reads stays here."""
        reads_here = split == "parent"
        return Program(
            None if reads_here else self.source,
            self.map_fn,
            self.collate_fn,
            self.on_error,
            self.worker_init_fn,
        )

    def terms(self, split: Split | None, seed: int, origin: tuple[int, ...] = ()) -> Terms:
        """How workers are to run it."""
        facts = replace(self.facts, is_async=False) if split == "parent" else self.facts
        return Terms(
            seed=seed,
            num_proc=self.num_proc,
            batched=self.is_batched,
            drop_last=self.drop_last,
            concurrency=self.concurrency,
            is_async=is_async_program(self.program(split), facts),
            in_process=self.num_proc == 0 or (self.pool is not None and self.pool._in_process),
            split=split,
            share=self.share,
            origin=origin,
            traces=self.trace is not None,
        )

    @property
    def share(self) -> Share:
        """What this host takes of the plan."""
        return Share(self.rank, self.world_size, self.tail)

    @property
    def is_batched(self) -> bool:
        return self.batch_size is not None or self.batch_sampler is not None

    def num_streams(self, facts: Facts, split: Split) -> int:
        """Into how many streams all hosts together split an iterable source."""
        workers = max(1, self.num_proc) * self.world_size
        if split == "parent":
            return 1
        if split == "shard":
            return self.num_shards or min(facts.num_shards or workers, workers)
        return workers

    def layout(self, facts: Facts, split: Split | None, num_streams: int | None) -> Layout:
        """What positions of the plan mean."""
        if self.batch_sampler is not None:
            return Layout("batch_sampler", keys_length(self, None))
        if self.sampler is not None:
            return Layout("sampler", keys_length(self, None))
        if facts.kind == "map":
            return Layout("index", facts.length, self.shuffle)
        keeps = num_streams if split in ("shard", "worker") else None
        return Layout(split, facts.length, num_streams=keeps)

    def hold(self, *, is_async: bool) -> int:
        """Tasks that a worker holds: what it runs, and one more for a blocked loop."""
        if not is_async:
            return 2
        size = self.batch_size or (self.concurrency if self.is_batched else 1)
        return -(-self.concurrency // size) + 1

    def setting(self, window: int, *, is_async: bool) -> Setting:
        """What statistics depend on and a user can change."""
        return Setting(
            num_proc=self.num_proc,
            num_prefetch=window,
            ordered=bool(self.ordered),
            is_async=is_async,
            transfers=self.transfer is not None,
            shared=self.pool is not None,
        )

    def window_bytes(self, memory: int) -> int:
        """Bytes requested and not delivered, at most, of so many that there are."""
        return memory // _SHARE if self.max_bytes is None else self.max_bytes

    def window(self, split: Split | None, *, is_async: bool) -> int:
        """Batches requested and not delivered, at most."""
        if self.num_prefetch is not None:
            return self.num_prefetch
        workers = max(1, self.num_proc)
        room = 4 * workers
        if is_async:
            room = max(room, -(-2 * self.concurrency * workers // (self.batch_size or 1)))
        if not self.is_batched and split in (None, "shard"):
            room = max(room, _MANY_ITEMS)
        return room


def describe_iterable(value: Any) -> str | None:
    """How it is iterated, or None when it is not."""
    for method in ("__aiter__", "__iter__"):
        if getattr(type(value), method, None) is not None:
            return method
    return None


def keys_length(config: Config, length: int | None) -> int | None:
    """How many keys an epoch has, or batches where a batch sampler makes them."""
    keys = config.batch_sampler if config.batch_sampler is not None else config.sampler
    return length if keys is None else length_of(keys)


def check_seconds(name: str, value: Any, *, positive: bool = False) -> None:
    """Raise ValueError where an argument is no time."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and value >= 0) or (positive and value == 0):
        least = "more than 0, or None" if positive else "0 or more"
        raise ValueError(f"{name} must be seconds, {least}, not {value!r}")


def check_function(name: str, value: Any) -> None:
    """Raise TypeError where an argument is no function."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, not {value!r}")


def _given(value: Any) -> bool:
    return value is not None and value is not False


def check_number(name: str, value: Any, least: int) -> None:
    """Raise TypeError or ValueError where an argument is no whole number, or too small."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if number < least:
        raise ValueError(f"{name} must be {least} or more, not {value!r}")
