"""torch at the edge: tensors over the memory that batches come in, and what DataLoader is given.

    from aioprefetch.torch import collate, from_dataloader, to

Tensors in batches need none of this: they travel as arrays do, without a copy, and the default
collate stacks them into memory that is shared.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import collate as _collate_by
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from ._collate import allocate, rebuilt_mapping, rebuilt_sequence
from ._source import is_torch_s
from ._tensors import can_stack, stack

if TYPE_CHECKING:
    from ._prefetcher import Prefetcher

__all__ = ["collate", "from_dataloader", "to"]


# Collate


def collate(batch: Sequence[Any]) -> Any:
    """What torch's ``default_collate`` makes of a batch, at one copy.

    For ``collate_fn=``, or for a function of yours to begin with. Arrays and numbers become
    tensors by torch's rules. In a worker process tensors and arrays are stacked into the memory
    that the batch is delivered in: it is written anew later, so a function of yours that wants
    to keep a part of it has to copy that. Tensors that require a gradient are stacked by their
    values.

    Raises
    ------
    TypeError, RuntimeError
        As ``default_collate`` does.
    """
    rules = dict(default_collate_fn_map)  # looked up now: users of torch add to them
    if rules[torch.Tensor] is collate_tensor_fn:
        rules[torch.Tensor] = _collate_tensors
    return _collate_by(batch, collate_fn_map=rules)


def _collate_tensors(
    tensors: Sequence[torch.Tensor], *, collate_fn_map: Mapping[Any, Any] | None = None
) -> Any:
    if can_stack(tensors):
        return stack(tensors, allocate.get())
    return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)


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
        Copy to page-locked memory first, from which a GPU copies faster; where there is no CUDA
        there is none, and nothing happens.

    Notes
    -----
    Tensors are found in mappings, sequences and dataclasses, named tuples among them. A part in
    which nothing moves is not made anew: on the CPU a batch is handed over as it is.

    On a GPU the copies are done on a stream of their own, beside what is computed meanwhile, and
    are over when the batch is handed over. It may be used on the device's default stream, and
    dropped at any time; whoever uses it on another tells the allocator so, by the tensor's
    ``record_stream``.
    """

    def __init__(
        self, device: str | torch.device | int | None, *, pin_memory: bool = False
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._pins = pin_memory and torch.cuda.is_available()
        self._side: torch.cuda.Stream | None = None

    def __call__(self, batch: Any) -> Any:
        """The batch, there."""
        if self._device is None or self._device.type != "cuda":
            return self._mapped(batch)
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._side):
            moved = self._mapped(batch)
        # This thread waits, and nobody else: then the batch is there for every stream, and the
        # memory that it was copied from may be written again.
        self._side.synchronize()
        return moved

    def _moved(self, value: Any) -> Any:
        if self._pins and hasattr(value, "pin_memory") and not _is_on_gpu(value):
            value = value.pin_memory()
        if self._device is None:
            return value
        if self._side is None:  # nobody would wait for a copy that is not over
            return value.to(self._device)
        default = torch.cuda.default_stream(self._device)
        if not isinstance(value, torch.Tensor):  # what it consists of is its own affair
            with torch.cuda.stream(default):
                return value.to(self._device)
        value = value.to(self._device, non_blocking=True)
        # Its memory is the side stream's. Dropped, it must not be given to the next batch while
        # work that uses it is still waiting on the stream that it was used on.
        value.record_stream(default)
        return value

    # The same with its tensors moved; the very same, when none was

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, type | str | bytes | bytearray):
            return value
        if callable(getattr(value, "pin_memory" if self._device is None else "to", None)):
            return self._moved(value)
        if isinstance(value, Mapping):
            parts = {key: self._mapped(part) for key, part in value.items()}
            moved = any(parts[key] is not part for key, part in value.items())
            return rebuilt_mapping(value, parts) if moved else value
        if isinstance(value, Sequence):
            return self._mapped_sequence(value)
        if is_dataclass(value):
            return self._mapped_fields(value)
        return value

    def _mapped_sequence(self, value: Any) -> Any:
        parts = [self._mapped(part) for part in value]
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)._make(parts)
        if isinstance(value, tuple):
            return rebuilt_sequence(value, tuple(parts), tuple)
        return rebuilt_sequence(value, parts, list)

    def _mapped_fields(self, value: Any) -> Any:
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        moved = {name: self._mapped(part) for name, part in parts.items()}
        if all(moved[name] is part for name, part in parts.items()):
            return value
        made = copy.copy(value)  # its __init__ has seen this batch
        for name, part in moved.items():
            object.__setattr__(made, name, part)
        return made


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


# DataLoader


