"""Behaviours that other loaders test and that no test of ours elsewhere is about."""

from __future__ import annotations

import asyncio
import resource
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioprefetch import Prefetcher, PrefetchIterator, TaskError, WorkerStartError
from tests.conformance.sources import (
    Arrays,
    Growing,
    Iterated,
    Part,
    SlowShard,
    Squares,
    affinity,
    stay_on_one,
)
from tests.processes import eventually, run_script, workers

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


# Arguments


def test_arguments_are_fixed() -> None:
    p = Prefetcher(Squares())
    for name in ("batch_size", "source", "num_proc", "epoch", "nonsense"):
        with pytest.raises(AttributeError, match=f"{name} of a Prefetcher cannot be set"):
            setattr(p, name, 3)


@pytest.mark.parametrize("name", ["drop_last", "shuffle", "ordered"])
def test_a_switch_is_no_text(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, not 'no'"):
        Prefetcher(Squares(), **{name: "no"})  # type: ignore[arg-type]


def test_types_say_what_a_batch_is() -> None:
    typed: Prefetcher[int] = Prefetcher[int](Squares())
    assert isinstance(typed, Prefetcher)
    assert PrefetchIterator[int] is not None


# Several at once, and what grows


@one_loop
async def test_two_with_other_contexts_side_by_side() -> None:
    one = Prefetcher(Squares(), num_proc=1, mp_context="spawn")
    other = Prefetcher(Squares(), num_proc=2, mp_context="forkserver", ordered=False)
    async with one, other:
        pairs = [pair async for pair in _zipped(one, other)]
    assert [first for first, _ in pairs] == [n * n for n in range(20)]
    assert sorted(second for _, second in pairs) == [n * n for n in range(20)]


async def _zipped(one: Prefetcher, other: Prefetcher) -> Any:
    second = aiter(other)
    async for item in one:
        yield item, await anext(second)


@one_loop
@pytest.mark.parametrize("num_proc", [0, 1])
async def test_what_grows_is_seen_when_workers_start_anew(num_proc: int) -> None:
    source = Growing()
    p = Prefetcher(source, num_proc=num_proc)
    assert [item async for item in p] == [0, 1, 2]
    source.items.append(3)
    assert len(p) == 4
    assert [item async for item in p] == [0, 1, 2, 3]
    async with p:
        source.items.append(4)
        assert [item async for item in p] == [0, 1, 2, 3]


# Order


@one_loop
async def test_a_quick_stream_does_not_wait_for_a_slow_one() -> None:
    p = Prefetcher(SlowShard(), num_shards=2, num_proc=2, ordered=False)
    streams = [stream async for stream, _ in p]
    assert streams[:4] == [1, 1, 1, 1]
    assert streams.count(0) == 5


@one_loop
async def test_streams_take_turns() -> None:
    p = Prefetcher(SlowShard(), num_shards=2, num_proc=2)
    assert [item async for item in p] == [(s, n) for n in range(5) for s in range(2)]


HELD = """
import asyncio, sys
from aioprefetch import Prefetcher, TaskError
from tests.conformance.sources import Squares, fail_late

async def main():
    global held
    p = Prefetcher(
        Squares(1 << 17), batch_size=40_960, shuffle=True, num_proc=2, map_fn=fail_late
    )
    held = aiter(p)
    try:
        await anext(held)
    except TaskError as error:
        print(len(error.indices), error.stage)
    await p.aclose()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_large_batches_of_keys_an_error_and_a_held_iterator(tmp_path: Path) -> None:
    ended = run_script(tmp_path, HELD)
    assert (ended.code, ended.out) == (0, "40960 map\n"), ended.err
    assert ended.took < 15


# Workers


@one_loop
async def test_affinity_that_is_set_in_a_worker_sticks() -> None:
    p = Prefetcher(Squares(6), map_fn=affinity, worker_init_fn=stay_on_one, num_proc=2)
    assert [item async for item in p] == [1] * 6


FEW = """
import asyncio, resource
import numpy as np
from aioprefetch import Prefetcher
from tests.conformance.sources import Arrays

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    held = []
    async with Prefetcher(Arrays(-1), num_proc=2, epochs=20) as p:
        async for array in p:
            held.append(array)
    print(len(held), all((array == n % 12).all() for n, array in enumerate(held)))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_batches_that_are_held_take_no_descriptors(tmp_path: Path) -> None:
    ended = run_script(tmp_path, FEW)
    assert (ended.code, ended.out) == (0, "240 True\n"), ended.err


@one_loop
async def test_more_workers_than_descriptors_are_refused_before_any_starts() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with pytest.raises(WorkerStartError, match="descriptors"):
            await Prefetcher(Squares(), num_proc=100).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not workers()


# Opening and closing


@one_loop
async def test_starting_and_closing_twice() -> None:
    p = Prefetcher(Squares(3), num_proc=1)
    await p.start()
    (pid,) = [worker.pid for worker in workers()]
    await p.start()
    assert [worker.pid for worker in workers()] == [pid]
    assert [item async for item in p] == [0, 1, 4]
    await p.aclose()
    await p.aclose()
    p.kill()
    assert await eventually(lambda: not workers(), 2)


def test_a_loop_in_a_thread_that_ends() -> None:
    got: list[int] = []

    async def collect() -> None:
        async with Prefetcher(Squares(4), num_proc=2) as p:
            got.extend([item async for item in p])

    thread = threading.Thread(target=lambda: asyncio.run(collect()))
    thread.start()
    thread.join(30)
    assert got == [0, 1, 4, 9]
    assert not workers()


@one_loop
async def test_an_error_behind_a_full_window_of_large_items() -> None:
    async with Prefetcher(Arrays(bad=7), num_proc=2, num_prefetch=12) as p:
        iterator = aiter(p)
        await anext(iterator)
        await asyncio.sleep(0.3)  # the consumer is elsewhere, and the window fills
        got, errors = 1, list[Any]()
        while got + len(errors) < 12:
            try:
                array = await anext(iterator)
            except TaskError as error:
                errors.append(error.index)
            else:
                assert (array == got + len(errors)).all()
                got += 1
        assert errors == [7]


@one_loop
async def test_memory_is_flat_over_100_epochs() -> None:
    """Shared memory too, and at its peaks: what is in flight differs from moment to moment."""
    peaks = {1: 0, 4: 0}  # by twenties of epochs
    source = Arrays(-1, 1 << 17)
    async with Prefetcher(source, batch_size=4, num_proc=2, num_prefetch=2, epochs=100) as p:
        async for batch in p:
            assert batch[:, ::256].any()  # its pages are this process's as well
            twenty = p.epoch // 20
            if p.delivered == 3 and twenty in peaks:
                peaks[twenty] = max(peaks[twenty], held_by_all())
    assert peaks[4] - peaks[1] < 8 * 2**20  # two batches


def held_by_all() -> int:
    """Bytes of this process and its workers; what they share counts once."""
    return sum(of.memory_full_info().pss for of in (psutil.Process(), *workers()))


# Wrappers, and streams that go on


@one_loop
async def test_a_part_of_a_source_is_one() -> None:
    p = Prefetcher(Part(Squares(), [7, 3, 3]), batch_size=2, num_proc=1)
    assert [batch.tolist() async for batch in p] == [[49, 9], [9]]


@one_loop
async def test_a_stream_that_goes_on_is_iterated_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    p = Prefetcher(Iterated(str(log)), num_proc=1)
    iterator = aiter(p)
    for _ in range(3):
        await anext(iterator)
    state = p.state_dict()
    await iterator.aclose()
    log.unlink()
    q = Prefetcher(Iterated(str(log)), num_proc=1)
    q.load_state_dict(state)
    assert [item async for item in q] == list(range(3, 12))
    assert log.read_text() == "iterated\n"
