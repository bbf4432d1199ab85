"""One iteration over several epochs, and the step that the consumer is spared."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from aioprefetch import Prefetcher, SkipItem, TaskError
from tests.helpers import until
from tests.processes import leftovers
from tests.resume.journeys import (
    AsyncRepeating,
    Dawdle,
    Dividing,
    Indexed,
    Repeating,
    Sharded,
)

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

SOURCES: dict[str, dict[str, Any]] = {
    "index": {"source": Indexed(7), "shuffle": True},
    "sampler": {"source": Indexed(7), "sampler": [6, 5, 4, 3, 2, 1, 0]},
    "read here": {"source": Repeating(7), "split": "parent"},
    "async": {"source": AsyncRepeating(7), "split": "parent"},
    "shards": {"source": Sharded(list(range(7)), stateful=False), "num_shards": 3},
    "divided": {"source": Dividing(7), "split": "worker"},
}


@one_loop
@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", SOURCES)
async def test_epochs_follow_each_other_and_do_not_mix(
    kind: str, ordered: bool, num_proc: int
) -> None:
    arguments = {**SOURCES[kind], "ordered": ordered, "num_proc": num_proc, "map_fn": Dawdle(1)}
    if kind == "divided":
        arguments["num_proc"] = 2 if num_proc else 0
    async with Prefetcher(**arguments) as one_by_one:
        expected = [[item async for item in one_by_one] for _ in range(3)]
    p = Prefetcher(**arguments, epochs=3)
    got: list[list[int]] = [[], [], []]
    seen = []
    async for item in p:
        got[p.epoch].append(item)
        seen.append((p.epoch, p.delivered))
    assert seen == [(epoch, n + 1) for epoch in range(3) for n in range(7)]
    if ordered:
        assert got == expected
    assert [sorted(items) for items in got] == [list(range(7))] * 3
    assert p.epoch == 3


@one_loop
async def test_without_an_end() -> None:
    async with Prefetcher(Indexed(3), num_proc=1, epochs=None, batch_size=2) as p:
        iterator = aiter(p)
        batches = [(await anext(iterator)).tolist() for _ in range(101)]
        assert batches == [[0, 1], [2]] * 50 + [[0, 1]]
        assert (p.epoch, p.delivered) == (50, 1)
        await iterator.aclose()
        assert (await anext(aiter(p))).tolist() == [0, 1]
        assert p.epoch == 51


def leave_out(item: int) -> None:
    raise SkipItem


@one_loop
@pytest.mark.parametrize(
    "arguments",
    [
        {"source": Indexed(0)},
        {"source": Repeating(0)},
        {"source": Repeating(0), "split": "parent"},
        {"source": Indexed(3), "map_fn": leave_out},
    ],
)
async def test_an_endless_run_of_empty_epochs_is_an_error(arguments: dict[str, Any]) -> None:
    p = Prefetcher(**arguments, num_proc=0, epochs=None)
    with pytest.raises(RuntimeError, match="epoch 0 gave no batch, and with epochs=None"):
        await anext(aiter(p))
    await p.aclose()
    assert [item async for item in Prefetcher(**arguments, num_proc=0, epochs=4)] == []


@one_loop
async def test_the_window_is_kept_over_the_edge() -> None:
    p = Prefetcher(Indexed(5), num_proc=1, epochs=2, num_prefetch=3)
    async with p:
        iterator = aiter(p)
        for _ in range(4):
            await anext(iterator)
        window = p._live._window  # type: ignore[union-attr]
        assert window is not None
        assert window.in_flight == 3  # the last of this epoch, and two of the next
        assert p.epoch == 0
        assert [item async for item in iterator] == [4, 0, 1, 2, 3, 4]


@one_loop
async def test_there_is_no_gap_between_epochs() -> None:
    """The slow first item of an epoch is made while the last ones of another are consumed."""
    best = 1.0
    for _ in range(3):
        async with Prefetcher(Indexed(8), map_fn=slow_start, num_proc=1, epochs=2) as p:
            gaps, last = [], None
            async for item in p:
                if last is not None:
                    gaps.append(time.monotonic() - last)
                await asyncio.sleep(0.05)
                last = time.monotonic()
                assert item is not None
        best = min(best, gaps[7])
        if best < 0.01:
            break
    assert best < 3 * 0.01


def slow_start(item: int) -> int:
    time.sleep(0.15 if item == 0 else 0.0)
    return item


@one_loop
async def test_a_run_of_epochs_goes_on_to_its_end() -> None:
    p = Prefetcher(Indexed(4), num_proc=0, epochs=3)
    iterator = aiter(p)
    for _ in range(6):
        await anext(iterator)
    state = p.state_dict()
    await iterator.aclose()
    q = Prefetcher(Indexed(4), num_proc=0, epochs=3)
    q.load_state_dict(state)
    assert [item async for item in q] == [2, 3, 0, 1, 2, 3]
    assert q.epoch == 3


@one_loop
async def test_epochs_of_replicas_are_a_number_of_batches() -> None:
    p = Prefetcher(Repeating(5), split="replicate", ordered=False, num_proc=2, epochs=3)
    seen = [(p.epoch, p.delivered) async for _ in p]
    assert seen == [(epoch, n + 1) for epoch in range(3) for n in range(5)]
    assert p.epoch == 3


class Telling(Indexed):
    """Items with the epoch that it was told."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    async def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        before = self.epoch
        await asyncio.sleep(0.001 * (index % 3))
        return before, self.epoch


