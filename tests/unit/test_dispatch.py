"""Who gets what, and when, and what lies in shared memory."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioprefetch import Prefetcher, SharedList, WorkerDied
from aioprefetch._arena import BLOCKS, Block, Reader, Space, Writer
from aioprefetch._codec import decode
from aioprefetch._memory import available, refuse_to_exhaust
from aioprefetch._messages import Report, Task
from aioprefetch._page import CLAIMS
from aioprefetch._payload import Intake
from aioprefetch._report import Reporter
from tests import arrays


@pytest.fixture
def space() -> Iterator[Space]:
    space = Space.create(4)
    yield space
    space.close_fd()


# An arena, both of its ends in this process


def test_a_block_is_taken_again_only_when_its_last_view_is_dead(space: Space) -> None:
    writer, reader = Writer(space), Reader(space)
    first = writer.take(100_000)
    assert first is not None
    root = reader.lend(first)
    view = root[10:20]
    del root
    second = writer.take(100_000)
    assert second is not None
    assert second.offset != first.offset
    del view
    assert writer.take(100_000) == first
    assert reader.lent == []


def test_blocks_are_aligned_and_do_not_overlap(space: Space) -> None:
    writer = Writer(space)
    blocks = [writer.take(size) for size in (1, 63, 64, 65, 4096, 100_000, 1 << 20, 3 << 20) * 3]
    spans = sorted((block.offset, block.nbytes) for block in blocks if block is not None)
    assert len(spans) == len(blocks)
    assert all(offset % 64 == 0 for offset, _ in spans)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))


def test_more_blocks_than_there_are_entries_are_refused_not_overlaid(space: Space) -> None:
    writer = Writer(space)
    blocks = [writer.take(64) for _ in range(BLOCKS)]
    assert None not in blocks
    assert writer.take(64) is None
    assert writer.take(65) is not None
    kept = blocks[0]
    assert kept is not None
    assert min(block.offset for block in blocks if block is not None) >= space.blocks


def test_what_no_class_is_large_enough_for_is_refused(space: Space) -> None:
    assert Writer(space).take(1 << 50) is None


def test_an_array_made_in_place_is_recognised(space: Space) -> None:
    writer = Writer(space)
    array = writer.empty((64, 1024), np.dtype(np.float32))
    block = writer.opened(array.data)
    assert block is not None
    assert block.nbytes == array.nbytes
    assert writer.opened(array.data) is None
    array[:] = 7
    assert (space.array(block).view(np.float32) == 7).all()


def test_long_unused_memory_goes_back(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(space)
    block = writer.take(8 << 20)
    assert block is not None
    space.array(block)[:] = 1
    writer.free(block)
    before = os.fstat(space.fd).st_blocks
    monkeypatch.setattr("aioprefetch._arena.STALE", 0.0)
    writer.trim(now=True)
    assert os.fstat(space.fd).st_blocks < before - (7 << 20) // 512


def test_memory_that_is_not_there_is_refused_with_the_bytes() -> None:
    room = available()
    assert room is not None
    with pytest.raises(MemoryError, match=str(room * 2)):
        refuse_to_exhaust(room * 2)


def test_a_claim_is_never_won_by_both(space: Space) -> None:
    page = space.page
    for ticket in range(1, 2 * CLAIMS):
        page.offer(ticket)
        if ticket % 2:
            assert page.claim(ticket)
            assert not page.withdraw(ticket)
        else:
            assert page.withdraw(ticket)
            assert not page.claim(ticket)


# End to end


async def test_every_batch_is_right_while_all_are_held_and_after_closing() -> None:
    async with Prefetcher(arrays.Images(640), batch_size=16, num_proc=2) as p:
        batches = [batch async for batch in p]
    del p
    assert len(batches) == 40
    for number, batch in enumerate(batches):
        labels = np.arange(16 * number, 16 * number + 16)
        np.testing.assert_array_equal(batch["label"], labels)
        np.testing.assert_array_equal(batch["image"][:, 0, 0], labels)
        batch["image"] += 1
    assert all((batch["image"][:, -1, -1] == batch["label"] + 1).all() for batch in batches)


async def test_kept_labels_do_not_keep_images() -> None:
    async with Prefetcher(arrays.Images(640), batch_size=16, num_proc=2) as p:
        labels = [batch["label"] async for batch in p]
        lent: list[Block] = []
        for lane in p._session._pool.lanes:  # type: ignore[union-attr]
            lent += lane.reader.lent
        assert len(labels) == 40
        assert sum(block.nbytes for block in lent) < 40 * 4096


async def test_five_times_max_bytes_may_be_held() -> None:
    nbytes = 16 * arrays.SIDE**2 * 4
    p = Prefetcher(arrays.Images(160), batch_size=16, num_proc=2, max_bytes=2 * nbytes)
    batches = [batch async for batch in p]
    assert [batch["label"][0] for batch in batches] == list(range(0, 160, 16))


async def test_the_window_is_bounded_in_bytes() -> None:
    nbytes = 16 * arrays.SIDE**2 * 4
    limit = 2 * nbytes + nbytes // 2
    async with Prefetcher(
        arrays.Images(640), batch_size=16, num_proc=2, max_bytes=limit, num_prefetch=20
    ) as p:
        await anext(aiter(p))
        iterator = aiter(p)
        await anext(iterator)
        await asyncio.sleep(0.2)
        assert iterator._iteration._window.in_flight == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("value", arrays.VALUES, ids=str)
async def test_results_come_back_equal(value: Any) -> None:
    (result,) = [item async for item in Prefetcher([value], num_proc=1)]
    arrays.assert_same(result, value)


# Dispatch


@pytest.mark.parametrize("ordered", [True, False])
async def test_no_task_runs_twice(ordered: bool, tmp_path: Path) -> None:
    source = arrays.Journal(tmp_path / "journal", 900, {0: 0.3, 300: 0.2, 301: 0.2})
    p = Prefetcher(source, num_proc=3, ordered=ordered)
    assert sorted([item async for item in p]) == list(range(900))
    runs = Counter(source.lines())
    assert set(runs.values()) == {1}
    assert len(runs) == 900


async def test_a_slow_item_holds_up_its_neighbours_for_milliseconds() -> None:
    lead = 0.0
    for _ in range(3):
        p = Prefetcher(arrays.Slow(560, {500: 1.0}), num_proc=2, ordered=False)
        arrived = {item: time.monotonic() async for item in p}
        assert len(arrived) == 560
        neighbours = [arrived[item] for item in range(480, 520) if item != 500]
        lead = max(lead, arrived[500] - max(neighbours))
    assert lead > 0.5


async def test_what_a_dead_worker_had_not_begun_is_done_by_another() -> None:
    died, items = [], []
    async with Prefetcher(arrays.Fatal(400, 100), num_proc=2, retries=0) as p:
        iterator = aiter(p)
        while True:
            try:
                items.append(await anext(iterator))
            except WorkerDied as error:
                died.append(error)
            except StopAsyncIteration:
                break
    assert [error.index for error in died] == [100]
    assert sorted(items) == [item for item in range(400) if item != 100]


# SharedList


async def test_a_shared_list_is_a_list_of_its_items() -> None:
    records = [{"id": number, "text": "x" * (number % 7)} for number in range(1000)]
    shared = SharedList(records)
    assert len(shared) == 1000
    assert list(shared) == records
    assert shared[-1] == records[-1]
    assert shared[10:20:3] == records[10:20:3]
    with pytest.raises(IndexError, match="1000"):
        shared[1000]
    assert [item async for item in Prefetcher(shared, num_proc=2)] == records


# Claims, from two processes


def _claim_all(space: Space, results: mmap.mmap, count: int) -> None:
    """The worker's side: claim each ticket when it is its turn."""
    for ticket in range(1, count + 1):
        while results[0] != ticket % 251:
            pass
        results[4096 + ticket] = 1 + space.page.claim(ticket)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_claim_is_never_won_by_both_of_two_processes(space: Space) -> None:
    count = CLAIMS + 1000  # slots are used again
    results = mmap.mmap(-1, 4096 * 3)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        _claim_all(space, results, count)
        os._exit(0)
    won = Counter[tuple[bool, bool]]()
    deadline = time.monotonic() + 15

    def wait_for_worker(ticket: int) -> None:
        while not results[4096 + ticket]:
            assert time.monotonic() < deadline

    for ticket in range(1, count + 1):
        space.page.offer(ticket)
        withdrawn = ticket % 10 == 1 and space.page.withdraw(ticket)  # before it can be claimed
        results[0] = ticket % 251
        if ticket % 10 == 2:  # after it has been
            wait_for_worker(ticket)
        for _ in range(ticket % 13):  # so that sometimes one is first and sometimes the other
            pass
        withdrawn = withdrawn or space.page.withdraw(ticket)
        wait_for_worker(ticket)
        won[results[4096 + ticket] == 2, withdrawn] += 1
        assert bool(space.page.begun()[ticket % CLAIMS])
    os.waitpid(pid, 0)
    assert won[True, True] == 0
    assert won[True, False] >= count // 10
    assert won[False, True] >= count // 10


