"""A running digest of items, by which a stream that is read again is known to repeat itself.

It looks at types, numbers, texts and shapes, and at samples of what is large: enough to tell
another item or another order, at a cost that does not grow with the data. It does not depend
on the process, as a pickle or a hash of the same object may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import numpy as np

_SAMPLES = 64  # elements of an array that are looked at
_TEXT = 256  # characters or bytes of a text, at each end
_MEMBERS = 64  # of a container
_VISITS = 500  # things of an item
_DEPTH = 8


class Digest:
    """Of all items so far, in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, item: Any) -> None:
        with suppress(Exception):  # of the user's own: then it is as good as its type
            _Visit(self._hash.update).add(item, _DEPTH)

    def value(self) -> bytes:
        return self._hash.digest()


class _Visit:
    """One item's members, as many as there is patience for."""

    def __init__(self, update: Callable[[bytes], None]) -> None:
        self._update = update
        self._left = _VISITS

    def add(self, value: Any, depth: int) -> None:
        self._left -= 1
        if self._left < 0:
            return
        self._update(type(value).__qualname__.encode())
        if value is None or isinstance(value, (bool, float, complex)):
            self._update(repr(value).encode())
        elif isinstance(value, type):
            self._update(value.__qualname__.encode())
        elif isinstance(value, int):
            self._update(hex(value).encode())
        elif isinstance(value, str):
            ends = value[:_TEXT] + value[-_TEXT:]
            self._update(f"{len(value)}:{ends}".encode(errors="replace"))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            view = memoryview(value)
            self._update(b"%d:%b%b" % (len(view), bytes(view[:_TEXT]), bytes(view[-_TEXT:])))
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(np.asarray(value), depth)
        elif depth > 0:
            self._add_all(_members(value), depth - 1)

    def _add_array(self, array: Any, depth: int) -> None:
        self._update(f"{array.dtype}{array.shape}".encode())
        if array.size:
            sample = array.flat[:: max(1, array.size // _SAMPLES)]
            if array.dtype.hasobject:
                self._add_all(sample.tolist(), depth - 1)
            else:
                self._update(sample.tobytes())

    def _add_all(self, members: Iterable[Any], depth: int) -> None:
        for member in islice(members, _MEMBERS):
            self.add(member, depth)


def _members(value: Any) -> Iterator[Any]:
    """What an object consists of, in an order of its own."""
    if isinstance(value, Mapping):
        return chain([len(value)], chain.from_iterable(value.items()))
    if isinstance(value, (list, tuple)):
        return chain([len(value)], value)
    if isinstance(value, (set, frozenset)):
        return chain([len(value)], sorted(map(_alone, value)))
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
        return iter([value.detach().cpu().numpy()])
    _, *parts = value.__reduce_ex__(2)  # what it would be rebuilt from
    return iter([part for part in parts if isinstance(part, (tuple, list, dict))])


def _alone(value: Any) -> bytes:
    digest = Digest()
    digest.add(value)
    return digest.value()
