"""The timeline, read back: valid, nested, and of the same sums as the statistics."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import Prefetcher, ProcessPool, Stats
from tests.datasets import Numbers
from tests.helpers import collect, until

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= -1e6
        assert event.get("dur", 0) >= 0
    return events


def spans(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def total(events: list[Event], name: str) -> float:
    return float(sum(event["dur"] for event in events if event["name"] == name)) / 1e6


def assert_nested(events: list[Event]) -> None:
    """On each row a span is within another or apart from it."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for row in rows.values():
        open_until: list[float] = []
        for start, length in sorted(row):
            while open_until and open_until[-1] <= start + 0.01:
                open_until.pop()
            assert not open_until or start - length <= open_until[-1] + 0.01
            open_until.append(start - length)


def rest(item: int) -> int:
    time.sleep(0.003)
    return item


async def rest_async(item: int) -> int:
    await asyncio.sleep(0.003)
    return item


async def traced(path: Path, **arguments: Any) -> tuple[list[Event], Stats]:
    async with Prefetcher(trace=path, **arguments) as p:
        async for _ in p:
            await asyncio.sleep(0.001)
        stats = p.stats()
    return events_of(path), stats


async def test_it_shows_what_the_statistics_add_up(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    events, stats = await traced(path, source=Numbers(40), map_fn=rest, batch_size=4, num_proc=2)
    assert_nested(events)
    assert len(spans(events, "task")) == stats.delivered == 10
    assert len(spans(events, "fetch")) == len(spans(events, "map")) == 40
    assert len(spans(events, "collate")) == 10
    assert {event["args"]["batch"] for event in spans(events, "task")} == set(range(10))
    consumer = [event for event in events if event["pid"] == 0]
    workers = [event for event in events if event["pid"] != 0]
    assert total(consumer, "wait") == pytest.approx(stats.wait, abs=1e-3)
    worked = stats.busy.workers * stats.elapsed * 2
    assert total(workers, "task") == pytest.approx(worked, rel=0.05)
    consumed = stats.busy.consumer * stats.elapsed
    assert total(consumer, "consume") == pytest.approx(consumed, rel=0.1, abs=2e-3)


async def test_it_shows_the_window_and_the_names(tmp_path: Path) -> None:
    events, _ = await traced(tmp_path / "run.json", source=Numbers(40), num_proc=2, num_prefetch=6)
    depths = [event["args"] for event in events if event["ph"] == "C"]
    assert max(depth["ready"] + depth["requested"] for depth in depths) == 6
    assert all(min(depth.values()) >= 0 for depth in depths)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    here = {"this process", "consumer", "source"}
    assert here < names <= here | {"worker 0", "worker 1"}  # one may have done it all


async def test_awaited_items_overlap(tmp_path: Path) -> None:
    events, stats = await traced(
        tmp_path / "run.json", source=Numbers(40), map_fn=rest_async, batch_size=4, num_proc=1
    )
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)
    assert sum(event["name"] == "map" for event in begun.values()) == 40
    assert sum(event["name"] == "task" for event in begun.values()) == stats.delivered


def source() -> Iterator[int]:
    for item in range(10):
        time.sleep(0.002)
        yield item


@pytest.mark.parametrize("num_proc", [0, 1])
async def test_it_shows_what_is_read_here(tmp_path: Path, num_proc: int) -> None:
    events, stats = await traced(
        tmp_path / "run.json", source=source, split="parent", map_fn=rest, num_proc=num_proc
    )
    assert_nested(events)
    read = stats.busy.source * stats.elapsed
    assert total(events, "read") == pytest.approx(read, rel=0.05)
    assert total(events, "read") >= 0.02
    assert len(spans(events, "map")) == 10


async def test_it_shows_streams(tmp_path: Path) -> None:
    events, _ = await traced(tmp_path / "run.json", source=source, split="worker", num_proc=1)
    assert_nested(events)
    assert total(events, "iterate") >= 0.02


async def test_it_shows_what_is_done_on_a_shared_pool(tmp_path: Path) -> None:
    async with ProcessPool(1) as pool:
        events, stats = await traced(
            tmp_path / "run.json", source=Numbers(8), map_fn=rest, batch_size=2, pool=pool
        )
    assert_nested(events)
    assert len(spans(events, "task")) == stats.delivered == 4


class KillsOnce:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, item: int) -> int:
        if item == 3 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item


async def test_a_worker_that_is_killed_leaves_it_whole(tmp_path: Path) -> None:
    events, stats = await traced(
        tmp_path / "run.json", source=Numbers(8), map_fn=KillsOnce(tmp_path / "mark"), num_proc=1
    )
    (restart,) = [event for event in events if event["name"] == "restart"]
    assert "SIGKILL" in restart["args"]["why"]
    assert stats.restarts == 1
    assert_nested(events)


async def test_it_is_whole_after_a_break_and_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    batches = aiter(Prefetcher(Numbers(100), num_proc=1, trace=path))
    await anext(batches)
    await batches.aclose()
    assert spans(events_of(path), "task")
    async with Prefetcher(Numbers(9), num_proc=1, trace=str(path)) as p:
        await collect(p)
    assert len(spans(events_of(path), "task")) == 9  # written anew
    p = Prefetcher(Numbers(9), num_proc=1, trace=path)
    await p.start()
    p.kill()
    assert await until(lambda: path.read_text().endswith("]}\n"))
    events_of(path)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a directory"):
        Prefetcher(Numbers(1), trace=tmp_path)
    with pytest.raises(ValueError, match="there is no directory"):
        Prefetcher(Numbers(1), trace=tmp_path / "none" / "run.json")
    with pytest.raises(TypeError, match="path of a file"):
        Prefetcher(Numbers(1), trace=True)  # type: ignore[arg-type]


async def test_copies_do_not_write_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    copy = pickle.loads(pickle.dumps(Prefetcher(Numbers(3), num_proc=0, trace=path)))
    assert await collect(copy) == [0, 1, 2]
    assert not path.exists()
