"""A plain `for` over a Prefetcher, on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import Prefetcher, TaskError, WorkerStartError, blocking
from tests import faulty
from tests.datasets import Numbers
from tests.helpers import collect, plain
from tests.processes import (
    alive,
    descendants,
    leftovers,
    run_script,
    start_script,
    wait_for,
    workers,
)

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
both = pytest.mark.parametrize("num_proc", [0, 2])


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The stdlib's forkserver and resource tracker are up before anything is counted."""
    with blocking(Prefetcher(range(1))):
        pass


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = leftovers()
    yield
    assert wait_for(lambda: not leftovers().beyond(before), 2), leftovers().beyond(before)


def plainly(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


class Closing:
    """An iterable that says when its iterator was closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(10**6)
        finally:
            self.closed.set()


@both
def test_each_for_is_an_epoch(num_proc: int) -> None:
    def make() -> Prefetcher:
        return Prefetcher(Numbers(10), batch_size=4, shuffle=True, num_proc=num_proc)

    async def passes() -> list[Any]:
        async with make() as p:
            return [await collect(p) for _ in range(3)]

    with blocking(make()) as batches:
        assert len(batches) == 3
        assert [plainly(batches) for _ in range(3)] == asyncio.run(passes())


@both
def test_the_epoch_can_be_chosen_in_between(num_proc: int) -> None:
    p = Prefetcher(Numbers(20), shuffle=True, num_proc=num_proc)
    with blocking(p) as items:
        first, second = list(items), list(items)
        assert first != second
        p.set_epoch(0)
        assert list(items) == first
        assert (p.epoch, p.delivered) == (1, 20)


def test_workers_live_until_the_block_ends() -> None:
    with blocking(Prefetcher(Numbers(4), num_proc=2)) as items:
        up = workers()
        assert len(up) == 2
        for _ in range(2):
            assert list(items) == [0, 1, 2, 3]
        assert workers() == up
    assert wait_for(lambda: not workers(), 1)


def test_a_break_ends_the_pass() -> None:
    source = Closing()
    p = Prefetcher(source, split="parent", num_prefetch=2)
    with blocking(p) as items:
        for item in items:
            if item == 3:
                break
        assert source.closed.wait(2)
        source.closed.clear()
        assert next(iter(items)) == 0
        assert source.closed.wait(2)


@both
def test_another_pass_supersedes_one_that_is_held(num_proc: int) -> None:
    with blocking(Prefetcher(Numbers(5), num_proc=num_proc)) as items:
        held = iter(items)
        assert next(held) == 0
        assert list(items) == [0, 1, 2, 3, 4]
        with pytest.raises(RuntimeError, match="another iteration"):
            next(held)


@both
def test_an_error_is_itself_and_the_pass_goes_on(num_proc: int) -> None:
    with blocking(Prefetcher(faulty.Map(4, faulty.fail), num_proc=num_proc)) as items:
        reading = iter(items)
        assert [next(reading), next(reading)] == [0, 1]
        with pytest.raises(TaskError, match="bad 2") as caught:
            next(reading)
        assert (caught.value.index, caught.value.stage) == (2, "fetch")
        assert isinstance(caught.value.__cause__, ValueError)
        assert list(reading) == [3]
        assert list(reading) == []


@both
def test_an_error_in_the_block_closes_it(num_proc: int) -> None:
    p = Prefetcher(Numbers(10**6), num_proc=num_proc)
    with pytest.raises(KeyError, match="mine"), blocking(p) as items:
        _raise_in_a_for(items)
    with blocking(p) as items:  # it can be opened again
        assert next(iter(items)) == 0


def _raise_in_a_for(items: Iterable[Any]) -> None:
    for _ in items:
        raise KeyError("mine")


def test_a_start_that_fails_says_why() -> None:
    def init(worker_id: int) -> None:
        raise ValueError("no data here")

    p = Prefetcher(Numbers(3), worker_init_fn=init)
    with pytest.raises(WorkerStartError, match="no data here"), blocking(p):
        raise AssertionError("the block was entered")


@one_loop
async def test_it_is_refused_where_a_loop_runs() -> None:
    p = Prefetcher(Numbers(3), num_proc=0)
    with pytest.raises(RuntimeError, match="`async for`"), blocking(p):
        raise AssertionError("the block was entered")
    assert await collect(p) == [0, 1, 2]
    assert await asyncio.to_thread(lambda: _read(p)) == [0, 1, 2]  # a thread has none


def _read(p: Prefetcher) -> list[Any]:
    with blocking(p) as items:
        return list(items)


def test_an_open_one_is_refused_and_stays_open() -> None:
    p = Prefetcher(Numbers(3), num_proc=0)
    with blocking(p) as items:
        with pytest.raises(RuntimeError, match="open already"), blocking(p):
            raise AssertionError("the block was entered")
        assert list(items) == [0, 1, 2]


def test_two_stand_side_by_side() -> None:
    with (
        blocking(Prefetcher(Numbers(3), num_proc=1)) as left,
        blocking(Prefetcher(Numbers(3), map_fn=faulty.identity, num_proc=0)) as right,
    ):
        assert list(zip(left, right, strict=True)) == [(0, 0), (1, 1), (2, 2)]


def test_without_a_length_it_has_none() -> None:
    with blocking(Prefetcher(faulty.Items(3, bad=-1), num_proc=0)) as items:
        with pytest.raises(TypeError, match="no known length"):
            len(items)
        assert list(items) == [0, 1, 2]


def test_after_the_block_it_says_so() -> None:
    with blocking(Prefetcher(Numbers(3), num_proc=0)) as items:
        reading = iter(items)
        next(reading)
    for go_on in (lambda: next(reading), lambda: iter(items)):
        with pytest.raises(RuntimeError, match=r"block of .* has ended"):
            go_on()


def test_closing_it_under_a_pass_ends_that() -> None:
    p = Prefetcher(Numbers(10**6), num_proc=1)
    with blocking(p) as items:
        reading = iter(items)
        next(reading)
        p.kill()
        with pytest.raises(RuntimeError, match="killed"):
            for _ in reading:
                pass


SCRIPT = """
import os, sys, time
from aioprefetch import Prefetcher, blocking

class Slow:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            time.sleep(float(sys.argv[1]))
        return index

if __name__ == "__main__":
    p = Prefetcher(Slow(), num_proc=2, num_prefetch=6, shutdown_timeout=0.5)
    got = []
    with blocking(p) as items:
        reading = iter(items)
        for item in reading:
            got.append(item)
            if item == 2:
                try:
                    print("waiting", flush=True)
                    got.append(next(reading))
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                    if sys.argv[2] == "leave":
                        raise
    print(got, flush=True)
"""


def test_it_serves_a_script(tmp_path: Path) -> None:
    ended = run_script(tmp_path, SCRIPT, "0", "leave")
    assert (ended.code, ended.out, ended.err) == (0, "waiting\n[0, 1, 2, 3, 4, 5]\n", "")


def test_an_interrupt_gets_through_and_ends_all(tmp_path: Path) -> None:
    script = start_script(tmp_path, SCRIPT, "60", "leave")
    assert script.line() == "waiting"
    everyone = descendants(script.pid)
    os.kill(script.pid, signal.SIGINT)
    assert script.line() == "interrupted"
    ended = script.end()
    assert ended.code == -signal.SIGINT
    assert ended.took < 10
    assert ended.err.rstrip().endswith("KeyboardInterrupt")
    assert wait_for(lambda: not any(alive(process.pid) for process in everyone), 2)


def test_an_interrupt_loses_nothing(tmp_path: Path) -> None:
    script = start_script(tmp_path, SCRIPT, "1", "stay")
    assert script.line() == "waiting"
    os.kill(script.pid, signal.SIGINT)
    ended = script.end()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "interrupted\n[0, 1, 2, 3, 4, 5]\n"
