"""Batches in shared memory: whose they are, how long they live, and what is left of them."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aioprefetch import Prefetcher, SharedList
from aioprefetch._arena import BLOCKS, Block, Reader, Space, Writer
from aioprefetch._codec import Packed, encode_result, receive
from tests import arrays
from tests.processes import eventually, leftovers

pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")

IMAGE = arrays.SIDE**2 * 4  # bytes


@pytest.fixture
def space() -> Iterator[Space]:
    space = Space.create(1)
    yield space
    space.close_fd()


def taken(writer: Writer, nbytes: int) -> Block:
    block = writer.take(nbytes)
    assert block is not None
    return block


# An arena, both of its ends in this process


def in_child(work: Any) -> None:
    """Fork, and do something there."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_forked_child_frees_nothing_of_its_parents(space: Space) -> None:
    writer, reader = Writer(space), Reader(space)
    first = taken(writer, 100_000)
    held = [reader.lend(first)]
    in_child(held.clear)
    assert taken(writer, 100_000).offset != first.offset
    held.clear()
    assert taken(writer, 100_000) == first  # and the parent itself still does


def test_views_that_die_in_several_threads_free_their_block_once(space: Space) -> None:
    writer, reader = Writer(space), Reader(space)
    for _ in range(100):
        first = taken(writer, 100_000)
        root = reader.lend(first)
        views = [[root[at : at + 10]] for at in range(4)]
        del root
        barrier = threading.Barrier(4)

        def let_go(views: list[Any], barrier: threading.Barrier) -> None:
            barrier.wait()
            views.clear()

        threads = [threading.Thread(target=let_go, args=(view, barrier)) for view in views]
        assert space.memory[first.number] == 1
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (space.memory[first.number], reader.lent) == (0, [])


@pytest.mark.parametrize("nbytes", [100, 100_000])
def test_results_beyond_the_entries_of_a_class_go_without_shared_memory(
    space: Space, nbytes: int
) -> None:
    """The arena's head has a fixed number of entries; past them nothing is overwritten."""
    writer, reader = Writer(space), Reader(space)
    head = bytes(space.memory[: space.flags])
    blocks = []
    while (block := writer.take(nbytes)) is not None:
        blocks.append(block)
    assert 0 < len(blocks) <= BLOCKS
    assert len({block.offset for block in blocks}) == len(blocks)
    last = reader.lend(blocks[-1])
    last[:] = 9
    value = np.arange(nbytes, dtype=np.uint8)
    packed, segments = encode_result([value], writer)
    (back,) = receive(packed, [bytearray(segment) for segment in segments], reader).open()
    np.testing.assert_array_equal(back, value)
    assert isinstance(packed, Packed)
    assert packed.blocks == ()
    assert (last == 9).all()
    assert space.memory[: space.flags] == head
    writer.free(blocks[5])
    assert taken(writer, nbytes) == blocks[5]


def test_arrays_that_are_not_sent_are_given_back(space: Space) -> None:
    writer = Writer(space)
    made = [writer.empty((100_000,), np.dtype(np.uint8)) for _ in range(3)]
    sent = writer.opened(made[1].data)
    assert sent is not None
    writer.drop_opened()
    flags = [taken(writer, 100_000).number for _ in range(2)]
    assert sent.number not in flags
    assert writer.opened(made[0].data) is None  # it is another's by now


def test_a_view_of_an_array_made_in_place_is_copied(space: Space) -> None:
    """Only all of it is sent where it lies."""
    writer, reader = Writer(space), Reader(space)
    whole = writer.empty((200_000,), np.dtype(np.uint8))
    whole[:] = np.arange(200_000) % 251
    for part in (whole[:100_000], whole[100_000:], whole[::2]):
        packed, _ = encode_result(part, writer)
        back = receive(packed, [], reader).open()
        np.testing.assert_array_equal(back, part)
        assert not np.shares_memory(back, whole)
    packed, _ = encode_result(whole, writer)
    assert np.shares_memory(receive(packed, [], reader).open(), whole)


def test_the_same_array_twice_in_a_result(space: Space) -> None:
    writer, reader = Writer(space), Reader(space)
    whole = writer.empty((100_000,), np.dtype(np.uint8))
    whole[:] = 5
    packed, _ = encode_result({"a": whole, "b": whole, "c": whole.view(np.int32)}, writer)
    back = receive(packed, [], reader).open()
    assert back["a"] is back["b"]
    assert all((part.view(np.uint8) == 5).all() for part in back.values())


