"""Shared memory: the shipped source, the page, and blocks that are lent and freed."""

import gc
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioprefetch._arena import Block, Reader, Space, Writer
from aioprefetch._memory import Shipment, memory_file, open_shipment, refuse_to_exhaust
from aioprefetch._page import Page

sizes = st.integers(0, 5000) | st.sampled_from([0, 1, 63, 64, 65, mmap.PAGESIZE, 2**20 + 1])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# The shipment


@given(st.lists(sizes, max_size=6))
@settings(max_examples=50)
def test_a_shipment_comes_as_it_went(sizes: list[int]) -> None:
    segments = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    shipment = Shipment(segments)
    views = open_shipment(shipment.fd, shipment.extents)
    assert [bytes(view) for view in views] == segments
    assert all(extent.offset % 64 == 0 for extent in shipment.extents)
    shipment.close()


def test_readers_write_into_copies_of_their_own() -> None:
    shipment = Shipment([b"abc", np.zeros(10**5, np.uint8).data])
    first, second = (open_shipment(shipment.fd, shipment.extents) for _ in range(2))
    np.frombuffer(first[1], np.uint8)[:] = 7
    first[0][0] = ord("x")
    assert bytes(second[0]) == b"abc"
    assert not np.frombuffer(second[1], np.uint8).any()
    third = open_shipment(shipment.fd, shipment.extents)
    assert bytes(third[0]) == b"abc"
    shipment.close()


def test_a_child_maps_the_same_pages_and_keeps_its_own() -> None:
    shipment = Shipment([bytes(10**5)])
    pid = os.fork()
    if pid == 0:
        [view] = open_shipment(shipment.fd, shipment.extents)
        view[:] = b"\x01" * len(view)
        os._exit(view[5])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    [view] = open_shipment(shipment.fd, shipment.extents)
    assert not any(view)
    shipment.close()


def test_closing_a_shipment_gives_its_descriptor_back() -> None:
    before = open_descriptors()
    shipment = Shipment([b"abc"])
    shipment.close()
    shipment.close()
    assert open_descriptors() == before


def test_more_than_there_is_is_refused_by_its_bytes() -> None:
    refuse_to_exhaust(0)
    with pytest.raises(MemoryError, match=str(2**60)):
        refuse_to_exhaust(2**60)


# The page


@pytest.fixture
def pages() -> Iterator[tuple[Page, Page]]:
    """The same page as its worker and its parent see it."""
    fd = memory_file("test")
    os.truncate(fd, Page.nbytes(3))
    memories = [mmap.mmap(fd, Page.nbytes(3)) for _ in range(2)]
    yield Page(memories[0], 3), Page(memories[1], 3)
    os.close(fd)


def test_items_in_hand_are_read_by_the_other_end(pages: tuple[Page, Page]) -> None:
    worker, parent = pages
    assert parent.read() == []
    records = [worker.begin(ticket, 10 * ticket) for ticket in (1, 2, 3)]
    assert sorted((item.ticket, item.position) for item in parent.read()) == [
        (1, 10),
        (2, 20),
        (3, 30),
    ]
    worker.end(records[1])
    assert {item.ticket for item in parent.read()} == {1, 3}
    again = worker.begin(4, 40)
    assert {item.ticket for item in parent.read()} == {1, 3, 4}
    for record in (records[0], records[2], again):
        worker.end(record)
    assert parent.read() == []


@given(st.lists(st.integers(0, 2), max_size=30))
def test_the_page_holds_what_is_begun_and_not_ended(steps: list[int]) -> None:
    page = Page(mmap.mmap(-1, Page.nbytes(3)), 3)
    held: dict[int, int] = {}
    for ticket, step in enumerate(steps, 1):
        if step and len(held) < 3:
            held[ticket] = page.begin(ticket, 7)
        elif held:
            page.end(held.pop(min(held)))
        assert {item.ticket for item in page.read()} == set(held)


def test_a_task_is_claimed_or_withdrawn(pages: tuple[Page, Page]) -> None:
    worker, parent = pages
    parent.offer(1)
    assert worker.claim(1)
    assert not parent.withdraw(1)
    parent.offer(2)
    assert parent.withdraw(2)
    assert not worker.claim(2)


def test_claims_and_withdrawals_at_once_never_both_hold() -> None:
    """Both may give way; a task that both had would run twice."""
    page = Page(mmap.mmap(-1, Page.nbytes(1)), 1)
    count = 3000
    claimed, withdrawn = set[int](), set[int]()
    barrier = threading.Barrier(2)

    def claim() -> None:
        for ticket in range(count):
            barrier.wait()
            if page.claim(ticket):
                claimed.add(ticket)
            barrier.wait()

    thread = threading.Thread(target=claim)
    thread.start()
    for ticket in range(count):
        page.offer(ticket)
        barrier.wait()
        if page.withdraw(ticket):
            withdrawn.add(ticket)
        barrier.wait()
    thread.join()
    assert not claimed & withdrawn


