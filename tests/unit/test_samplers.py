"""Samplers: the k-th key is a function of seed, epoch and k; the keys come as often as said."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aioprefetch import Prefetcher, RandomSampler, SubsetSampler, WeightedSampler
from tests.datasets import Numbers
from tests.helpers import collect

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

Sampler = RandomSampler | WeightedSampler | SubsetSampler
Make = Callable[[int, int], Sampler]

LARGEST = 2**63 - 1
MANY = 100_000


def weights(length: int) -> list[int]:
    """From 0 to 4, over and over, so that nearly every sum is another."""
    return [index * 3 % 5 for index in range(1, length + 1)]


# By number of keys and seed. Each gives keys below 100,000.
MAKERS: dict[str, Make] = {
    "random": lambda size, seed: RandomSampler(50_000, size, seed=seed),
    "weighted": lambda size, seed: WeightedSampler(weights(5000), size, seed=seed),
    "subset": lambda size, seed: SubsetSampler(np.arange(size) * 3 + 1, seed=seed),
    "range": lambda size, seed: SubsetSampler(range(1, 3 * size, 3), seed=seed),
    "in order": lambda size, seed: SubsetSampler(range(size), shuffle=False, seed=seed),
}
RANDOM = {name: make for name, make in MAKERS.items() if name != "in order"}

makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
random_makers = pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
sizes = st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 1025, 2048, 3000]))
seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 2**40)


def keys_of(sampler: Sampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


# A function of seed, epoch and place


@makers
@given(size=sizes, seed=seeds, epoch=epochs, data=st.data())
def test_going_somewhere_is_reading_up_to_there(
    make: Make, size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    sampler = make(size, seed)
    whole = keys_of(sampler, epoch)
    assert len(whole) == len(sampler) == size
    place = data.draw(st.integers(0, size))
    reading = iter(sampler)
    assert list(itertools.islice(reading, place)) == whole[:place]
    state = reading.state_dict()
    assert state["position"] == place
    elsewhere = iter(sampler)
    next(elsewhere)  # has a block in hand, perhaps not the one that it goes to
    elsewhere.load_state_dict(state)
    assert list(elsewhere) == whole[place:] == list(reading)
    reading.load_state_dict({"position": 0})
    assert list(reading) == whole


@random_makers
@given(seed=seeds, epoch=epochs)
def test_equal_seeds_give_equal_keys_and_others_give_others(
    make: Make, seed: int, epoch: int
) -> None:
    keys = keys_of(make(100, seed), epoch)
    assert keys_of(make(100, seed), epoch) == keys
    assert keys_of(make(100, seed), epoch + 1) != keys
    assert keys_of(make(100, seed ^ 1), epoch) != keys


def test_in_order_all_epochs_are_equal() -> None:
    sampler = SubsetSampler([7, 3, 7, -1], shuffle=False)
    assert keys_of(sampler, 0) == keys_of(sampler, 9) == [7, 3, 7, -1]


@makers
def test_keys_are_ints(make: Make) -> None:
    assert {type(key) for key in make(2000, 0)} == {int}


@random_makers
def test_an_open_iterator_stays_in_its_epoch(make: Make) -> None:
    sampler = make(3000, 0)
    whole = keys_of(sampler, 4)
    reading = iter(sampler)
    first = next(reading)
    sampler.set_epoch(5)
    assert [first, *reading] == whole
    assert list(sampler) != whole


@pytest.mark.parametrize("name", ["random", "weighted"])
@given(seed=seeds)
def test_a_longer_epoch_begins_like_a_shorter_one(name: str, seed: int) -> None:
    make = MAKERS[name]
    assert list(make(1500, seed))[:700] == list(make(700, seed))


@makers
def test_it_pickles(make: Make) -> None:
    sampler = make(50, 3)
    sampler.set_epoch(2)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(LARGEST), WeightedSampler([1, 2], LARGEST), SubsetSampler(range(LARGEST))],
    ids=lambda sampler: type(sampler).__name__,
)
def test_the_end_of_a_huge_epoch_is_at_hand(sampler: Sampler) -> None:
    reading = iter(sampler)
    reading.load_state_dict({"position": LARGEST - 3})
    last = list(reading)
    assert len(last) == 3
    assert all(0 <= key < LARGEST for key in last)
    reading.load_state_dict({"position": LARGEST - 1})
    assert list(reading) == last[2:]


@pytest.mark.parametrize(
    "other",
    [
        RandomSampler(11),
        RandomSampler(10, seed=1),
        WeightedSampler([1] * 9 + [2]),
        SubsetSampler(range(10)),
        SubsetSampler(range(10), shuffle=False),
        SubsetSampler([9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
    ],
    ids=range(6),
)
def test_a_position_in_other_keys_is_refused(other: Any) -> None:
    for mine in (RandomSampler(10), WeightedSampler([1] * 10), SubsetSampler([*range(10)])):
        with pytest.raises(ValueError, match="saved with another sampler"):
            iter(mine).load_state_dict(iter(other).state_dict())


@makers
@pytest.mark.parametrize("position", [-1, 11])
def test_a_position_outside_is_refused(make: Make, position: int) -> None:
    with pytest.raises(ValueError, match=f"position {position} is outside"):
        iter(make(10, 0)).load_state_dict({"position": position})


# Saved states hold positions: a change here gives others to everyone who resumes.
@pytest.mark.parametrize(
    ("sampler", "first", "last"),
    [
        (RandomSampler(1000, 5000, seed=7), [724, 54, 600, 571], [211, 164, 224, 343]),
        (
            RandomSampler(LARGEST, 5000, seed=2**64 - 1),
            [1759127674203218060, 1985477889804234072, 4222024531198425883, 6176842400663143692],
            [4411259103430331905, 1530395331583004858, 24870599107012863, 7869949889040839706],
        ),
        (WeightedSampler([1, 2, 3, 4], 5000, seed=7), [2, 2, 3, 2], [2, 0, 1, 2]),
        (SubsetSampler(range(10, 5010), seed=7), [4036, 4728, 2024, 2430], [1221, 1104, 614, 4285]),
    ],
    ids=["random", "largest", "weighted", "subset"],
)
def test_keys_never_change(sampler: Sampler, first: list[int], last: list[int]) -> None:
    keys = keys_of(sampler, 3)
    assert (keys[:4], keys[-4:]) == (first, last)


# As often as said. The seeds are fixed, so a test that passes passes always.


def surprise(counts: NDArray[Any], expected: NDArray[Any] | float) -> float:
    """How many standard deviations their chi-square lies from its mean."""
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return abs(chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [2, 3, 10, 1000])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_indices_are_equally_likely(length: int, seed: int) -> None:
    keys = list(RandomSampler(length, MANY, seed=seed))
    assert surprise(np.bincount(keys, minlength=length), MANY / length) < 4


@pytest.mark.parametrize("distance", [1, 2, 1024])
def test_pairs_of_keys_are_equally_likely(distance: int) -> None:
    """Neighbours, and keys at the same place of two blocks."""
    keys = np.array(list(RandomSampler(10, MANY)))
    pairs = keys[:-distance] * 10 + keys[distance:]
    assert surprise(np.bincount(pairs, minlength=100), pairs.size / 100) < 4


def test_epochs_are_independent() -> None:
    sampler = RandomSampler(10, MANY)
    pairs = np.array(keys_of(sampler, 0)) * 10 + keys_of(sampler, 1)
    assert surprise(np.bincount(pairs, minlength=100), MANY / 100) < 4


@pytest.mark.parametrize("length", [2, 7, 1000])
@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e305])
def test_indices_come_by_their_weights(length: int, scale: float) -> None:
    given = np.array(weights(length))
    keys = list(WeightedSampler(given * scale, MANY))
    counts = np.bincount(keys, minlength=length)
    drawn = given > 0
    assert not counts[~drawn].any()
    if drawn.sum() > 1:
        expected = MANY * given / given.sum()
        assert surprise(counts[drawn], expected[drawn]) < 4


@given(
    table=st.lists(st.sampled_from([0, 0.0, 5e-324, 1e-200, 1, 3.5, 1e308]), min_size=1).filter(any)
)
def test_only_indices_of_some_weight_are_drawn(table: list[float]) -> None:
    assert all(table[key] > 0 for key in WeightedSampler(table, 2000))


@given(length=st.integers(1, 200), seed=seeds)
def test_one_index_alone_can_have_weight(length: int, seed: int) -> None:
    alone = seed % length
    table = np.zeros(length, np.float32)
    table[alone] = 1e-30
    assert list(WeightedSampler(table, seed=seed)) == [alone] * length


@given(indices=st.lists(st.integers(-(2**63), LARGEST), min_size=1), seed=seeds, epoch=epochs)
def test_each_index_of_a_subset_comes_once(indices: list[int], seed: int, epoch: int) -> None:
    assert sorted(keys_of(SubsetSampler(indices, seed=seed), epoch)) == sorted(indices)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda r: np.array(r, np.uint8)])
def test_the_kind_of_indices_does_not_matter(kind: Callable[[range], Any]) -> None:
    indices = range(3, 250, 7)
    assert list(SubsetSampler(kind(indices), seed=1)) == list(SubsetSampler(indices, seed=1))


def test_every_order_of_a_subset_is_equally_likely() -> None:
    sampler = SubsetSampler([2, 0, 1])
    orders = [tuple(keys_of(sampler, epoch)) for epoch in range(1200)]
    counts = np.array([orders.count(order) for order in itertools.permutations(range(3))])
    assert surprise(counts, 200) < 4


def test_what_was_given_may_change_later() -> None:
    table, indices = np.array([0.0, 1.0]), np.array([5, 5])
    weighted, subset = WeightedSampler(table), SubsetSampler(indices)
    table[:], indices[:] = [1, 0], 6
    assert (list(weighted), list(subset)) == ([1, 1], [5, 5])


# Refusals


random: Any = RandomSampler  # as those call it who do not check types
weighted: Any = WeightedSampler
subset: Any = SubsetSampler


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: random(0), ValueError, "length must be 1 or more"),
        (lambda: random(2**63), ValueError, "length must be 1 or more and below 2\\*\\*63"),
        (lambda: random(2.0), TypeError, "length must be a whole number, not 2.0"),
        (lambda: random(5, 0), ValueError, "num_samples must be 1 or more"),
        (lambda: random(5, seed=-1), ValueError, "seed must be 0 or more"),
        (lambda: random(5, seed=2**64), ValueError, "below 2\\*\\*64"),
        (lambda: random(5, seed=None), TypeError, "seed must be a whole number"),
        (lambda: random(5).set_epoch(-1), ValueError, "epoch must be 0 or more"),
        (lambda: weighted([]), ValueError, "one for each index"),
        (lambda: weighted([[1, 2]]), ValueError, "not of shape \\(1, 2\\)"),
        (lambda: weighted(3), ValueError, "not of shape \\(\\)"),
        (lambda: weighted([0, 0]), ValueError, "all zero"),
        (lambda: weighted([1, -2, -3]), ValueError, "weights\\[1\\] is -2"),
        (lambda: weighted([1, 2, math.nan]), ValueError, "weights\\[2\\] is nan"),
        (lambda: weighted([math.inf, 2]), ValueError, "weights\\[0\\] is inf"),
        (lambda: weighted([1], 0), ValueError, "num_samples must be 1 or more"),
        (lambda: subset([]), ValueError, "empty"),
        (lambda: subset(range(0)), ValueError, "empty"),
        (lambda: subset([1.5]), TypeError, "whole numbers, not list .* float64"),
        (lambda: subset({1, 2}), TypeError, "sequence of whole numbers, not set"),
        (lambda: subset([[1], [2]]), TypeError, "shape \\(2, 1\\)"),
        (lambda: subset([True, False]), TypeError, "mask"),
        (lambda: subset([1], seed=-1), ValueError, "seed must be 0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    make: Callable[[], Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make()


# Read by a Prefetcher


@makers
@one_loop
@pytest.mark.parametrize("num_proc", [0, 2])
async def test_a_prefetcher_delivers_its_keys_epoch_by_epoch(make: Make, num_proc: int) -> None:
    expected = [keys_of(make(2500, 9), epoch) for epoch in (0, 1)]
    p = Prefetcher(Numbers(MANY), sampler=make(2500, 9), batch_size=1000, num_proc=num_proc)
    assert len(p) == 3
    async with p:
        for keys in expected:
            assert await collect(p) == [keys[:1000], keys[1000:2000], keys[2000:]]


@makers
def test_the_iterator_keeps_the_state_and_the_sampler_none(make: Make) -> None:
    """What reads it looks for both methods, on the iterable first."""
    sampler = make(10, 0)
    for method in ("state_dict", "load_state_dict"):
        assert not hasattr(sampler, method)
        assert callable(getattr(iter(sampler), method))