@pytest.mark.parametrize("num_proc", [0, 1])
async def test_an_awaited_item_sees_one_epoch(num_proc: int) -> None:
    p = Prefetcher(Telling(6), num_proc=num_proc, epochs=4)
    seen = [item async for item in p]
    assert seen == [(epoch, epoch) for epoch in range(4) for _ in range(6)]


def test_epochs_is_checked() -> None:
    with pytest.raises(ValueError, match="epochs must be 1 or more"):
        Prefetcher(Indexed(3), epochs=0)


# transfer


def lift(batch: Any) -> tuple[Any, str]:
    return batch, threading.current_thread().name


@pytest.mark.parametrize("num_proc", [0, 1])
@pytest.mark.parametrize("ordered", [True, False])
async def test_each_batch_is_transferred_on_a_thread_of_its_own(
    num_proc: int, ordered: bool
) -> None:
    async with Prefetcher(Indexed(9), num_proc=num_proc, ordered=ordered, transfer=lift) as p:
        got = [item async for item in p]
    assert sorted(item for item, _ in got) == list(range(9))
    assert {name for _, name in got} == {"aioprefetch-transfer"}
    assert await until(lambda: not _transfer_threads())


def _transfer_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "aioprefetch-transfer"]


@one_loop
async def test_it_is_one_batch_ahead_and_no_more() -> None:
    begun: list[int] = []
    async with Prefetcher(Indexed(9), num_proc=0, transfer=begun.append) as p:
        iterator = aiter(p)
        for number in range(5):
            await anext(iterator)
            await asyncio.sleep(0.05)
            assert begun == list(range(number + 2))
        await iterator.aclose()


@one_loop
async def test_it_overlaps_with_the_consumer() -> None:
    def slow(item: int) -> int:
        time.sleep(0.02)
        return item

    best = 10.0
    for _ in range(3):
        async with Prefetcher(Indexed(20), num_proc=0, transfer=slow) as p:
            began = time.monotonic()
            async for _ in p:
                await asyncio.sleep(0.02)
            best = min(best, time.monotonic() - began)
    assert best < 0.8 * 20 * 0.04


@one_loop
async def test_what_it_raises_is_that_batch_s_error() -> None:
    def fail(item: int) -> int:
        if item == 2:
            raise ValueError("no room")
        return item

    p = Prefetcher(Indexed(5), num_proc=0, transfer=fail)
    iterator = aiter(p)
    assert [await anext(iterator) for _ in range(2)] == [0, 1]
    with pytest.raises(TaskError, match="transfer failed: ValueError: no room") as caught:
        await anext(iterator)
    assert caught.value.stage == "transfer"
    assert caught.value.indices == (2,)
    assert [item async for item in iterator] == [3, 4]


@one_loop
async def test_a_state_does_not_count_what_is_being_transferred() -> None:
    async with Prefetcher(Indexed(9), num_proc=1, transfer=lift) as p:
        iterator = aiter(p)
        await anext(iterator)
        await asyncio.sleep(0.05)
        assert p.state_dict()["delivered"] == [[0, 1, 1]]


@one_loop
async def test_cancelling_the_wait_for_it_loses_nothing() -> None:
    def slow(item: int) -> int:
        time.sleep(0.03)
        return item

    async with Prefetcher(Indexed(6), num_proc=0, transfer=slow) as p:
        iterator = aiter(p)
        got: list[int] = []
        while len(got) < 6:
            try:
                async with asyncio.timeout(0.007):
                    got.append(await anext(iterator))
            except TimeoutError:
                pass
        assert got == list(range(6))


@one_loop
async def test_closing_waits_for_it_within_the_deadline() -> None:
    release = threading.Event()
    before = leftovers()
    p = Prefetcher(Indexed(6), num_proc=0, transfer=lambda _: release.wait(), shutdown_timeout=0.2)
    await p.start()
    waiting = asyncio.ensure_future(anext(aiter(p)))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    with pytest.warns(ResourceWarning, match="closing left a transfer behind, in "):
        await p.aclose()
    assert time.monotonic() - began < 0.2 + 0.5
    with pytest.raises(RuntimeError):
        await waiting
    release.set()
    for thread in threading.enumerate():
        if thread.name == "aioprefetch-transfer":
            thread.join(5)
    assert not leftovers().beyond(before)


def test_it_is_no_async_function() -> None:
    async def transfer(batch: Any) -> Any:
        return batch

    with pytest.raises(TypeError, match="cannot be async: give a plain function"):
        Prefetcher(Indexed(3), transfer=transfer)
