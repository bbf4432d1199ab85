"""The window is exact: workers and the consumer write one journal, whose order tells."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import Prefetcher, PrefetchIterator
from tests.datasets import (
    AsyncNoted,
    AsyncNotedFlow,
    Journal,
    Noted,
    NotedFlow,
    Numbers,
    double,
)
from tests.helpers import collect, until

SIZE = 2  # items a batch
LENGTH = 120  # items an epoch, more than any window here
QUICK, SLOW = (0.0,), (0.0, 0.002, 0.0, 0.006)  # seconds an item

SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": (Noted, {}),
    "async map": (AsyncNoted, {}),
    "parent": (NotedFlow, {"split": "parent"}),
    "async parent": (AsyncNotedFlow, {"split": "parent"}),
    "shard": (NotedFlow, {"split": "shard", "num_shards": 3}),
    "replicate": (NotedFlow, {"split": "replicate", "ordered": False}),
}
ORDERED = [(kind, True) for kind in SOURCES if kind != "replicate"]
UNORDERED = [(kind, False) for kind in SOURCES]

workers = pytest.mark.parametrize("num_proc", [0, 2])


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


def prefetcher(
    kind: str, journal: Journal, delays: tuple[float, ...] = QUICK, **arguments: Any
) -> Prefetcher:
    make, given = SOURCES[kind]
    return Prefetcher(make(LENGTH, journal, delays), **{"batch_size": SIZE, **arguments, **given})


def begun(journal: Journal) -> int:
    """Batches begun: items that were, over the items of a batch, rounded up."""
    return -(-sum(line[0] == "item" for line in journal.lines()) // SIZE)


def batch_of(item: int, kind: str) -> int:
    """A name for the batch that holds the item."""
    if kind == "shard":
        return item % 3 * LENGTH + item // 3 // SIZE
    return item // SIZE


def check_bound(journal: Journal, kind: str, num_prefetch: int) -> None:
    """At every moment, batches begun ≤ ``num_prefetch`` + calls of ``__anext__`` entered."""
    batches: set[int] = set()
    entered = 0
    for word, number in journal.lines():
        if word == "anext":
            entered += 1
        else:
            batches.add(batch_of(int(number), kind))
        assert len(batches) <= num_prefetch + entered
    assert entered > 0


async def consume(
    batches: PrefetchIterator, journal: Journal, number: int, seconds: float = 0.0
) -> None:
    for step in range(number):
        journal.add("anext", step)
        await anext(batches)
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("seconds", [0.0, 0.01], ids=["fast", "slow"])
@pytest.mark.parametrize(
    ("kind", "ordered"), [pair for pair in ORDERED + UNORDERED if pair[0] != "replicate"]
)
async def test_no_more_is_begun_than_was_asked_for(
    kind: str, ordered: bool, seconds: float, journal: Journal
) -> None:
    p = prefetcher(kind, journal, SLOW, num_proc=2, num_prefetch=3, ordered=ordered)
    async with p:
        await consume(aiter(p), journal, 16, seconds)
    check_bound(journal, kind, 3)


async def stays(journal: Journal, batches: int) -> None:
    """So many batches are begun within 2 s, and no more later."""
    assert await until(lambda: begun(journal) >= batches), begun(journal)
    await asyncio.sleep(0.3)
    assert begun(journal) == batches


@pytest.mark.parametrize(
    ("kind", "ordered", "num_proc"),
    [(*pair, 2) for pair in ORDERED + UNORDERED] + [(*pair, 0) for pair in ORDERED],
)
async def test_a_stopped_consumer_finds_the_window_full(
    kind: str, ordered: bool, num_proc: int, journal: Journal
) -> None:
    p = prefetcher(kind, journal, num_proc=num_proc, num_prefetch=5, ordered=ordered)
    async with p:
        batches = aiter(p)
        assert await until(lambda: begun(journal) == 5)  # before any is asked for
        for _ in range(3):
            await anext(batches)
        await stays(journal, 3 + 5)


@workers
@pytest.mark.parametrize("kind", ["map", "async map", "parent", "async parent"])
async def test_a_stopped_consumer_finds_the_rest_of_the_epoch(
    kind: str, num_proc: int, journal: Journal
) -> None:
    async with prefetcher(kind, journal, num_proc=num_proc, num_prefetch=100) as p:
        batches = aiter(p)
        await anext(batches)
        await stays(journal, LENGTH // SIZE)
        assert len(await collect(batches)) == LENGTH // SIZE - 1


@pytest.mark.parametrize(
    ("kind", "arguments", "items"),
    [
        ("map", {"num_proc": 2}, 4 * 2 * SIZE),
        ("map", {"num_proc": 0}, 4 * SIZE),
        ("map", {"num_proc": 1, "batch_size": None}, LENGTH),
        ("async map", {"num_proc": 2, "concurrency": 10}, 2 * 10 * 2),
        ("parent", {"num_proc": 2, "batch_size": None}, 4 * 2),
    ],
)
async def test_the_default(
    kind: str, arguments: dict[str, Any], items: int, journal: Journal
) -> None:
    async with prefetcher(kind, journal, **arguments) as p:
        batches = aiter(p)
        await stays(journal, items // SIZE)
        await batches.aclose()


async def test_starting_prefetches_nothing(journal: Journal) -> None:
    async with prefetcher("map", journal, num_proc=1):
        await stays(journal, 0)


async def test_a_pass_that_is_not_opened_prefetches_from_its_first_anext(journal: Journal) -> None:
    async with aiter(prefetcher("map", journal, num_proc=1, num_prefetch=5)) as batches:
        await stays(journal, 0)
        await anext(batches)
        await stays(journal, 1 + 5)


async def test_a_sampler_is_read_no_further_ahead(journal: Journal) -> None:
    keys = NotedFlow(LENGTH, journal)
    source = Numbers(LENGTH)
    async with Prefetcher(source, sampler=keys, batch_size=SIZE, num_prefetch=3) as p:
        batches = aiter(p)
        await anext(batches)
        await stays(journal, 1 + 3)


@pytest.mark.parametrize("kind", ["parent", "async parent"])
async def test_a_slow_source_in_the_parent_is_asked_for_what_is_wanted(
    kind: str, journal: Journal
) -> None:
    """Reading that is slower than the consumer never runs ahead of it either."""
    async with prefetcher(kind, journal, (0.004,), num_proc=1, num_prefetch=2) as p:
        await consume(aiter(p), journal, 15)
    check_bound(journal, kind, 2)


# Consumers


@workers
@pytest.mark.parametrize("ordered", [True, False])
async def test_ten_tasks_share_one_iterator(num_proc: int, ordered: bool) -> None:
    async with Prefetcher(Numbers(200), num_proc=num_proc, ordered=ordered) as p:
        batches = aiter(p)
        shares = await asyncio.gather(*(collect(batches) for _ in range(10)))
    assert Counter(item for share in shares for item in share) == Counter(range(200))


async def patiently(batches: PrefetchIterator, seconds: float) -> tuple[list[Any], int]:
    """All batches, each call under a time-out; and how often it ran out."""
    items: list[Any] = []
    late = 0
    with suppress(StopAsyncIteration):
        while True:
            try:
                async with asyncio.timeout(seconds):
                    items.append(await anext(batches))
            except TimeoutError:
                late += 1
    return items, late


@workers
@pytest.mark.parametrize("seconds", [0.002, 0.0])
@pytest.mark.parametrize("is_open", [True, False])
async def test_a_timeout_loses_and_repeats_nothing(
    num_proc: int, seconds: float, is_open: bool
) -> None:
    p = Prefetcher(Numbers(60, [0.0, 0.003, 0.008]), num_proc=num_proc)
    if is_open:
        await p.start()
    try:
        async with asyncio.timeout(20):
            items, late = await patiently(aiter(p), seconds)
    finally:
        await p.aclose()
    assert items == list(range(60))
    assert late > 0


@workers
async def test_ready_batches_let_other_tasks_run(num_proc: int, journal: Journal) -> None:
    number, turns = 4000, 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    source = Noted(number, journal)
    async with Prefetcher(source, num_proc=num_proc, num_prefetch=number) as p:
        batches = aiter(p)
        assert await until(lambda: begun(journal) * SIZE == number, 20)
        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        before = turns
        for item in range(number - 10):  # the last may not have come yet
            assert await anext(batches) == item
        task.cancel()
        assert turns > before + 2


@pytest.mark.parametrize("num_proc", [0, 1])
async def test_a_queue_is_read_no_faster_than_the_window_drains(num_proc: int) -> None:
    queue: asyncio.Queue[int | None] = asyncio.Queue()
    for number in [*range(100), None]:
        queue.put_nowait(number)

    async def messages() -> AsyncIterator[int]:  # of a broker, or a websocket
        while (message := await queue.get()) is not None:
            yield message

    p = Prefetcher(messages, map_fn=double, num_proc=num_proc, num_prefetch=4)
    async with p:
        it = aiter(p)
        for count in range(1, 20):
            assert await anext(it) == 2 * (count - 1)
            await asyncio.sleep(0.01)
            assert 101 - queue.qsize() <= count + 4, "what was delivered, and the window"
        assert [item async for item in it] == [2 * number for number in range(19, 100)]