def test_what_is_declined_while_a_report_is_sent_is_reported_too(space: Space) -> None:
    """Reports are sent by a thread of their own, for as long as the parent lets it wait."""
    page = space.page
    reports: list[Report] = []
    sending, go_on = threading.Event(), threading.Event()

    def send(frame: Any) -> None:
        reports.append(decode(frame[:1]))
        sending.set()
        assert go_on.wait(5)

    def run(ticket: int) -> None:
        page.offer(ticket)
        page.withdraw(ticket)
        asyncio.run(reporter.run((ticket, tuple(Task(0, 0, 0, 0, 1)), [0]), []))

    intake = Intake(None, keeps=False)
    reporter = Reporter(None, intake, page, send)  # type: ignore[arg-type] # it has nothing to run
    run(1)
    sender = threading.Thread(target=reporter.send)
    sender.start()
    assert sending.wait(5)
    other = threading.Thread(target=run, args=(2,))
    other.start()
    other.join(0.2)
    go_on.set()
    other.join()
    sender.join()
    reporter.send()
    assert [ticket for report in reports for ticket in report.declined] == [1, 2]


# Slow, stopped and dead workers


async def test_a_slow_item_among_quick_ones_is_waited_for_alone() -> None:
    """All that is planned behind it comes before it, as soon as it would without it."""
    leads = []
    for _ in range(3):
        async with Prefetcher(arrays.Slow(2000, {500: 1.0}), num_proc=2, ordered=False) as p:
            arrived = {item: time.monotonic() async for item in p}
        assert len(arrived) == 2000
        slow = arrived.pop(500)
        leads.append(slow - max(arrived.values()))
        if leads[-1] > 0.4:
            return
    pytest.fail(f"the last of the others came only {leads} s before it")


