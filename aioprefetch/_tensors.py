"""torch's tensors as the arrays that they lie in: how they travel and where they are stacked.

Nothing here imports torch where it is not: a tensor cannot exist there. What a tensor is
rebuilt from is an array over the same memory, so that it goes wherever arrays go.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

# For dtypes that numpy has not: an integer of their size.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

_Axes = tuple[int, ...]


def tensor_type() -> Any:
    """torch's tensor class where torch is imported, else a type that nothing has."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


# Travelling


def reducers(known: Mapping[Any, Any] = copyreg.dispatch_table) -> dict[Any, Callable[[Any], Any]]:
    """What a pickler knows to reduce, and tensors; where torch is imported."""
    # A plain dict: a pickler asks it about every object that it meets.
    return {**known, tensor_type(): _reduce}


def _reduce(tensor: Any) -> Any:
    if not _lies_in_memory(tensor) or vars(tensor):  # what the user has set on it
        return tensor.__reduce_ex__(5)
    # What was computed comes as its values: the graph that it is part of stays.
    wants_grad = tensor.requires_grad and tensor.is_leaf
    values, axes = _outermost_first(tensor.detach())
    array, dtype = _as_array(values)
    return _rebuild, (array, dtype, axes, wants_grad)


def _rebuild(array: NDArray[Any], dtype: str | None, axes: _Axes | None, wants_grad: bool) -> Any:
    tensor = _over(array, dtype)
    if axes is not None:
        tensor = tensor.permute(sorted(range(len(axes)), key=axes.__getitem__))
    return tensor.requires_grad_() if wants_grad else tensor


def _outermost_first(tensor: Any) -> tuple[Any, _Axes | None]:
    """The same values contiguous, and the order that the axes were brought into for that."""
    if not tensor.is_contiguous():
        strides = tensor.stride()
        axes = tuple(sorted(range(tensor.ndim), key=lambda axis: -strides[axis]))
        ordered = tensor.permute(axes)
        if ordered.is_contiguous():  # transposed, or with its channels last
            return ordered, axes
    return tensor.contiguous(), None


def _lies_in_memory(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _as_array(tensor: Any) -> tuple[NDArray[Any], str | None]:
    """An array over its memory, and its dtype where numpy has none like it."""
    torch: Any = sys.modules["torch"]
    try:
        return tensor.numpy(), None
    except TypeError:
        bits = getattr(torch, _BITS[tensor.element_size()])
        return tensor.view(bits).numpy(), str(tensor.dtype).removeprefix("torch.")


def _over(array: NDArray[Any], dtype: str | None) -> Any:
    """The tensor over an array's memory."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


# Stacking


def can_stack(tensors: Sequence[Any]) -> bool:
    """Whether they are of one dtype and shape, in this process's memory."""
    first = tensors[0]
    if not _lies_in_memory(first):
        return False
    torch: Any = sys.modules["torch"]
    # Subclasses may have no memory of this kind, and stack in a way of their own.
    kinds, dtype, shape = (torch.Tensor, torch.nn.Parameter), first.dtype, first.shape
    return all(
        type(tensor) in kinds
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dtype is dtype
        and tensor.shape == shape
        for tensor in tensors
    )


def stack(tensors: Sequence[Any], empty: Callable[..., NDArray[Any]]) -> Any:
    """Tensors that `can_stack`, along a new first dimension, in an array that ``empty`` makes.

    The graphs of tensors that require a gradient stay behind.
    """
    torch: Any = sys.modules["torch"]
    first = tensors[0]
    sample, dtype = _as_array(torch.empty(0, dtype=first.dtype))
    batch = _over(empty((len(tensors), *first.shape), sample.dtype), dtype)
    with torch.no_grad():
        return torch.stack(list(tensors), out=batch)