def test_what_was_given_back_is_clean_memory_again(space: Space) -> None:
    """Blocks that are lent are left alone when the others' pages are given back."""
    writer, reader = Writer(space), Reader(space)
    kept, free = taken(writer, 4 << 20), taken(writer, 4 << 20)
    view = reader.lend(kept)
    view[:] = 7
    space.array(free)[:] = 8
    writer.free(free)
    for kind in writer._classes:
        kind.taken = [-1e9] * len(kind.taken)
    before = os.fstat(space.fd).st_blocks
    writer.trim(now=True)
    gone = (before - os.fstat(space.fd).st_blocks) * 512
    assert (4 << 20) - mmap.PAGESIZE <= gone <= 4 << 20
    assert (view == 7).all()


# End to end


def assert_batch(batch: dict[str, Any], first: int, size: int = 16) -> None:
    labels = np.arange(first, first + size)
    np.testing.assert_array_equal(batch["label"], labels)
    expected = np.broadcast_to(labels[:, None, None], (size, arrays.SIDE, arrays.SIDE))
    np.testing.assert_array_equal(batch["image"], expected)


async def test_two_epochs_held_at_once_are_right_and_written_alone() -> None:
    """After the workers are gone and the Prefetcher is collected."""
    p: Prefetcher | None = Prefetcher(arrays.Images(400), batch_size=16, num_proc=2)
    assert p is not None
    async with p:
        batches = [batch async for batch in p] + [batch async for batch in p]
    p = None
    gc.collect()
    assert len(batches) == 50
    for number, batch in enumerate(batches):
        assert_batch(batch, number % 25 * 16)
        assert batch["image"].flags.writeable
        batch["image"][:] = -1
        batch["label"][:] = -1
        for other in batches[number + 1 :][:2]:
            assert other["label"][0] != -1
    spans = sorted((b["image"].ctypes.data, b["image"].nbytes) for b in batches)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))


async def test_arrays_are_aligned() -> None:
    async with Prefetcher(arrays.Images(64), batch_size=8, num_proc=1) as p:
        async for batch in p:
            assert batch["image"].ctypes.data % 64 == 0
            assert batch["label"].ctypes.data % 8 == 0


async def test_a_batch_survives_a_child_that_drops_it() -> None:
    """A process that the user forks while batches are held: its copy is not ours."""
    async with Prefetcher(arrays.Images(640), batch_size=16, num_proc=1) as p:
        batches = aiter(p)
        held = [await anext(batches)]
        in_child(held.clear)
        rest = [batch async for batch in batches]
    assert_batch(held[0], 0)
    assert len(rest) == 39


async def test_items_by_themselves() -> None:
    items = [item async for item in Prefetcher(arrays.Images(60), num_proc=2)]
    assert [int(item["label"]) for item in items] == list(range(60))
    assert all((item["image"] == number).all() for number, item in enumerate(items))
    assert all(item["image"].flags.writeable for item in items)


async def test_what_a_collate_fn_of_the_users_gives() -> None:
    p = Prefetcher(arrays.Images(60), batch_size=4, collate_fn=arrays.as_pair, num_proc=2)
    batches = [batch async for batch in p]
    assert len(batches) == 15
    for number, batch in enumerate(batches):
        assert type(batch) is arrays.Pair
        assert batch.labels == list(range(4 * number, 4 * number + 4))
        assert (batch.images[:, 0, -1] == batch.labels).all()


LEAVES: dict[str, Any] = {
    "structured": np.zeros(3000, [("a", "<i2"), ("b", ">f8"), ("c", "S3")]),
    "big-endian": np.arange(5000, dtype=">i4"),
    "datetime64": np.arange("2020-01-01", "2040-01-01", dtype="datetime64[D]"),
    "bool": np.arange(20_000) % 3 == 0,
    "text": np.array(["ä", "bcd"] * 2000),
    "0-d": np.array(2.5, np.float16),
    "empty": np.empty((0, 7), np.int8),
    "strided": np.arange(40_000).reshape(200, 200)[::2, ::-3],
    "fortran": np.asfortranarray(np.arange(40_000).reshape(200, 200)),
    "bytes": b"z" * 1_000_000,
    "nested": {"x": [np.ones(5000), (np.zeros(3), "text")], "y": 1},
}


@pytest.mark.parametrize("name", LEAVES)
async def test_batches_are_as_without_workers(name: str) -> None:
    source = arrays.Values({"leaf": LEAVES[name], "number": 3}, 12)
    there = [batch async for batch in Prefetcher(source, batch_size=3, num_proc=1)]
    here = [batch async for batch in Prefetcher(source, batch_size=3, num_proc=0)]
    assert len(there) == 4
    for one, other in zip(there, here, strict=True):
        arrays.assert_same(one, other)