def from_dataloader(loader: DataLoader[Any], **overrides: Any) -> Prefetcher:
    """A Prefetcher for what a DataLoader was configured to do.

    Batches are those that the loader gives: the same keys in the same order, from the same
    generator, collated by the same rules. Random numbers that a dataset draws are others, since
    they are seeded by item, and the same for any number of workers. They depend on the initial
    seed of the loader's generator, else on ``torch.initial_seed()``, that is on
    ``torch.manual_seed``.

    Parameters
    ----------
    loader
        It is only looked at. Its generator and samplers are used, as the loader would use them.
    **overrides
        Arguments of Prefetcher that win over what the loader says: ``shuffle=True`` takes an
        order that can be resumed at no cost in place of torch's sampler.

    Raises
    ------
    ValueError
        The loader reads an IterDataPipe, which DataLoader itself divides and shuffles.

    Warns
    -----
    UserWarning
        The loader has a ``timeout``, which has no equal here.
    """
    from ._prefetcher import Prefetcher  # workers import this module for its collate

    _refuse_datapipes(loader)
    _warn_of_timeout(loader)
    arguments: dict[str, Any] = {
        "source": loader.dataset,
        "collate_fn": collate if loader.collate_fn is default_collate else loader.collate_fn,
        "ordered": getattr(loader, "in_order", True),  # which torch has had since 2.6
        "transfer": to(None, pin_memory=True) if loader.pin_memory else None,
        "seed": (loader.generator or torch.default_generator).initial_seed() % 2**64,
        **_workers(loader, overrides.get("num_proc", loader.num_workers)),
        **_batching(loader),
    }
    for name in overrides:
        for other in _REPLACED_BY.get(name, ()) if overrides[name] else ():
            arguments.pop(other, None)
    arguments.update(overrides)
    if "collate_fn" not in overrides:
        _collate_as_batched(loader, arguments)
    return Prefetcher(arguments.pop("source"), **arguments)


# What an argument says that another has said.
_REPLACED_BY = {
    "shuffle": ("sampler",),
    "batch_sampler": ("batch_size", "drop_last", "sampler"),
}


def _refuse_datapipes(loader: DataLoader[Any]) -> None:
    if is_torch_s(type(loader.dataset), "IterDataPipe"):
        raise ValueError(
            "the DataLoader reads an IterDataPipe, which it divides among its workers and shuffles "
            "itself. Use Prefetcher(datapipe, split='parent', batch_size=...), which reads it in "
            "this process; what is costly belongs in map_fn then, which workers run"
        )


def _warn_of_timeout(loader: DataLoader[Any]) -> None:
    if loader.timeout:
        warnings.warn(
            f"the DataLoader's timeout={loader.timeout} is not carried over: put asyncio.timeout() "
            "around anext(), or give task_timeout, which ends a worker that is stuck",
            UserWarning,
            stacklevel=3,
        )


def _workers(loader: DataLoader[Any], num_proc: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"num_proc": num_proc}
    if num_proc:
        arguments["mp_context"] = loader.multiprocessing_context
    if loader.num_workers:  # without workers a loader has no use for them
        arguments["worker_init_fn"] = loader.worker_init_fn
        arguments["num_prefetch"] = loader.prefetch_factor * max(1, num_proc)
    return arguments


def _batching(loader: DataLoader[Any]) -> dict[str, Any]:
    arguments = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(loader.dataset, IterableDataset):
        return {"split": "worker", **arguments}
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": _drawing(loader.batch_sampler, loader)}
    sampler = loader.sampler
    if type(sampler) is SequentialSampler and sampler.data_source is loader.dataset:
        return arguments
    return {"sampler": _drawing(sampler, loader), **arguments}


def _collate_as_batched(loader: DataLoader[Any], arguments: dict[str, Any]) -> None:
    """When items are batched that were not, or the reverse: as torch would then by default."""
    batched = any(arguments.get(name) is not None for name in ("batch_size", "batch_sampler"))
    if batched is (loader.batch_sampler is not None):
        return
    if loader.collate_fn in (default_collate, default_convert):
        arguments["collate_fn"] = collate if batched else default_convert
    if not batched:
        arguments.pop("drop_last", None)


def _drawing(sampler: Any, loader: DataLoader[Any]) -> Any:
    if not isinstance(sampler, Sampler):
        return sampler
    return _AsInDataLoader(sampler, loader.generator, at_once=loader.batch_size is None)


class _AsInDataLoader:
    """A sampler of torch's that finds its generator where a DataLoader would have left it.

    Parameters
    ----------
    at_once
        Whether a loader begins to iterate it before it draws what its workers' seeds are made
        of, as it does unless it makes batches of the sampler's keys.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None, *, at_once: bool) -> None:
        self._sampler = sampler
        self._generator = generator
        self._at_once = at_once

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        keys: Iterator[Any] | None = iter(self._sampler) if self._at_once else None
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return iter(self._sampler) if keys is None else keys

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)  # its set_epoch, its state
