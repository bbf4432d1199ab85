"""torch at the edge: tensors over the memory that batches come in, and what DataLoader is given.

    from aioprefetch.torch import collate, from_dataloader, to

Tensors in batches need none of this: they travel as arrays do, without a copy, and the default
collate stacks them into memory that is shared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data._utils.collate import collate as _collate_by
from torch.utils.data._utils.collate import default_collate_fn_map

from ._collate import allocate
from ._prefetcher import Prefetcher
from ._tensors import can_stack, stack

__all__ = ["collate", "from_dataloader", "to"]


# Collate


def collate(batch: Sequence[Any]) -> Any:
    """What torch's ``default_collate`` makes of a batch, at one copy.

    Arrays and numbers become tensors by torch's rules. In a worker process tensors and arrays
    are stacked into the memory that the batch is delivered in. For ``collate_fn=``.

    Raises
    ------
    TypeError, RuntimeError
        As ``default_collate`` does.
    """
    return _collate_by(batch, collate_fn_map=_RULES)


def _collate_tensors(
    tensors: Sequence[torch.Tensor], *, collate_fn_map: Mapping[Any, Any] | None = None
) -> Any:
    if type(tensors[0]) is torch.Tensor and can_stack(tensors):
        return stack(tensors, allocate.get())
    return default_collate_fn_map[torch.Tensor](tensors, collate_fn_map=collate_fn_map)


_RULES = {**default_collate_fn_map, torch.Tensor: _collate_tensors}


# Transfer


class to:
    """Takes batches to a device; for ``transfer=``.

    ``Prefetcher(..., transfer=to("cuda", pin_memory=True))`` gives each batch with its tensors
    on the GPU, the next one being copied while one is used.

    Parameters
    ----------
    device
        Where tensors go, and whatever else has a method ``to``; None leaves them where they are.
    pin_memory
        Copy each tensor to page-locked memory first, from which a GPU copies faster; without
        an accelerator there is none, and nothing happens.

    Notes
    -----
    Tensors are found in mappings, sequences, namedtuples and dataclasses; everything else stays
    as it is. On a GPU the copies are done on a stream of their own, and are over when the batch
    is handed over: it may be used on any stream.
    """

    def __init__(
        self, device: str | torch.device | int | None, *, pin_memory: bool = False
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._pins = pin_memory and torch.accelerator.is_available()
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Any) -> Any:
        """The batch, there."""
        if self._device is None or self._device.type != "cuda":
            return _mapped(self._moved, batch)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = _mapped(self._moved, batch)
        # This thread waits, and nobody else: then the batch is there for every stream, and the
        # memory that it was copied from may be used again.
        self._stream.synchronize()
        return moved

    def _moved(self, value: Any) -> Any:
        if self._pins and isinstance(value, torch.Tensor) and value.device.type == "cpu":
            value = value.pin_memory()
        return value if self._device is None else value.to(self._device, non_blocking=True)


def _mapped(move: Callable[[Any], Any], value: Any) -> Any:
    """The same object with its tensors moved."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, Mapping):
        return _rebuilt(value, {key: _mapped(move, part) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(move, part) for part in value))
    if isinstance(value, (list, tuple)):
        return _rebuilt(value, [_mapped(move, part) for part in value])
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: _mapped(move, getattr(value, name)) for name in names})
    if callable(getattr(value, "to", None)):
        return move(value)
    return value


def _rebuilt(value: Any, parts: Any) -> Any:
    try:
        return type(value)(parts)
    except TypeError:  # a type with a signature of its own
        return parts


# DataLoader


def from_dataloader(loader: DataLoader[Any], **overrides: Any) -> Prefetcher:
    """A Prefetcher for what a DataLoader was configured to do.

    Batches are those that the loader gives: the same keys in the same order, from the same
    generator, collated by the same rules. Random numbers that a dataset draws are others, since
    they are seeded by item, and the same for any number of workers.

    Parameters
    ----------
    loader
        It is only looked at.
    **overrides
        Arguments of Prefetcher that win over what the loader says: ``sampler=None,
        shuffle=True`` takes an order that can be resumed at no cost instead of torch's.

    Warns
    -----
    UserWarning
        The loader has a ``timeout``, which has no equal here.
    """
    arguments = {
        "source": loader.dataset,
        "num_proc": loader.num_workers,
        "collate_fn": _collate_fn(loader),
        "worker_init_fn": loader.worker_init_fn if loader.num_workers else None,
        "mp_context": loader.multiprocessing_context if loader.num_workers else None,
        "ordered": getattr(loader, "in_order", True),
        "transfer": to(None, pin_memory=True) if loader.pin_memory else None,
        **_batching(loader),
    }
    if loader.num_workers and loader.prefetch_factor is not None:
        arguments["num_prefetch"] = loader.prefetch_factor * loader.num_workers
    if loader.generator is not None:
        arguments["seed"] = loader.generator.initial_seed() % 2**64
    if loader.timeout:
        warnings.warn(
            f"the DataLoader's timeout={loader.timeout} is not carried over: put asyncio.timeout() "
            "around anext(), or give task_timeout, which ends a worker that is stuck",
            UserWarning,
            stacklevel=2,
        )
    arguments.update(overrides)
    return Prefetcher(arguments.pop("source"), **arguments)


def _collate_fn(loader: DataLoader[Any]) -> Any:
    if loader.collate_fn is default_collate:
        return collate
    return loader.collate_fn


def _batching(loader: DataLoader[Any]) -> dict[str, Any]:
    if isinstance(loader.dataset, IterableDataset):
        return {
            "split": "worker",
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
        }
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": _carried(loader.batch_sampler, loader)}
    arguments = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if type(loader.sampler) is not SequentialSampler:
        arguments["sampler"] = _carried(loader.sampler, loader)
    return arguments


def _carried(sampler: Any, loader: DataLoader[Any]) -> Any:
    drawing = sampler.sampler if type(sampler) is BatchSampler else sampler
    if type(drawing) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler):
        return _AsInDataLoader(sampler, loader.generator)
    return sampler


class _AsInDataLoader:
    """A sampler that draws from a generator when a DataLoader would have it do so."""

    def __init__(self, sampler: Any, generator: torch.Generator | None) -> None:
        self._sampler = sampler
        self._generator = generator

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # A loader takes a number for its workers' seeds first.
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return iter(self._sampler)
