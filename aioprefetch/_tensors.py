"""torch's tensors as the arrays that they lie in: how they travel and where they are stacked.

Nothing here imports torch where it is not: a tensor cannot exist there. What a tensor is
rebuilt from is an array over the same memory, so that it goes wherever arrays go.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

# For dtypes that numpy has not: an integer of their size.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def tensor_type() -> Any:
    """torch's tensor class where torch is imported, else a type that nothing has."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


def reducers() -> dict[Any, Callable[[Any], Any]]:
    """What a pickler is to reduce in a way of its own, where torch is imported."""
    return {tensor_type(): _reduce}


def _reduce(tensor: Any) -> Any:
    if not _lies_in_memory(tensor):
        return tensor.__reduce_ex__(5)
    # What was computed comes as its values: the graph that it is part of stays.
    wants_grad = tensor.requires_grad and tensor.is_leaf
    array, dtype = _as_array(tensor.detach())
    return _rebuild, (array, dtype, wants_grad)


def _lies_in_memory(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _as_array(tensor: Any) -> tuple[NDArray[Any], str | None]:
    """An array over its memory, and its dtype where numpy has none like it."""
    torch: Any = sys.modules["torch"]
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:
        bits = getattr(torch, _BITS[tensor.element_size()])
        return tensor.view(bits).numpy(), str(tensor.dtype).removeprefix("torch.")


def _rebuild(array: NDArray[Any], dtype: str | None, wants_grad: bool) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    if dtype is not None:
        tensor = tensor.view(getattr(torch, dtype))
    return tensor.requires_grad_() if wants_grad else tensor


def can_stack(tensors: Sequence[Any]) -> bool:
    """Whether they are of one dtype and shape, in this process's memory."""
    first = tensors[0]
    return all(
        _lies_in_memory(tensor) and tensor.dtype == first.dtype and tensor.shape == first.shape
        for tensor in tensors
    )


def stack(tensors: Sequence[Any], empty: Callable[..., NDArray[Any]]) -> Any:
    """Tensors that `can_stack`, along a new first dimension, in an array that ``empty`` makes."""
    torch: Any = sys.modules["torch"]
    first = tensors[0]
    sample, dtype = _as_array(first.detach().flatten()[:0])
    array = empty((len(tensors), *first.shape), sample.dtype)
    batch = _rebuild(array, dtype, False)
    with torch.no_grad():
        return torch.stack(list(tensors), out=batch)