async def test_what_is_finished_is_reported_while_a_slow_item_runs() -> None:
    """By the only worker, which is in the middle of a message."""
    async with Prefetcher(arrays.Slow(600, {397: 0.7}), num_proc=1, num_prefetch=100) as p:
        arrived = {item: time.monotonic() async for item in p}
    assert list(arrived) == list(range(600))
    assert arrived[397] - arrived[396] > 0.5


async def test_a_stopped_worker_holds_up_no_other() -> None:
    """At most what it had begun: here it was idle, and nothing was."""
    async with Prefetcher(range(1000), num_proc=3, ordered=False, num_prefetch=60) as p:
        stopped = p._session._pool.lanes[0].pid  # type: ignore[union-attr]
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        items = set()
        try:
            async with asyncio.timeout(2):
                async for item in p:
                    items.add(item)
        except TimeoutError:
            pass
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert len(items) >= 999, len(items)


async def test_only_what_a_dead_worker_had_begun_runs_twice(tmp_path: Path) -> None:
    source = arrays.BegunBy(tmp_path / "journal", 600, 150)
    died: list[WorkerDied] = []
    items: list[int] = []
    async with Prefetcher(source, num_proc=2, ordered=False, retries=0) as p:
        iterator = aiter(p)
        while True:
            try:
                items.append(await anext(iterator))
            except WorkerDied as error:
                died.append(error)
            except StopAsyncIteration:
                break
    assert [error.index for error in died] == [150]
    assert sorted(items) == [item for item in range(600) if item != 150]
    times = Counter(item for item, _ in source.begun())
    first = dict(reversed(source.begun()))
    assert {first[item] for item in times if times[item] > 1} <= {first[150]}  # the dead one


@pytest.mark.parametrize("ordered", [True, False])
async def test_no_task_runs_twice_while_workers_are_stopped_and_go_on(
    ordered: bool, tmp_path: Path
) -> None:
    """Tasks are withdrawn, claimed and declined again and again."""
    seconds = dict.fromkeys(range(0, 1500, 50), 0.02)
    source = arrays.Journal(tmp_path / "journal", 1500, seconds)
    async with Prefetcher(source, num_proc=3, ordered=ordered, num_prefetch=90) as p:
        pids = [lane.pid for lane in p._session._pool.lanes]  # type: ignore[union-attr]

        async def disturb() -> None:
            for pid in itertools.cycle(pids):
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(0.015)
                finally:
                    os.kill(pid, signal.SIGCONT)

        disturbing = asyncio.create_task(disturb())
        async with asyncio.timeout(20):
            items = [item async for item in p]
        assert not disturbing.done()
        disturbing.cancel()
        await asyncio.wait([disturbing])
    assert (items if ordered else sorted(items)) == list(range(1500))
    assert sorted(source.lines()) == list(range(1500))