# Blocks


@pytest.fixture
def space() -> Iterator[Space]:
    space = Space.create(1)
    yield space
    space.close_fd()


def fill(space: Space, block: Block, value: int) -> None:
    space.array(block)[:] = value


def test_a_block_is_taken_until_its_last_view_dies(space: Space) -> None:
    writer, reader = Writer(space), Reader(space)
    block = writer.take(1000)
    assert block is not None
    root = reader.lend(block)
    part = root[10:20].reshape(2, 5)
    del root
    gc.collect()
    other = writer.take(1000)
    assert other is not None
    assert other.offset != block.offset
    assert (reader.nbytes, [b.number for b in reader.lent]) == (1000, [block.number])
    del part
    gc.collect()
    assert reader.nbytes == 0
    again = writer.take(900)
    assert again is not None
    assert again.offset == block.offset


def test_views_outlive_everything_that_lent_them() -> None:
    space = Space.create(1)
    writer, reader = Writer(space), Reader(space)
    block = writer.take(10**6)
    assert block is not None
    fill(space, block, 9)
    root = reader.lend(block)
    space.close_fd()
    reader.abandon()
    del space, writer, reader
    gc.collect()
    assert (root == 9).all()
    root[:] = 1
    assert root.flags.writeable


def test_a_block_that_was_not_sent_can_be_taken_again(space: Space) -> None:
    writer = Writer(space)
    first = writer.take(100)
    assert first is not None
    writer.free(first)
    assert writer.take(100) == first


def test_an_array_is_made_in_place_and_found_by_its_buffer(space: Space) -> None:
    writer = Writer(space)
    array = writer.empty((100, 100), np.dtype(np.float32))
    block = writer.opened(array.data.cast("B"))
    assert block is not None
    assert block.nbytes == array.nbytes
    assert np.shares_memory(array, space.array(block))
    assert writer.opened(array.data.cast("B")) is None  # sent once


def test_abandoned_memory_is_given_back_but_for_what_is_lent(space: Space) -> None:
    writer, reader = Writer(space), Reader(space)
    blocks = [writer.take(2**20) for _ in range(8)]
    for number, block in enumerate(blocks):
        assert block is not None
        fill(space, block, number + 1)
    kept = blocks[3]
    assert kept is not None
    root = reader.lend(kept)
    before = os.fstat(space.fd).st_blocks
    reader.abandon()
    assert os.fstat(space.fd).st_blocks * 512 < 3 * 2**20 < before * 512
    assert (root == 4).all()


def test_stale_blocks_are_punched(space: Space) -> None:
    writer = Writer(space)
    block = writer.take(8 * 2**20)
    assert block is not None
    fill(space, block, 1)
    writer.free(block)
    held = os.fstat(space.fd).st_blocks
    writer.trim(now=True)
    assert os.fstat(space.fd).st_blocks == held  # it is warm
    for kind in writer._classes:
        kind.taken = [0.0] * len(kind.taken)
    writer.trim(now=True)
    assert os.fstat(space.fd).st_blocks * 512 < held * 512 - 7 * 2**20
    assert writer.take(8 * 2**20) == block


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300_000)), max_size=40)


@given(steps)
@settings(max_examples=60)
def test_no_byte_is_lent_twice(steps: list[tuple[int, int]]) -> None:
    """Blocks are taken, filled, lent and let go in any order, and keep what was put in."""
    space = Space.create(1)
    writer, reader = Writer(space), Reader(space)
    held: dict[int, Any] = {}
    for number, (step, size) in enumerate(steps):
        if step == 0 and held:
            held.pop(min(held))
            continue
        block = writer.take(size)
        assert block is not None
        assert block.nbytes == size
        fill(space, block, number % 251)
        if step == 1:
            writer.free(block)
        else:
            held[number] = reader.lend(block)
        assert all((root == key % 251).all() for key, root in held.items())
    assert sorted(b.nbytes for b in reader.lent) == sorted(root.nbytes for root in held.values())
    space.close_fd()


def test_more_than_the_memory_is_a_memory_error_that_names_the_bytes(space: Space) -> None:
    with pytest.raises(MemoryError, match=str(2**35)):
        Writer(space).take(2**35)


def test_larger_than_the_address_space_is_none(space: Space) -> None:
    assert Writer(space).take(2**40) is None


def test_a_space_gives_its_descriptor_back() -> None:
    before = open_descriptors()
    space = Space.create(4)
    space.close_fd()
    space.close_fd()
    del space
    gc.collect()
    assert open_descriptors() == before
