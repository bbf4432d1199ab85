import math
from functools import cache
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aioprefetch._shuffle import Permutation

LARGEST = 2**63 - 1
KEYS = 4000
keys = st.integers(-(2**130), 2**130)
huge_lengths = st.one_of(st.sampled_from([10**12, LARGEST]), st.integers(2**40, LARGEST))


def whole(length: int, key: int) -> NDArray[np.int64]:
    return Permutation(length, key)(np.arange(length))


@cache
def orders(length: int) -> NDArray[np.int64]:
    """The orders under keys 0 to 3999, one a row."""
    return np.stack([whole(length, key) for key in range(KEYS)])


def surprise(chi_square: float, freedom: int) -> float:
    """How many standard deviations a chi-square statistic lies from its mean."""
    return abs(chi_square - freedom) / math.sqrt(2 * freedom)


def chi_square(drawn: NDArray[np.int64], cells: int) -> float:
    counts = np.bincount(drawn.ravel(), minlength=cells)
    expected = drawn.size / cells
    return float(((counts - expected) ** 2 / expected).sum())


def numbered_orders(length: int, size: int) -> dict[tuple[int, ...], int]:
    return {order: number for number, order in enumerate(permutations(range(length), size))}


@given(length=st.integers(0, 2000), key=keys)
def test_it_is_a_bijection(length: int, key: int) -> None:
    assert sorted(whole(length, key)) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 255, 256, 257, 65535, 65536, 65537])
def test_it_is_a_bijection_at_the_edges(length: int) -> None:
    assert np.array_equal(np.sort(whole(length, 7)), np.arange(length))


@given(length=huge_lengths, key=keys, seed=st.integers(0, 2**32))
def test_huge_lengths_map_one_to_one(length: int, key: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, length, 500)
    edges = np.array([0, 1, length // 2, length - 2, length - 1])
    positions = np.unique(np.concatenate([drawn, edges]))
    values = Permutation(length, key)(positions)
    assert values.dtype == np.int64
    assert values.min() >= 0
    assert values.max() < length
    assert len(np.unique(values)) == len(positions)


@given(length=st.integers(1, LARGEST), key=keys, data=st.data())
def test_calls_agree_however_positions_are_cut(length: int, key: int, data: st.DataObject) -> None:
    position = st.integers(0, length - 1)
    positions = np.array(data.draw(st.lists(position, min_size=1, max_size=30)), np.int64)
    cut = data.draw(st.integers(0, len(positions)))
    permutation = Permutation(length, key)
    parts = [permutation(positions[:cut]), permutation(positions[cut:])]
    assert np.array_equal(np.concatenate(parts), permutation(positions))
    assert permutation(positions[0]) == permutation(positions)[0]


def test_the_order_belongs_to_the_key() -> None:
    assert np.array_equal(whole(1000, 2**127), whole(1000, 2**127))
    for first, second in combinations([-1, 0, 1, 2**64, 2**64 + 1, 2**127], 2):
        fixed = int((whole(1000, first) == whole(1000, second)).sum())
        assert fixed < 10, f"keys {first} and {second} agree on {fixed} of 1000 positions"


# Saved states hold positions: a change here loses or repeats items of everyone who resumes.
@pytest.mark.parametrize(
    ("length", "key", "positions", "values"),
    [
        (10, 0, range(10), [2, 4, 0, 7, 6, 8, 3, 9, 1, 5]),
        (1000, -(2**90), range(4), [915, 72, 107, 41]),
        (10**12, 12345, [0, 1, 10**12 - 1], [409226525365, 990108714448, 509889195085]),
        (
            LARGEST,
            2**127,
            [0, 1, LARGEST - 1],
            [5249546840678965852, 6979068791108354193, 3666385081241877994],
        ),
    ],
)
def test_the_order_never_changes(
    length: int, key: int, positions: list[int], values: list[int]
) -> None:
    assert Permutation(length, key)(np.array(positions)).tolist() == values


@pytest.mark.parametrize("length", [2, 3, 5, 10, 64])
def test_every_value_is_equally_likely_at_every_position(length: int) -> None:
    cells = np.arange(length) * length + orders(length)
    # Rows and columns of the table of counts have fixed sums, hence the factor and the freedom.
    scaled = chi_square(cells, length**2) * (length - 1) / length
    assert surprise(scaled, (length - 1) ** 2) < 5


@pytest.mark.parametrize("length", [3, 5, 10, 64])
@pytest.mark.parametrize("distance", [1, 2])
def test_every_pair_of_neighbours_is_equally_likely(length: int, distance: int) -> None:
    numbers = numbered_orders(length, 2)
    for position in {0, length // 2 - 1, length - 1 - distance}:
        pairs = orders(length)[:, [position, position + distance]].tolist()
        drawn = np.array([numbers[tuple(pair)] for pair in pairs])
        assert surprise(chi_square(drawn, len(numbers)), len(numbers) - 1) < 5, position


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_every_order_is_equally_likely(length: int) -> None:
    numbers = numbered_orders(length, length)
    drawn = np.array([numbers[tuple(order)] for order in orders(length).tolist()])
    assert surprise(chi_square(drawn, len(numbers)), len(numbers) - 1) < 5


@pytest.mark.parametrize("length", [6, 9, 16])
def test_odd_orders_are_as_likely_as_even_ones(length: int) -> None:
    rows = orders(length)
    inversions = sum(
        (rows[:, a] > rows[:, b]).astype(np.int64) for a, b in combinations(range(length), 2)
    )
    odd = int(np.count_nonzero(np.asarray(inversions) % 2))
    assert abs(odd - KEYS / 2) < 5 * math.sqrt(KEYS) / 2


@pytest.mark.parametrize("length", [1000, 10**6, 10**12, LARGEST])
def test_neighbours_are_not_correlated(length: int) -> None:
    values = Permutation(length, 3)(np.arange(min(length, 20_000))) / length
    correlation = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(correlation) < 5 / len(values) ** 0.5
    assert abs(np.corrcoef(values, np.arange(len(values)))[0, 1]) < 5 / len(values) ** 0.5


def test_one_position_is_the_identity() -> None:
    assert whole(1, 99).tolist() == [0]


def test_no_position_at_all() -> None:
    values = Permutation(0, 1)(np.array([], np.int64))
    assert values.dtype == np.int64
    assert len(values) == 0


def test_the_shape_is_kept_and_the_positions_untouched() -> None:
    positions = np.arange(12).reshape(3, 4)
    values = Permutation(50, 1)(positions[:, ::2])
    assert values.shape == (3, 2)
    assert np.array_equal(positions, np.arange(12).reshape(3, 4))


def test_len() -> None:
    assert [len(Permutation(length, 0)) for length in (0, 1, 10**12)] == [0, 1, 10**12]


@pytest.mark.parametrize("length", [-1, 2**63, 2**70])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"between 0 and 2\*\*63 - 1, not {length}"):
        Permutation(length, 0)


@pytest.mark.parametrize(
    ("length", "position"), [(0, 0), (1, 1), (5, -1), (5, 5), (LARGEST, LARGEST)]
)
def test_a_position_out_of_range_is_refused(length: int, position: int) -> None:
    with pytest.raises(IndexError, match=rf"position {position} is outside range\({length}\)"):
        Permutation(length, 0)(np.array([position]))
