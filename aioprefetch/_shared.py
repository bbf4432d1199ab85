"""Many small objects in one buffer, so that workers share them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import cloudpickle
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class SharedList(Sequence[T]):
    """A read-only list whose items lie pickled in one buffer, and are made anew on access.

    A list of many small Python objects is sent to each worker object by object, and each
    worker has a copy of its own: reading an object writes its reference count, so that not
    even forked workers share its page for long. The buffer of a SharedList is sent once and
    shared by all, at the price of unpickling an item each time it is read.

    Parameters
    ----------
    items
        Objects that can be pickled.
    """

    def __init__(self, items: Iterable[T]) -> None:
        data = bytearray()
        ends = []
        for item in items:
            data += _dumps(item)
            ends.append(len(data))
        self._data: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        self._ends = np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """An item, or a list of those in a slice. Raises IndexError."""
        if isinstance(index, slice):
            return [self._item(at) for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"index {index} of a SharedList of {len(self)} items")
        return self._item(at)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._data.nbytes + self._ends.nbytes

    def _item(self, at: int) -> T:
        start = int(self._ends[at - 1]) if at else 0
        item: T = pickle.loads(self._data.data[start : int(self._ends[at])])
        return item

    def __repr__(self) -> str:
        return f"<SharedList of {len(self)} items, {self.nbytes} bytes>"


def _dumps(item: Any) -> bytes:
    try:
        data = pickle.dumps(item, protocol=5)
    except Exception:
        data = b"__main__"
    # What __main__ defines is another module's in a worker, so it travels by value.
    return data if b"__main__" not in data else bytes(cloudpickle.dumps(item, protocol=5))
