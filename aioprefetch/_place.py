"""Where the running function of the user's stands: what `rng` and `worker_info` tell it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class WorkerInfo:
    """Where the running function stands.

    Attributes
    ----------
    id
        Number of the worker, from 0; in a stream, number of the stream.
    num_proc
        How many workers there are; in a stream, how many streams.
    seed
        The run's seed.
    epoch
        Epoch of the item or batch being made, 0 before the first.
    position
        Its place in the epoch's plan (in a stream, in the stream), -1 outside of one.
    source
        This worker's copy of the source.
    state
        What ``worker_init_fn`` returned.
    """

    id: int
    num_proc: int
    seed: int
    epoch: int
    position: int
    source: Any
    state: Any

    @property
    def dataset(self) -> Any:
        """The source, by DataLoader's name for it."""
        return self.source


class Place:
    """A place in the plan; its generator and its `WorkerInfo` are made when asked for."""

    __slots__ = ("_base", "_epoch", "_generator", "_key", "_position")

    def __init__(self, base: WorkerInfo, epoch: int, position: int, key: int) -> None:
        self._base = base
        self._epoch = epoch
        self._position = position
        self._key = key
        self._generator: np.random.Generator | None = None

    @property
    def info(self) -> WorkerInfo:
        return replace(self._base, epoch=self._epoch, position=self._position)

    @property
    def generator(self) -> np.random.Generator:
        if self._generator is None:
            self._generator = np.random.Generator(np.random.PCG64(self._key))
        return self._generator


current: ContextVar[Place] = ContextVar("aioprefetch.place")


def worker_info() -> WorkerInfo | None:
    """Where the running function stands, or None outside of a worker."""
    place = current.get(None)
    return None if place is None else place.info


def rng() -> np.random.Generator:
    """The random generator of the item, or in ``collate_fn`` of the batch, being made.

    It depends on the seed, the epoch and the place in the plan alone: neither on the worker
    nor on ``num_proc``. ``__getitem__`` and ``map_fn`` of one item get the same generator.

    Raises
    ------
    RuntimeError
        Outside of a function that a Prefetcher is calling.
    """
    place = current.get(None)
    if place is None:
        raise RuntimeError(
            "rng() has a value only inside the functions that a Prefetcher calls for an item or "
            "a batch: __getitem__, __iter__ in a worker, map_fn, collate_fn, on_error"
        )
    return place.generator
