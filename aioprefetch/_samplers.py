"""Samplers whose keys are computed from their places.

The k-th key of an epoch is a function of (seed, epoch, k) alone: a position is all there is to
save of one that is being read, and going there costs no more than the next key. Keys are drawn
in blocks, each from a generator, or a permutation, that is keyed by its place.

Saved states hold positions: which key stands at a place must never change between releases. So
of numpy's generators only the words of PCG64 are used, which numpy keeps as they are, and none
of its distributions, which it does not.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _seeds
from ._shuffle import Permutation

_BLOCK = 1024  # keys that are drawn at once
_LIMIT = 2**63
_FRACTION_BITS = 53  # of a float64


class Keys(Iterator[int]):
    """The keys of one epoch; says where it is, and goes anywhere."""

    def __init__(self, length: int, draw: Callable[[int], list[int]], of: int) -> None:
        self._length = length
        self._of = of  # a hash of the sampler
        self._draw = draw  # the keys of the block with a number
        self._position = 0
        self._number = -1  # of the block in hand
        self._block: list[int] = []

    def __next__(self) -> int:
        if self._position >= self._length:
            raise StopIteration
        number, offset = divmod(self._position, _BLOCK)
        if number != self._number:
            self._block, self._number = self._draw(number), number
        self._position += 1
        return self._block[offset]

    def state_dict(self) -> dict[str, int]:
        """Where it is, the next key being the k-th, and of which sampler."""
        return {"position": self._position, "of": self._of}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where ``state`` was taken; ValueError when that was in another sampler's keys."""
        if state.get("of", self._of) != self._of:
            raise ValueError(
                "the state was saved with another sampler: what it draws from, or its seed, differs"
            )
        position = operator.index(state["position"])
        if not 0 <= position <= self._length:
            raise ValueError(
                f"position {position} is outside of this sampler's {self._length} keys: it was "
                "saved with a longer one"
            )
        self._position = position


