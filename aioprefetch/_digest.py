"""A running digest of items, by which a stream that is read again is known to repeat itself.

It looks at types, numbers, texts and shapes, and at samples of what is large: enough to tell
another item or another order, at a cost that does not grow with an array. It does not depend
on the process, as a pickle or a hash of the same object may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_SAMPLES = 64  # elements of an array that are looked at
_TEXT = 256  # characters or bytes of a text, at each end
_MEMBERS = 64  # of a container
_DEPTH = 8


class Digest:
    """Of all items so far, in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, item: Any) -> None:
        _add(self._hash, item, _DEPTH)

    def value(self) -> bytes:
        return self._hash.digest()


def _add(state: Any, value: Any, depth: int) -> None:
    kind = type(value)
    state.update(kind.__qualname__.encode())
    if value is None or isinstance(value, (bool, int, float, complex)):
        state.update(repr(value).encode())
    elif isinstance(value, str):
        _add_ends(state, value[:_TEXT].encode(errors="replace"), len(value))
        state.update(value[-_TEXT:].encode(errors="replace"))
    elif isinstance(value, (bytes, bytearray)):
        _add_ends(state, bytes(value[:_TEXT]), len(value))
        state.update(bytes(value[-_TEXT:]))
    elif isinstance(value, (np.ndarray, np.generic)):
        _add_array(state, np.asarray(value))
    elif depth > 0:
        _add_members(state, value, depth - 1)


def _add_ends(state: Any, start: bytes, length: int) -> None:
    state.update(b"%d:" % length)
    state.update(start)


def _add_array(state: Any, array: Any) -> None:
    state.update(f"{array.dtype}{array.shape}".encode())
    if array.size and not array.dtype.hasobject:
        step = max(1, array.size // _SAMPLES)
        state.update(array.flat[::step].tobytes())


def _add_members(state: Any, value: Any, depth: int) -> None:
    members: list[Any] = []
    if isinstance(value, Mapping):
        members = [part for entry in list(value.items())[:_MEMBERS] for part in entry]
        state.update(b"%d:" % len(value))
    elif isinstance(value, (list, tuple)):
        members = list(value[:_MEMBERS])
        state.update(b"%d:" % len(value))
    elif hasattr(value, "__dict__"):
        members = [part for entry in list(vars(value).items())[:_MEMBERS] for part in entry]
    for member in members:
        _add(state, member, depth)
