"""The faults: each is done to a running Prefetcher, which then has to give what it should."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from aioprefetch import (
    PoolBroken,
    Prefetcher,
    TaskError,
    TaskTimeout,
    WorkerDied,
    WorkerStartError,
)
from tests import mortal
from tests.processes import alive, eventually, send, workers


class Setting(NamedTuple):
    """Where a scene is played."""

    method: str
    folder: Path

    def prefetcher(self, source: Any, **arguments: Any) -> Prefetcher:
        return Prefetcher(source, **{"num_proc": 2, "mp_context": self.method, **arguments})


Play = Callable[[Setting], Awaitable[None]]


class Scene(NamedTuple):
    """A fault.

    ``blocks`` where the loop is held by the scene itself.
    """

    play: Play
    blocks: bool


SCENES: dict[str, Scene] = {}


def scene(number: int, *, blocks: bool = False) -> Callable[[Play], Play]:
    """Enter a scene for the fault with a number."""

    def enter(play: Play) -> Play:
        SCENES[f"{number:02} {play.__qualname__.replace('_', ' ')}"] = Scene(play, blocks)
        return play

    return enter


def kill_one(number: int) -> None:
    """Kill one of the workers that are up now."""
    there = workers()
    if there:
        send(there[number % len(there)])


async def all_of(p: Prefetcher) -> list[Any]:
    """Everything to the end; errors stand where they came."""
    seen: list[Any] = []
    iterator = aiter(p)
    while True:
        try:
            seen.append(await anext(iterator))
        except TaskError as error:
            seen.append(error)
        except StopAsyncIteration:
            return seen


async def until_it_breaks(iterator: AsyncIterator[Any]) -> None:
    while True:
        with suppress(WorkerDied):
            await anext(iterator)


class Sums:
    """Arrays that say whether they are whole: each is full of one number and has its sum."""

    def __init__(self, length: int, elements: int = 40_000, seconds: float = 0.0) -> None:
        self._length = length
        self._elements = elements
        self._seconds = seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return np.full(self._elements, float(index))


def check_sums(batches: list[Any], count: int) -> None:
    """All there, in order, none torn."""
    values = [value for batch in batches for value in np.atleast_2d(batch)]
    assert len(values) == count, len(values)
    for number, array in enumerate(values):
        assert (array == number).all(), number


# Deaths


@scene(1)
async def killed_idle(setting: Setting) -> None:
    async with setting.prefetcher(range(20)) as p:
        await p.start()
        send(workers()[0])
        assert await all_of(p) == list(range(20))


@scene(2)
async def killed_executing(setting: Setting) -> None:
    tries = mortal.Tries(setting.folder, {5: 1, 9: 99})
    async with setting.prefetcher(mortal.Mapped(20, tries)) as p:
        seen = await all_of(p)
    error = seen.pop(9)
    assert isinstance(error, WorkerDied)
    assert (error.index, error.exitcode) == (9, -signal.SIGKILL)
    assert seen == [item for item in range(20) if item != 9]


@scene(3)
async def killed_while_it_starts(setting: Setting) -> None:
    init = mortal.DiesOnce(setting.folder, 9)
    async with setting.prefetcher(range(9), worker_init_fn=init) as p:
        assert await all_of(p) == list(range(9))


@scene(3)
async def killed_whenever_it_starts(setting: Setting) -> None:
    p = setting.prefetcher(range(9), worker_init_fn=mortal.kill_self)
    with pytest.raises(WorkerStartError, match="SIGKILL"):
        await p.start()


@scene(4)
async def killed_while_it_reads_its_task(setting: Setting) -> None:
    keys = [mortal.FatalKey(setting.folder if key == 5 else None, key) for key in range(20)]
    async with setting.prefetcher(mortal.Keyed(20), sampler=keys) as p:
        assert await all_of(p) == list(range(20))


@scene(5)
async def killed_while_it_writes_its_result(setting: Setting) -> None:
    """At a random moment of a stream of results that go through the socket."""
    async with setting.prefetcher(mortal.Texts(300, 30_000), retries=9) as p:
        seen = []
        async for text in p:
            seen.append(int(text[:8]))
            if len(seen) % 60 == 0:
                kill_one(len(seen) // 60)
    assert seen == list(range(300))


@scene(6)
async def killed_while_it_collates(setting: Setting) -> None:
    async with setting.prefetcher(Sums(480), batch_size=4, retries=9) as p:
        batches = []
        async for batch in p:
            batches.append(batch)
            if len(batches) % 25 == 0:
                kill_one(0)
    check_sums(batches, 480)


@scene(7)
async def all_killed_at_once(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Sleeps(80, 0.003), num_proc=3, retries=9) as p:
        seen = []
        async for item in p:
            seen.append(item)
            if item in (20, 40):
                for worker in workers():
                    send(worker)
    assert seen == list(range(80))


@scene(33)
async def a_function_forks_and_its_child_returns(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Mapped(40, mortal.fork_and_return)) as p:
        assert await all_of(p) == list(range(40))


@scene(5)
async def all_descriptors_are_closed_under_it(setting: Setting) -> None:
    source = mortal.Mapped(20, mortal.ClosesAll(setting.folder))
    async with setting.prefetcher(source) as p:
        assert await all_of(p) == list(range(20))


@scene(8)
async def killed_again_and_again(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Sleeps(10**6, 0.02)) as p:
        iterator = aiter(p)
        await anext(iterator)
        killing = asyncio.ensure_future(mortal.kill_all_again_and_again())
        with pytest.raises(PoolBroken) as caught:
            await until_it_breaks(iterator)
        assert isinstance(caught.value.__cause__, (WorkerDied, WorkerStartError))
        killing.cancel()


# Stops and hangs


@scene(9)
async def stopped_idle(setting: Setting) -> None:
    async with setting.prefetcher(range(40)) as p:
        await p.start()
        send(workers()[0], signal.SIGSTOP)
        assert await all_of(p) == list(range(40))


@scene(10)
async def stopped_executing_and_continued(setting: Setting) -> None:
    async with setting.prefetcher(Sums(60, seconds=0.02), task_timeout=0.3, retries=9) as p:
        batches = []
        async for batch in p:
            batches.append(batch)
            if len(batches) == 20:
                stopped = workers()[0]
                send(stopped, signal.SIGSTOP)
            if len(batches) == 50:
                send(stopped, signal.SIGCONT)
    check_sums(batches, 60)


@scene(11)
async def deaf_to_sigterm(setting: Setting) -> None:
    p = setting.prefetcher(
        mortal.Mapped(9, mortal.Hangs("sleep")),
        worker_init_fn=mortal.ignore_sigterm,
        shutdown_timeout=0.3,
    )
    async with p:
        assert await anext(aiter(p)) == 0
        began = time.monotonic()
    assert time.monotonic() - began < 1.5


@scene(12)
async def exits_with_0(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Mapped(9, mortal.exit_0_at_2), retries=1) as p:
        error = (await all_of(p))[2]
    assert isinstance(error, WorkerDied)
    assert error.exitcode == 0


@scene(13)
async def segfault(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Mapped(9, mortal.segfault_at_2), retries=1) as p:
        seen = await all_of(p)
    error = seen.pop(2)
    assert (error.exitcode, error.index) == (-signal.SIGSEGV, 2)
    assert "segfault_at_2" in error.stack
    assert seen == [0, 1, *range(3, 9)]


@scene(14)
async def memory_error(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Mapped(5, mortal.memory_error_at_2)) as p:
        seen = await all_of(p)
    error = seen.pop(2)
    assert isinstance(error.__cause__, MemoryError)
    assert seen == [0, 1, 3, 4]


@scene(15)
async def init_raises(setting: Setting) -> None:
    p = setting.prefetcher(range(5), worker_init_fn=mortal.fail)
    with pytest.raises(WorkerStartError) as caught:
        await p.start()
    assert "mortal.py" in "".join(traceback.format_exception(caught.value))


@scene(20)
async def results_larger_than_any_before(setting: Setting) -> None:
    sizes = [10, 10_000, 3_000_000, 20_000_000, 100]
    async with setting.prefetcher(sizes, map_fn=np.ones) as p:
        seen = await all_of(p)
    assert [len(array) for array in seen] == sizes
    assert all((array == 1).all() for array in seen)


@scene(20)
async def results_too_large_for_the_machine(setting: Setting) -> None:
    sizes = [10, 1 << 50, 20]
    async with setting.prefetcher(sizes, map_fn=np.empty) as p:
        seen = await all_of(p)
    assert isinstance(seen[1], TaskError)
    assert isinstance(seen[1].__cause__, MemoryError)
    assert [len(seen[0]), len(seen[2])] == [10, 20]


@scene(22)
async def files_may_not_grow(setting: Setting) -> None:
    """RLIMIT_FSIZE bounds a memfd as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 27, hard))
    try:
        async with setting.prefetcher(Sums(100), batch_size=10) as p:
            check_sums([batch.copy() for batch in await all_of(p)], 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@scene(23)
async def no_thread_may_be_started_for_a_while(setting: Setting) -> None:
    """A worker that dies meanwhile is replaced once it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    async with setting.prefetcher(mortal.Sleeps(300, 0.005), retries=9) as p:
        seen = []
        async for item in p:
            seen.append(item)
            if item == 20:
                resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
                with pytest.raises(RuntimeError, match="thread"):
                    threading.Thread(target=print).start()
                kill_one(0)
            elif item == 100:
                resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    assert seen == list(range(300))


@scene(26)
async def the_consumer_raises(setting: Setting) -> None:
    try:
        async with setting.prefetcher(mortal.Sleeps(99, 0.01)) as p:
            async for item in p:
                if item == 5:
                    raise KeyError("the consumer's own")
    except KeyError:
        return
    raise AssertionError("it was lost")


@scene(27)
async def many_consumers_and_one_is_killed(setting: Setting) -> None:
    seen: list[int] = []

    async def consume(iterator: AsyncIterator[int]) -> None:
        async for item in iterator:
            seen.append(item)
            await asyncio.sleep(0)

    async with setting.prefetcher(mortal.Sleeps(200, 0.001)) as p:
        iterator = aiter(p)
        tasks = [asyncio.ensure_future(consume(iterator)) for _ in range(10)]
        await asyncio.sleep(0.1)
        tasks[3].cancel()
        await asyncio.wait(tasks)
    assert sorted(seen) == list(range(200))


@scene(29, blocks=True)
async def the_loop_is_busy_while_a_worker_dies(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Sleeps(60, 0.02), task_timeout=0.5) as p:
        seen = []
        async for item in p:
            seen.append(item)
            if item == 10:
                mortal.block(0.5)
                kill_one(0)
                mortal.block(0.5)
    assert seen == list(range(60))


@scene(33)
async def a_grandchild_holds_the_pipes(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Mapped(30, mortal.fork_then_sleep)) as p:
        seen = []
        async for item in p:
            seen.append(item)
            if item == 10:
                began = time.monotonic()
                kill_one(0)
    assert seen == list(range(30))
    assert time.monotonic() - began < 4


@scene(35)
async def a_thread_that_does_not_end(setting: Setting) -> None:
    p = setting.prefetcher(range(9), worker_init_fn=mortal.leave_a_thread, shutdown_timeout=0.5)
    async with p:
        assert await all_of(p) == list(range(9))
        began = time.monotonic()
    assert time.monotonic() - began < 2


@scene(36)
async def holds_the_interpreter(setting: Setting) -> None:
    p = setting.prefetcher(mortal.Mapped(9, mortal.Hangs("C loop")), task_timeout=0.3, retries=0)
    async with p:
        seen = await all_of(p)
    error = seen.pop(2)
    assert isinstance(error, TaskTimeout)
    assert "mortal.py" in (error.stack or "")
    assert seen == [0, 1, *range(3, 9)]


@scene(36)
async def waits_for_a_lock_for_ever(setting: Setting) -> None:
    p = setting.prefetcher(mortal.Mapped(9, mortal.Hangs("lock")), task_timeout=0.3, retries=0)
    async with p:
        assert isinstance((await all_of(p))[2], TaskTimeout)


@scene(37)
async def recursion(setting: Setting) -> None:
    async with setting.prefetcher(mortal.Mapped(5, mortal.recurse_at_2)) as p:
        seen = await all_of(p)
    assert isinstance(seen.pop(2).__cause__, RecursionError)
    assert seen == [0, 1, 3, 4]


@scene(38, blocks=True)  # gc.collect() holds the interpreter
async def views_die_in_any_thread(setting: Setting) -> None:
    async with setting.prefetcher(Sums(300), batch_size=3) as p:
        held: list[Any] = []
        threads = []
        async for batch in p:
            held.append([batch, {"cycle": held}])
            if len(held) == 10:
                dying, held = held, []
                threads.append(threading.Thread(target=_drop, args=(dying,)))
                threads[-1].start()
            assert (batch == batch[:, :1]).all()
        for thread in threads:
            thread.join()


def _drop(held: list[Any]) -> None:
    while held:
        held.pop()
        gc.collect()


@scene(39)
async def a_source_that_raises(setting: Setting) -> None:
    closed: list[int] = []

    def source() -> Iterator[int]:
        try:
            yield from range(5)
            raise KeyError("the source's own")
        finally:
            closed.append(1)

    async with setting.prefetcher(source, split="parent") as p:
        seen = await all_of(p)
    assert seen[:5] == list(range(5))
    assert isinstance(seen[5].__cause__, KeyError)
    assert (len(seen), closed) == (6, [1])


@scene(42)
async def opened_and_closed(setting: Setting) -> None:
    for _ in range(6):
        async with setting.prefetcher(range(4)) as p:
            assert await anext(aiter(p)) == 0


@scene(33)
async def a_subprocess_is_left(setting: Setting) -> None:
    """It is in the worker's group, and goes with it."""
    async with setting.prefetcher(mortal.Mapped(4, mortal.leave_a_subprocess)) as p:
        pids = await all_of(p)
        workers_then = workers()
        for worker in workers_then:
            if worker.pid not in pids:
                send(worker)
        assert await eventually(lambda: not any(map(alive, pids)), 3)


@scene(40)
async def killed_from_a_finalizer(setting: Setting) -> None:
    """As a collected cycle may, in whatever the loop is doing."""
    p = setting.prefetcher(mortal.Sleeps(10**4, 0.001))
    async with p:
        iterator = aiter(p)
        await anext(iterator)
        cycle = KillsWhenCollected(p)
        cycle.itself = cycle
        del cycle
        gc.collect()
        with pytest.raises(RuntimeError, match="killed"):
            await until_it_breaks(iterator)


class KillsWhenCollected:
    itself: Any

    def __init__(self, p: Prefetcher) -> None:
        self._p = p

    def __del__(self) -> None:
        self._p.kill()


@scene(40)
async def a_sampler_that_raises_and_one_that_blocks(setting: Setting) -> None:
    def keys(then: Callable[[], None]) -> Iterator[int]:
        yield from range(4)
        then()
        yield from range(4, 8)

    slow = setting.prefetcher(range(9), sampler=keys(lambda: mortal.block(0.5)))
    async with slow:
        assert await all_of(slow) == list(range(8))
    bad = setting.prefetcher(range(9), sampler=keys(lambda: mortal.fail(0)))
    async with bad:
        seen = await all_of(bad)
    assert seen[:4] == [0, 1, 2, 3]
    assert isinstance(seen[4].__cause__, ValueError)
