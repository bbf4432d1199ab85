"""Items on their way to workers, in memory that all of them see."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from aioprefetch import Prefetcher
from aioprefetch import _arena as arena
from aioprefetch._iterators import PrefetchIterator
from aioprefetch._payload import Intake, Parcel, Store, encode_values, sent
from tests.processes import eventually

SIDE = 512  # an image of 1 MiB


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def images(count: int) -> Iterator[Any]:
    for number in range(count):
        yield {"image": np.full((SIDE, SIDE), number, np.float32), "label": np.arange(number)}


async def images_later(count: int) -> AsyncIterator[Any]:
    for item in images(count):
        await asyncio.sleep(0)
        yield item


class Later:
    def __init__(self, count: int) -> None:
        self._count = count

    def __aiter__(self) -> AsyncIterator[Any]:
        return images_later(self._count)


def doubled_in_place(item: Any) -> Any:
    item["image"] *= 2
    item["label"] += 1
    return item


def crossed(store: Store, values: list[Any], *, keeps: bool = False) -> tuple[Parcel, list[Any]]:
    """The parcel, and what a worker makes of it."""
    parcel = store.put(encode_values(values))
    assert isinstance(parcel, Parcel)
    message = pickle.loads(pickle.dumps(sent(parcel)))
    segments = [bytearray(segment) for segment in parcel.segments]
    return parcel, Intake(store.space, keeps=keeps).open(message, segments)


def test_large_arrays_go_by_shared_memory_and_small_ones_together(store: Store) -> None:
    values = [np.arange(100_000), {"a": np.arange(300.0), "b": np.arange(200)}, "text"]
    parcel, back = crossed(store, values)
    assert parcel.segments == []
    assert len(parcel.blocks) == 1  # the pickles hold the small ones
    np.testing.assert_equal(back, values)
    np.testing.assert_equal(parcel.open(), values)
    assert np.shares_memory(back[0], store.space.array(parcel.blocks[0]))


def test_the_memory_is_free_when_the_parcel_is_dropped(store: Store) -> None:
    offsets = set()
    for number in range(50):
        parcel, _ = crossed(store, [np.full(50_000, number)])
        offsets.add(parcel.blocks[0].offset)
        del parcel
    assert len(offsets) == 1
    kept = [crossed(store, [np.full(50_000, number)])[0] for number in range(5)]
    assert len({parcel.blocks[0].offset for parcel in kept}) == 5


def test_what_the_user_writes_into_an_item_does_not_reach_a_second_worker(store: Store) -> None:
    parcel, (first,) = crossed(store, [np.zeros(50_000)], keeps=True)
    first += 1
    (second,) = Intake(store.space, keeps=True).open(sent(parcel), [])
    assert (second == 0).all()


def test_without_room_the_channel_takes_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise MemoryError(nbytes)

    monkeypatch.setattr(arena, "refuse_to_exhaust", refuse)
    values = [np.arange(1 << 18), np.arange(1 << 19)]
    parcel, back = crossed(store, values)
    assert len(parcel.segments) == 2
    np.testing.assert_equal(back, values)


@pytest.mark.parametrize("source", [images, Later], ids=["sync", "async"])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("in_place", [False, True], ids=["plain", "in place"])
async def test_items_read_here_arrive_in_the_workers(
    source: Any, batch_size: int | None, in_place: bool
) -> None:
    count, seen = 40, 0
    flow = Later(count) if source is Later else images(count)
    map_fn = doubled_in_place if in_place else None
    collate_fn = None if batch_size is None else list
    p = Prefetcher(
        flow, split="parent", map_fn=map_fn, batch_size=batch_size, collate_fn=collate_fn,
        num_proc=2,
    )  # fmt: skip
    async with p:
        async for batch in p:
            for item in [batch] if batch_size is None else batch:
                factor, more = (2, 1) if in_place else (1, 0)
                assert (item["image"] == factor * seen).all()
                np.testing.assert_array_equal(item["label"], np.arange(seen) + more)
                seen += 1
    assert seen == count


async def test_the_memory_of_items_is_bounded_by_the_window() -> None:
    async with Prefetcher(images(200), split="parent", num_proc=2, num_prefetch=4) as p:
        iterator = aiter(p)
        async for _ in iterator:
            pass
        assert isinstance(iterator, PrefetchIterator)
        store = p._session._pool._store  # type: ignore[union-attr]
        assert store._writer._next - store.space.blocks <= 16 << 20
        assert await eventually(lambda: store._reader.lent == [], 2)
