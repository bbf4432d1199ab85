"""A shuffled order that is computed, not stored.

A position is written as two digits, ``high * columns + low``, on a grid that is as square as the
length allows. A Feistel network adds to each digit in turn a keyed hash of the other: whatever the
hash is, that can be undone, so it permutes the grid, and each position is mapped on its own: no
list of indices, no walk to the middle of an epoch. The grid is larger than the length by less than
one of its columns; a value that falls outside is permuted again until it falls inside (cycle
walking), which is still a bijection. A power of two as the domain would spare the conditional
subtraction, but up to half of it lies outside, and the ever shorter walks of ever fewer values then
cost more than all the rest.

Saved states name positions, not values: the map from (length, key, position) to value must never
change between releases.
"""

import operator
from hashlib import blake2b
from math import isqrt

import numpy as np
from numpy.typing import NDArray

_MAX_LENGTH = 2**63 - 1
# With twelve rounds the orders of 5 or 6 positions are measurably not equally frequent.
_ROUNDS = 16
_FIRST_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SECOND_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_HALF_WORD = np.uint64(32)


class Permutation:
    """A keyed permutation of ``range(length)``.

    Parameters
    ----------
    length
        How many positions there are, 0 to 2**63 - 1.
    key
        Any int. Equal keys give equal orders, on every machine.

    Raises
    ------
    ValueError
        If `length` is negative or above 2**63 - 1.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = _checked_length(length)
        rows, columns = _grid(self._length)
        self._rows, self._columns = np.uint64(rows), np.uint64(columns)
        self._keys = _round_keys(key)

    def __len__(self) -> int:
        return self._length

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions to values, one to one.

        Parameters
        ----------
        positions
            Integers in ``range(length)``, of any shape and in any order.

        Returns
        -------
        NDArray[np.int64]
            The values, in the same shape.

        Raises
        ------
        IndexError
            If a position lies outside ``range(length)``.
        """
        # A negative position becomes a huge one: one comparison finds both.
        inputs = positions.astype(np.uint64).ravel()
        if inputs.size and int(inputs.max()) >= self._length:
            raise IndexError(_outside_message(positions, self._length))
        return self._walk(inputs).view(np.int64).reshape(positions.shape)

    def _walk(self, inputs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        length = np.uint64(self._length)
        values = self._scramble(inputs)
        outside = np.flatnonzero(values >= length)
        while outside.size:
            again = self._scramble(values[outside])
            values[outside] = again
            outside = outside[again >= length]
        return values

    def _scramble(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high = values // self._columns
        low = values - high * self._columns
        first, second = np.empty_like(low), np.empty_like(low)
        for even_key, odd_key in self._keys:
            _hash(low, even_key, self._rows, first, second)
            _add_modulo(high, first, self._rows, second)
            _hash(high, odd_key, self._columns, first, second)
            _add_modulo(low, first, self._columns, second)
        high *= self._columns
        high += low
        return high


# Both work in place: on a block of some thousand positions allocation would cost more than the
# arithmetic. Digits stay below 2**32, so no product of a hash and a size overflows.


def _hash(
    digits: NDArray[np.uint64],
    key: np.uint64,
    size: np.uint64,
    out: NDArray[np.uint64],
    spare: NDArray[np.uint64],
) -> None:
    """Hash digits to ``range(size)``, into `out`."""
    np.add(digits, key, out=out)
    np.multiply(out, _FIRST_FACTOR, out=out)
    np.right_shift(out, _HALF_WORD, out=spare)
    np.bitwise_xor(out, spare, out=out)
    np.multiply(out, _SECOND_FACTOR, out=out)
    # The top bits of a product depend on every bit of its factors, the bottom ones on few.
    np.right_shift(out, _HALF_WORD, out=out)
    np.multiply(out, size, out=out)
    np.right_shift(out, _HALF_WORD, out=out)


def _add_modulo(
    digits: NDArray[np.uint64],
    addend: NDArray[np.uint64],
    size: np.uint64,
    spare: NDArray[np.uint64],
) -> None:
    np.add(digits, addend, out=digits)
    # Where digits < size the difference wraps to a huge number, and the minimum keeps digits.
    np.subtract(digits, size, out=spare)
    np.minimum(digits, spare, out=digits)


def _grid(length: int) -> tuple[int, int]:
    rows = isqrt(max(length - 1, 0)) + 1
    # With two odd sizes each round is an even permutation, and half of all orders never come up.
    rows += rows % 2
    return rows, max(-(-length // rows), 1)


def _round_keys(key: int) -> list[tuple[np.uint64, np.uint64]]:
    text = hex(key).encode()
    return [_round_key_pair(text, number) for number in range(_ROUNDS // 2)]


def _round_key_pair(text: bytes, number: int) -> tuple[np.uint64, np.uint64]:
    digest = blake2b(text, digest_size=16, salt=bytes([number]), person=b"aioprefetch").digest()
    return (
        np.uint64(int.from_bytes(digest[:8], "little")),
        np.uint64(int.from_bytes(digest[8:], "little")),
    )


def _checked_length(length: int) -> int:
    length = operator.index(length)
    if not 0 <= length <= _MAX_LENGTH:
        raise ValueError(f"length must be between 0 and 2**63 - 1, not {length}")
    return length


def _outside_message(positions: NDArray[np.int64], length: int) -> str:
    outside = (positions < 0) | (positions >= length)
    return f"position {positions[outside][0]} is outside range({length})"