async def test_any_piece_of_a_batch_keeps_its_own_array_only() -> None:
    async with Prefetcher(arrays.Images(640), batch_size=16, num_proc=2) as p:
        pieces = [batch["image"][3, 5] async for batch in p]
        readers: list[Reader] = [lane.reader for lane in p._session._pool.lanes]  # type: ignore[union-attr]
        assert sum(reader.nbytes for reader in readers) == 40 * 16 * IMAGE
        pieces = [piece.copy() for piece in pieces]
        assert await eventually(lambda: sum(reader.nbytes for reader in readers) == 0, 1)
    assert [int(piece[0]) for piece in pieces] == list(range(3, 640, 16))


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_labels_kept_of_a_thousand_batches_do_not_keep_the_images() -> None:
    async with Prefetcher(arrays.Images(16_000), batch_size=16, num_proc=2) as p:
        kept = [batch["label"] async for batch in p]
        readers: list[Reader] = [lane.reader for lane in p._session._pool.lanes]  # type: ignore[union-attr]
        lent = 1000 * 16 * 8  # bytes of labels, which share blocks with nothing large
        assert await eventually(lambda: sum(reader.nbytes for reader in readers) <= lent, 2)
    assert len(kept) == 1000
    assert all((labels == np.arange(16 * n, 16 * n + 16)).all() for n, labels in enumerate(kept))


async def test_memory_is_used_again_when_nothing_is_held() -> None:
    """An epoch of forty batches in the room of a few."""
    async with Prefetcher(arrays.Images(640), batch_size=16, num_proc=2, num_prefetch=4) as p:
        addresses = {batch["image"].ctypes.data async for batch in p}
    assert len(addresses) < 20


async def test_batches_of_five_times_max_bytes_are_all_right() -> None:
    p = Prefetcher(arrays.Images(320), batch_size=16, num_proc=2, max_bytes=4 * 16 * IMAGE)
    batches = [batch async for batch in p]
    assert len(batches) == 20
    for number, batch in enumerate(batches):
        assert_batch(batch, 16 * number)


def arenas() -> list[str]:
    """Mappings of shared memory of ours in this process."""
    maps = Path("/proc/self/maps").read_text()
    return [line for line in maps.splitlines() if "aioprefetch" in line]


async def test_nothing_is_left_when_nothing_is_held() -> None:
    async with Prefetcher(arrays.Images(32), batch_size=16, num_proc=1) as p:  # starts what stays
        assert len([batch async for batch in p]) == 2
        del p
    gc.collect()
    before, mapped = leftovers(), len(arenas())
    async with Prefetcher(arrays.Images(320), batch_size=16, num_proc=2) as p:
        held = [batch["image"][0] async for batch in p]
    del p
    assert await eventually(lambda: len(arenas()) == mapped + 2, 3), arenas()  # one a worker
    assert [int(image[0, 0]) for image in held] == list(range(0, 320, 16))
    held.clear()
    assert await eventually(lambda: not leftovers().beyond(before), 3), leftovers().beyond(before)
    assert len(arenas()) == mapped


# SharedList


def test_a_shared_list_by_index_and_slice() -> None:
    items = [None, "a", {"b": [1, 2]}, np.arange(3).tolist(), b"", (1,)]
    shared = SharedList(iter(items))
    assert [shared[at] for at in range(-6, 6)] == items * 2
    for part in (slice(None), slice(1, -1), slice(None, None, -2), slice(4, 2), slice(2, 99)):
        assert shared[part] == items[part]
    for at in (6, -7, 10**9):
        with pytest.raises(IndexError, match="6 items"):
            shared[at]
    assert shared[2] is not shared[2]
    assert "a" in shared
    assert shared.index((1,)) == 5
    assert list(reversed(shared)) == items[::-1]


@pytest.mark.parametrize("items", [[], [1], [{"id": n, "text": "x" * n} for n in range(300)]])
def test_a_shared_list_can_be_pickled(items: list[Any]) -> None:
    shared = SharedList(items)
    for protocol in (2, 5):
        back = pickle.loads(pickle.dumps(shared, protocol=protocol))
        assert (len(back), list(back), back.nbytes) == (len(items), items, shared.nbytes)
    buffers: list[Any] = []
    pickled = pickle.dumps(shared, protocol=5, buffer_callback=buffers.append)
    assert list(pickle.loads(pickled, buffers=buffers)) == items
    assert len(pickled) < 2000  # all of it is in the buffers


async def test_a_shared_list_of_arrays_as_a_source() -> None:
    rows: list[dict[str, NDArray[Any]]] = [
        {"x": np.full(50, n), "y": np.array(n)} for n in range(90)
    ]
    p = Prefetcher(SharedList(rows), batch_size=9, num_proc=2)
    batches = [batch async for batch in p]
    assert [int(y) for batch in batches for y in batch["y"]] == list(range(90))
    assert all((batch["x"] == batch["y"][:, None]).all() for batch in batches)