class _Sampler:
    """What all have in common: a seed, an epoch, a length."""

    _shuffle = True

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples = num_samples
        self._seed = _checked("seed", seed, 0, 1 << _seeds.SEED_BITS)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Give the keys of ``epoch`` from now on; an iterator that is open goes on as it is.

        Raises
        ------
        ValueError
            It is negative.
        """
        self._epoch = _checked("epoch", epoch, 0, _LIMIT)

    def __len__(self) -> int:
        """Keys in an epoch."""
        return self._num_samples

    def __iter__(self) -> Keys:
        kind = f"{type(self).__name__} {self._seed} {self._shuffle}".encode()
        of = zlib.crc32(self._draws_from(), zlib.crc32(kind))
        return Keys(self._num_samples, partial(self._draw, self._epoch), of)

    def _draws_from(self) -> Any:
        """Bytes that tell it from another of its kind."""
        raise NotImplementedError

    def _draw(self, epoch: int, number: int) -> list[int]:
        """The keys of a block."""
        raise NotImplementedError

    def _words(self, epoch: int, number: int) -> NDArray[np.uint64]:
        """64 random bits for each key of a block."""
        key = _seeds.key_of(self._seed, "sampler", epoch, number)
        words: NDArray[np.uint64] = np.random.PCG64(key).random_raw(_BLOCK)
        return words


class RandomSampler(_Sampler):
    """Indices drawn with replacement, each equally likely; for ``Prefetcher(sampler=...)``.

    It needs no memory, whatever the length, and a key costs the same anywhere in the epoch.
    To have each index once instead, pass ``shuffle=True``, or a `SubsetSampler`.

    Parameters
    ----------
    length
        Indices to draw from, 1 to 2**63 - 1: those of ``range(length)``. No index is likelier
        than another by more than one part in ``2**64 / length``.
    num_samples
        Keys in an epoch; ``length`` by default.
    seed
        0 to 2**64 - 1; with the epoch it determines the keys. It is not the Prefetcher's.

    Raises
    ------
    TypeError, ValueError
        An argument that is no whole number, or outside of its bounds.
    """

    def __init__(self, length: int, num_samples: int | None = None, *, seed: int = 0) -> None:
        self._length = _checked("length", length, 1, _LIMIT)
        super().__init__(_num_samples(num_samples, self._length), seed)

    def _draws_from(self) -> bytes:
        return str(self._length).encode()

    def _draw(self, epoch: int, number: int) -> list[int]:
        keys: list[int] = (self._words(epoch, number) % np.uint64(self._length)).tolist()
        return keys


class WeightedSampler(_Sampler):
    """Indices drawn with replacement, index i with probability ``weights[i] / sum(weights)``.

    For ``Prefetcher(sampler=...)``. It holds 8 bytes a weight, in this process alone, and a
    key costs a binary search in them, the same anywhere in the epoch.

    Parameters
    ----------
    weights
        One for each index, finite and not negative, in any unit; copied. An index of weight 0
        is never drawn, and one of less than 2**-53 of the sum may as well not be.
    num_samples
        Keys in an epoch; as many as weights by default.
    seed
        0 to 2**64 - 1; with the epoch it determines the keys. It is not the Prefetcher's.

    Raises
    ------
    TypeError, ValueError
        There are no weights, one is negative or not finite, or all are zero; or another
        argument is no whole number, or outside of its bounds.
    """

    def __init__(
        self, weights: ArrayLike, num_samples: int | None = None, *, seed: int = 0
    ) -> None:
        self._shares = _cumulated(weights)
        super().__init__(_num_samples(num_samples, len(self._shares)), seed)

    def _draws_from(self) -> Any:
        return self._shares

    def _draw(self, epoch: int, number: int) -> list[int]:
        fractions = (self._words(epoch, number) >> np.uint64(64 - _FRACTION_BITS)) * 2.0**-53
        # To the right of equal shares: an index of weight 0 has the share of the one before it.
        keys: list[int] = self._shares.searchsorted(fractions, side="right").tolist()
        return keys


class SubsetSampler(_Sampler):
    """Each of the given indices once, in an order of its own in each epoch.

    For ``Prefetcher(sampler=...)``. It holds a copy of the indices, 8 bytes each (those of a
    range take none), in this process alone. The order is computed, not stored, and a key costs
    the same anywhere in the epoch.

    Parameters
    ----------
    indices
        Whole numbers, such as those of a training split; one that stands twice comes twice.
    shuffle
        Whether to give them in an order drawn from seed and epoch; False gives them as they
        stand.
    seed
        0 to 2**64 - 1; with the epoch it determines the order. It is not the Prefetcher's.

    Raises
    ------
    TypeError, ValueError
        There are no indices, or they are not whole numbers; or the seed is out of bounds.
    """

    def __init__(
        self, indices: Sequence[int] | NDArray[Any], *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._indices = _copied(indices)
        self._shuffle = shuffle
        super().__init__(len(self._indices), seed)

    def _draws_from(self) -> Any:
        if isinstance(self._indices, range):
            return str(self._indices).encode()
        return self._indices

    def _draw(self, epoch: int, number: int) -> list[int]:
        start = number * _BLOCK
        places = np.arange(start, min(start + _BLOCK, len(self)), dtype=np.int64)
        if self._shuffle:
            key = _seeds.key_of(self._seed, "sampler", epoch, len(self))
            places = Permutation(len(self), key)(places)
        if isinstance(self._indices, range):
            return [self._indices[place] for place in places.tolist()]
        keys: list[int] = self._indices[places].tolist()
        return keys


def _checked(name: str, value: int, least: int, limit: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not least <= number < limit:
        bits = limit.bit_length() - 1
        raise ValueError(f"{name} must be {least} or more and below 2**{bits}, not {number}")
    return number


def _num_samples(num_samples: int | None, default: int) -> int:
    return default if num_samples is None else _checked("num_samples", num_samples, 1, _LIMIT)


def _cumulated(weights: ArrayLike) -> NDArray[np.float64]:
    """For each index the share of all weights up to it, its own included."""
    shares = np.array(weights, np.float64)
    if shares.ndim != 1 or not shares.size:
        raise ValueError(
            f"weights must be a sequence of numbers, one for each index, not of shape "
            f"{shares.shape}"
        )
    wrong = ~(np.isfinite(shares) & (shares >= 0))
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"weights must be finite and not negative, and weights[{index}] is {shares[index]}"
        )
    if not shares.any():
        raise ValueError("weights are all zero: give at least one index a weight")
    shares /= shares.max()  # so that neither huge ones overflow nor tiny ones vanish in a sum
    np.cumsum(shares, out=shares)
    shares /= shares[-1]
    return shares


def _copied(indices: Sequence[int] | NDArray[Any]) -> range | NDArray[Any]:
    held = indices if isinstance(indices, range) else _whole_numbers(indices)
    if not len(held):
        raise ValueError("indices are empty: an epoch would have no keys")
    return held


def _whole_numbers(indices: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    array = np.array(indices)
    if array.dtype == bool:
        raise TypeError("indices must be whole numbers: for those of a mask give np.flatnonzero()")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"indices must be a sequence of whole numbers, not {type(indices).__qualname__} "
            f"of shape {array.shape} and type {array.dtype}"
        )
    return array
