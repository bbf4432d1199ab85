"""Items to a batch.

The first item decides what a column is; every other item must agree, and the error that says
otherwise names the path (``item['image'][0]``), the position in the batch, and the way out.
Nothing is promoted or dropped in silence: one dtype, one shape, one set of keys a column.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._tensors import can_stack, stack, tensor_type

# Where the arrays of a batch are made: a worker process has them in memory it shares.
allocate: ContextVar[Callable[..., NDArray[Any]]] = ContextVar("allocate", default=np.empty)

_Items: TypeAlias = list[Any]
_Collate: TypeAlias = Callable[[_Items, str], Any]

_TEXT = (str, bytes, bytearray)
# bool before int, whose subclass it is.
_PYTHON_DTYPES: tuple[tuple[type, np.dtype[Any]], ...] = (
    (bool, np.dtype(np.bool_)),
    (int, np.dtype(np.int64)),
    (float, np.dtype(np.float64)),
    (complex, np.dtype(np.complex128)),
)
# Their meaning is not in the plain array that a batch would make of them.
_REFUSED_ARRAYS = (np.matrix, np.ma.MaskedArray)


def default_collate(items: Sequence[Any]) -> Any:
    """Make a batch of items, by the type of the first.

    ============================ ====================================================
    items                        batch
    ============================ ====================================================
    numpy array                  one array, stacked along a new first axis
    numpy scalar                 array of its dtype
    bool, int, float, complex    array of bool, int64, float64, complex128
    str, bytes, bytearray        list, unchanged
    mapping                      the same type, each value collated
    namedtuple, dataclass        the same class, each field collated
    tuple                        tuple, each element collated
    other sequence               the same type, each element collated
    torch tensor                 one tensor, stacked along a new first dimension
    ============================ ====================================================

    Arrays keep their dtype exactly, byte order and structure included; those of fixed-width text
    (``str_``, ``bytes_``) are stacked when their widths agree. Subclasses such as ``memmap`` become
    plain arrays. A mapping or sequence whose type cannot be built from collated values becomes a
    dict, tuple or list. A dataclass is built anew from its init fields, so its ``__post_init__``
    sees batches.

    Parameters
    ----------
    items
        The items of one batch, at least one.

    Returns
    -------
    Any
        The batch, which shares no memory with arrays among the items.

    Raises
    ------
    TypeError
        If items differ in type or dtype, or have a type that has no batch: ``None``, arrays of
        objects or of ``StringDType``, masked arrays and matrices among them.
    ValueError
        If items differ in shape, length or keys, if an int does not fit int64, or if there are no
        items.
    """
    if len(items) == 0:
        raise ValueError("a batch needs at least one item")
    return _collate(list(items), "item")


def _collate(items: _Items, path: str) -> Any:
    return _rule(items[0], path)(items, path)


def _rule(first: Any, path: str) -> _Collate:
    for kind, rule in _RULES:
        if isinstance(first, kind):
            return rule
    if is_dataclass(first) and not isinstance(first, type):
        return _collate_dataclass
    if isinstance(first, tensor_type()):
        return _stack_tensors
    raise _no_batch(first, path, 0)


# Leaves


def _stack(arrays: list[NDArray[Any]], path: str) -> NDArray[Any]:
    arrays = _plain(arrays, path)
    _check_arrays(arrays, path)
    first = arrays[0]
    # np.stack would choose the native byte order; an output given keeps the dtype.
    out = allocate.get()((len(arrays), *first.shape), first.dtype)
    if first.ndim == 0:
        return np.stack(arrays, out=out)
    # Joined along their first axis they lie as if stacked, without np.stack's view of each.
    np.concatenate(arrays, out=out.reshape(len(arrays) * first.shape[0], *first.shape[1:]))
    return out


def _plain(arrays: list[NDArray[Any]], path: str) -> list[NDArray[Any]]:
    if set(map(type, arrays)) == {np.ndarray}:
        return arrays
    _check_kind(arrays, np.ndarray, path)
    for position, array in enumerate(arrays):
        if isinstance(array, _REFUSED_ARRAYS):
            raise _no_batch(array, path, position)
    return [np.asarray(array) for array in arrays]


def _check_arrays(arrays: list[NDArray[Any]], path: str) -> None:
    shape, dtype = arrays[0].shape, arrays[0].dtype
    _check_storable(dtype, path)
    for position, array in enumerate(arrays):
        if array.shape != shape:
            raise _shapes_differ(arrays, position, path)
        if array.dtype is not dtype and array.dtype != dtype:
            raise _types_differ(arrays, position, path)


def _check_storable(dtype: np.dtype[Any], path: str) -> None:
    if dtype.hasobject:
        raise TypeError(
            f"{path}: arrays of {dtype} hold references to Python objects and cannot be stacked; "
            f"give collate_fn=..., or return a list or an array of another dtype"
        )


def _collate_scalars(items: _Items, path: str) -> NDArray[Any]:
    dtype = _scalar_dtype(items[0])
    assert dtype is not None
    _check_storable(dtype, path)
    # A numpy type may stand for many dtypes (void, datetime64), a Python type for one.
    if isinstance(items[0], np.generic) or len(set(map(type, items))) > 1:
        _check_scalars(items, dtype, path)
    try:
        return np.array(items, dtype)
    except OverflowError:
        raise _too_large(items, path) from None


def _check_scalars(items: _Items, dtype: np.dtype[Any], path: str) -> None:
    for position, item in enumerate(items):
        if _scalar_dtype(item) != dtype:
            raise _types_differ(items, position, path)


def _scalar_dtype(item: Any) -> np.dtype[Any] | None:
    if isinstance(item, np.generic):
        return item.dtype
    return next((dtype for kind, dtype in _PYTHON_DTYPES if isinstance(item, kind)), None)


def _collate_text(items: _Items, path: str) -> _Items:
    kind = next(kind for kind in _TEXT if isinstance(items[0], kind))
    _check_kind(items, kind, path)
    return items


def _stack_tensors(tensors: _Items, path: str) -> Any:
    torch = sys.modules["torch"]
    _check_kind(tensors, tensor_type(), path)
    if can_stack(tensors):
        return stack(tensors, allocate.get())
    first = tensors[0]
    for position, tensor in enumerate(tensors):
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise _no_batch(tensor, path, position)
        if tensor.dtype != first.dtype:
            raise _types_differ(tensors, position, path)
        if tensor.shape != first.shape:
            raise _shapes_differ(tensors, position, path)
    return torch.stack(tensors)


# Containers


def _collate_mapping(items: _Items, path: str) -> Mapping[Any, Any]:
    _check_kind(items, Mapping, path)
    _check_keys(items, path)
    columns = {key: _collate([item[key] for item in items], f"{path}[{key!r}]") for key in items[0]}
    if type(items[0]) is dict:
        return columns
    return rebuilt_mapping(items[0], columns)


def _collate_tuple(items: _Items, path: str) -> Any:
    _check_kind(items, type(items[0]), path)
    names = getattr(items[0], "_fields", None)
    if names is None:
        return rebuilt_sequence(items[0], tuple(_columns(items, path)), tuple)
    columns = zip(names, zip(*items, strict=True), strict=True)
    batch = [_collate(list(column), f"{path}.{name}") for name, column in columns]
    return type(items[0])._make(batch)


def _collate_sequence(items: _Items, path: str) -> Any:
    _check_kind(items, Sequence, path)
    return rebuilt_sequence(items[0], _columns(items, path), list)


def _columns(items: _Items, path: str) -> list[Any]:
    _check_lengths(items, path)
    columns = zip(*items, strict=True)
    return [_collate(list(column), f"{path}[{index}]") for index, column in enumerate(columns)]


def _collate_dataclass(items: _Items, path: str) -> Any:
    _check_kind(items, type(items[0]), path)
    names = [field.name for field in fields(items[0]) if field.init]
    columns = {
        name: _collate([getattr(item, name) for item in items], f"{path}.{name}") for name in names
    }
    try:
        return replace(items[0], **columns)
    except Exception as error:
        raise TypeError(
            f"{path}: {_name(items[0])} cannot be built from collated fields ({error}); "
            f"give collate_fn=..., or return a dict from every item"
        ) from error


# isinstance of an abstract class is slow, so the common and concrete come first. Text is a
# sequence and numpy's text scalars are text, so text comes before both.
_RULES: tuple[tuple[type | tuple[type, ...], _Collate], ...] = (
    (np.ndarray, _stack),
    (_TEXT, _collate_text),
    ((bool, int, float, complex, np.generic), _collate_scalars),
    (tuple, _collate_tuple),
    (Mapping, _collate_mapping),
    (Sequence, _collate_sequence),
)


# Rebuilding: a copy filled anew keeps what the type holds besides its values (a default factory, a
# maximal length). Where a copy might share its storage with the item, filling it would change the
# dataset, so the type is called instead. A type that refuses the values, or changes them, is
# given up.


def rebuilt_mapping(first: Mapping[Any, Any], columns: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        batch = _rebuilt(first, columns, columns.items())
        kept = all(batch[key] is value for key, value in columns.items())
    except Exception:
        return columns
    return batch if kept else columns


def rebuilt_sequence(first: Any, columns: Any, plain: type) -> Any:
    if type(first) is plain:
        return columns
    try:
        batch = _rebuilt(first, columns, enumerate(columns))
        kept = all(value is column for value, column in zip(batch, columns, strict=True))
    except Exception:
        return columns
    return batch if kept else columns


def _rebuilt(first: Any, columns: Any, pairs: Iterable[tuple[Any, Any]]) -> Any:
    if not _copies_storage(first):
        return type(first)(columns)
    batch = copy.copy(first)
    for key, value in pairs:
        batch[key] = value
    return batch


def _copies_storage(container: Any) -> bool:
    return isinstance(container, dict | list) or (
        isinstance(container, MutableMapping | MutableSequence) and hasattr(container, "__copy__")
    )


# Agreement and errors


def _check_kind(items: _Items, kind: type, path: str) -> None:
    for position, item in enumerate(items):
        if not isinstance(item, kind):
            raise _types_differ(items, position, path)


def _check_keys(items: _Items, path: str) -> None:
    keys = items[0].keys()
    for position, item in enumerate(items):
        if item.keys() != keys:
            raise _keys_differ(keys, item.keys(), position, path)


def _check_lengths(items: _Items, path: str) -> None:
    length = len(items[0])
    for position, item in enumerate(items):
        if len(item) != length:
            raise ValueError(
                f"{path}: length {len(item)} at position {position} of the batch, "
                f"length {length} at position 0; "
                f"give collate_fn=..., or pad or cut to one length in map_fn"
            )


def _keys_differ(keys: Any, other: Any, position: int, path: str) -> ValueError:
    missing = [key for key in keys if key not in other]
    key = (missing or [key for key in other if key not in keys])[0]
    has, lacks = (0, position) if missing else (position, 0)
    return ValueError(
        f"{path}: key {key!r} is missing at position {lacks} of the batch, "
        f"present at position {has}; give collate_fn=..., or return the same keys from every item"
    )


def _types_differ(items: _Items, position: int, path: str) -> TypeError:
    if items[position] is None:
        return _no_batch(None, path, position)
    return TypeError(
        f"{path}: {_name(items[position])} at position {position} of the batch, "
        f"{_name(items[0])} at position 0; "
        f"give collate_fn=..., or convert to one type in map_fn"
    )


def _shapes_differ(items: _Items, position: int, path: str) -> ValueError:
    return ValueError(
        f"{path}: shape {tuple(items[position].shape)} at position {position} of the batch, "
        f"shape {tuple(items[0].shape)} at position 0; "
        f"give collate_fn=..., or pad, crop or resize to one shape in map_fn"
    )


def _no_batch(item: Any, path: str, position: int) -> TypeError:
    remedy = "put a value in its place" if item is None else "convert it"
    return TypeError(
        f"{path}: {_name(item)} at position {position} of the batch cannot be collated; "
        f"give collate_fn=..., or {remedy} in map_fn"
    )


def _too_large(items: _Items, path: str) -> ValueError:
    position = next(i for i, item in enumerate(items) if not -(2**63) <= item < 2**63)
    return ValueError(
        f"{path}: the int at position {position} of the batch does not fit int64; "
        f"give collate_fn=..., or return it as text, float or numpy.uint64"
    )


def _name(item: Any) -> str:
    kind = type(item)
    if item is None:
        return "None"
    if isinstance(item, np.generic):
        return f"scalar of {item.dtype}"
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return f"{name} of {item.dtype}" if isinstance(item, (np.ndarray, tensor_type())) else name
