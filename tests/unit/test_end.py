"""However it ends, nothing is left: no process, descriptor, thread or shared memory."""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
import types
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import uvloop

from aioprefetch import Prefetcher
from tests import faulty
from tests.faulty import Map
from tests.processes import (
    Leftovers,
    Script,
    alive,
    descendants,
    eventually,
    leftovers,
    start_script,
    wait_for,
)

TIMEOUT = 0.3  # shutdown_timeout
MANY = 10**6
ITEMS: dict[str, Callable[[int], int]] = {"quick": faulty.quick, "stuck": faulty.stuck}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The stdlib's forkserver and resource tracker are up before anything is counted."""

    async def once() -> None:
        async with Prefetcher(range(1)):
            pass

    asyncio.run(once())


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    """What is stuck in this process is let go at the end."""
    faulty.released.clear()
    yield
    faulty.released.set()


class Case:
    """A Prefetcher whose workers are at work, or stuck from the third item on."""

    def __init__(self, folder: Path, items: str, num_proc: int) -> None:
        self._file = folder / f"begun-{time.monotonic_ns()}"
        self._source = Map(MANY, faulty.Marked(self._file, ITEMS[items]))
        self._num_proc = num_proc

    def make(self) -> Prefetcher:
        return Prefetcher(self._source, num_proc=self._num_proc, shutdown_timeout=TIMEOUT)

    async def begun(self) -> None:
        """The third item is at work."""
        assert await eventually(self._file.exists, 10)

    async def opened(self) -> tuple[Prefetcher, Any]:
        p = self.make()
        await p.start()
        return p, await self.read(p)

    async def read(self, p: Prefetcher) -> Any:
        iterator = aiter(p)
        assert await anext(iterator) == 0
        await self.begun()
        return iterator

    async def read_for_ever(self, begun: asyncio.Event) -> None:
        async with self.make() as p:
            async for _ in p:
                await self.begun()
                begun.set()


Ending = Callable[[Case], Awaitable[None]]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The loop has nothing to complain of."""
    yield
    records = [record for record in caplog.get_records("call") if record.name == "asyncio"]
    assert [record.getMessage() for record in records] == []


def nothing_beyond(before: Leftovers) -> Callable[[], bool]:
    return lambda: not leftovers().beyond(before)


# The endings


async def enter_and_leave(case: Case) -> None:
    async with case.make():
        pass


async def break_inside(case: Case) -> None:
    async with case.make() as p:
        async for _ in p:
            await case.begun()
            break


async def raise_inside(case: Case) -> None:
    async def body() -> None:
        async with case.make() as p:
            async for _ in p:
                await case.begun()
                raise KeyError("of the body")

    with pytest.raises(KeyError, match="of the body"):
        await body()


async def close_under_the_iterator(case: Case) -> None:
    p, iterator = await case.opened()
    await p.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await anext(iterator)
    await p.aclose()


async def close_not_opened(case: Case) -> None:
    p = case.make()
    iterator = await case.read(p)
    await p.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await anext(iterator)


async def close_the_iterator(case: Case) -> None:
    iterator = await case.read(case.make())
    await iterator.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


async def cancel_the_task(case: Case) -> None:
    begun = asyncio.Event()
    task = asyncio.create_task(case.read_for_ever(begun))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_while_closing(case: Case) -> None:
    begun = asyncio.Event()
    task = asyncio.create_task(case.read_for_ever(begun))
    await begun.wait()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.001)  # a storm without a pause would starve the threads that close
    assert task.cancelled()


async def cancel_the_scope(case: Case) -> None:
    with anyio.CancelScope() as scope:
        async with case.make() as p:
            async for _ in p:
                await case.begun()
                scope.cancel()
    assert scope.cancelled_caught


async def close_in_a_cancelled_scope(case: Case) -> None:
    p, _ = await case.opened()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await p.aclose()


async def fail_beside_it(case: Case) -> None:
    async def fail(begun: asyncio.Event) -> None:
        await begun.wait()
        raise KeyError("beside it")

    async def both() -> None:
        begun = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(case.read_for_ever(begun))
            group.create_task(fail(begun))

    with pytest.raises(ExceptionGroup):
        await both()


async def drop_the_temporary(case: Case) -> None:
    async for _ in case.make():
        await case.begun()
        break
    gc.collect()


async def drop_the_open_one(case: Case) -> None:
    p, iterator = await case.opened()
    del p, iterator
    gc.collect()


async def drop_in_a_cycle(case: Case) -> None:
    cycle: list[Any] = [*await case.opened()]
    cycle.append(cycle)
    del cycle
    gc.collect()


async def kill_open(case: Case) -> None:
    p, iterator = await case.opened()
    p.kill()
    await is_killed(iterator)
    p.kill()
    await p.aclose()


async def kill_not_opened(case: Case) -> None:
    p = case.make()
    iterator = await case.read(p)
    p.kill()
    await is_killed(iterator)


async def kill_from_a_thread(case: Case) -> None:
    p, iterator = await case.opened()
    thread = threading.Thread(target=p.kill)
    thread.start()
    thread.join()  # it needs no loop
    await is_killed(iterator)


async def is_killed(iterator: Any) -> None:
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="killed"):
        await asyncio.wait_for(anext(iterator), 2)


async def begin_another(case: Case) -> None:
    p = case.make()
    first = await case.read(p)
    async with aiter(p):
        with pytest.raises(RuntimeError, match="another iteration"):
            await anext(first)


ORDERLY: list[Ending] = [  # done before the next statement
    enter_and_leave,
    break_inside,
    raise_inside,
    close_under_the_iterator,
    close_not_opened,
    close_the_iterator,
    cancel_the_task,
    cancel_while_closing,
    cancel_the_scope,
    close_in_a_cancelled_scope,
    fail_beside_it,
]
ABRUPT: list[Ending] = [kill_open, kill_not_opened, kill_from_a_thread, begin_another]
DROPPED: list[Ending] = [drop_the_temporary, drop_the_open_one, drop_in_a_cycle]


@contextlib.asynccontextmanager
async def leaves_nothing(within: float) -> AsyncIterator[list[warnings.WarningMessage]]:
    """Nothing of what is begun in the block is left ``within`` seconds of its end."""
    before = leftovers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
        faulty.released.set()  # a thread that is stuck in user code nobody can end
        await eventually(nothing_beyond(before), within)
    assert leftovers().beyond(before) == {}


@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("ending", ORDERLY + ABRUPT, ids=lambda ending: ending.__name__)
async def test_nothing_is_left_after(
    ending: Ending, items: str, num_proc: int, tmp_path: Path
) -> None:
    bound = 2.0 if items == "quick" else TIMEOUT + 1
    began = time.monotonic()
    async with leaves_nothing(bound) as caught:
        await ending(Case(tmp_path, items, num_proc))
        if ending in ORDERLY:
            assert descendants() == []
            assert time.monotonic() - began < bound + 1  # starting is in it
    texts = [str(warning.message) for warning in caught]
    left_behind = items == "stuck" and num_proc == 0 and ending in ORDERLY[1:]
    assert len(texts) == left_behind
    assert all("still in" in text for text in texts)


@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("ending", DROPPED, ids=lambda ending: ending.__name__)
async def test_nothing_is_left_of_what_is_dropped(
    ending: Ending, items: str, num_proc: int, tmp_path: Path
) -> None:
    async with leaves_nothing(2) as caught:
        await ending(Case(tmp_path, items, num_proc))
    assert {warning.category for warning in caught} <= {ResourceWarning}
    assert all("was dropped with work in flight" in str(w.message) for w in caught)
    if items == "stuck":
        assert len(caught) == 1


@pytest.mark.parametrize("num_proc", [0, 2])
async def test_nothing_is_left_after_exhaustion(num_proc: int) -> None:
    async with leaves_nothing(2):
        async with Prefetcher(range(5), num_proc=num_proc) as p:
            for _ in range(2):
                assert [item async for item in p] == [0, 1, 2, 3, 4]
        assert descendants() == []
        assert [item async for item in Prefetcher(range(3), num_proc=num_proc)] == [0, 1, 2]
        assert descendants() == []


def endless() -> Iterator[int]:
    yield from range(MANY)


@pytest.mark.parametrize("split", ["parent", "worker"])
@pytest.mark.parametrize("num_proc", [0, 2])
async def test_a_stream_that_is_left_is_closed(split: Any, num_proc: int) -> None:
    async with leaves_nothing(2):
        async with Prefetcher(endless, split=split, num_proc=num_proc) as p:
            async for _ in p:
                break
        assert descendants() == []


async def test_a_source_that_is_stuck_in_this_process_is_left_behind(tmp_path: Path) -> None:
    def stuck_source() -> Iterator[int]:
        yield from map(faulty.Marked(begun, faulty.stuck), range(MANY))

    begun = tmp_path / "begun"
    async with leaves_nothing(1) as caught:
        async with Prefetcher(stuck_source, split="parent", shutdown_timeout=TIMEOUT) as p:
            iterator = aiter(p)
            assert [await anext(iterator), await anext(iterator)] == [0, 1]
            assert await eventually(begun.exists, 2)
            began = time.monotonic()
        assert time.monotonic() - began < TIMEOUT + 1
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert "stuck_source" in str(caught[0].message)


def fails_at_its_end(worker: int) -> Iterator[None]:
    yield
    raise ValueError("of the second half")


@pytest.mark.parametrize("num_proc", [0, 1])
async def test_an_error_of_closing_does_not_replace_that_of_the_body(num_proc: int) -> None:
    async def body() -> None:
        async with Prefetcher(range(3), worker_init_fn=fails_at_its_end, num_proc=num_proc):
            raise KeyError("of the body")

    with pytest.raises(KeyError, match="of the body"):
        await body()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("end", ["drop", "kill"])
def test_the_loop_is_closed_under_it(
    end: str,
    items: str,
    num_proc: int,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    tmp_path: Path,
) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.sleep(0))  # the first loop of a kind keeps a pipe for the process
    before = leftovers()
    case = Case(tmp_path, items, num_proc)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            p, iterator = runner.run(case.opened())
        if end == "kill":
            p.kill()
        del p, iterator, runner
        faulty.released.set()
        wait_for(nothing_beyond(before), 2)
    assert leftovers().beyond(before) == {}


# Cancelled at every await


@types.coroutine
def cancelled_at(work: Coroutine[Any, Any, Any], suspension: int) -> Generator[Any, Any, Any]:
    """Run ``work``, and cancel the task at its n-th suspension."""
    waits = work.__await__()
    count = 0
    thrown: BaseException | None = None
    while True:
        try:
            waiting = waits.send(None) if thrown is None else waits.throw(thrown)
        except StopIteration as stop:
            return stop.value
        count += 1
        task = asyncio.current_task()
        assert task is not None
        if count == suspension:
            task.cancel()
        thrown = None
        try:
            yield waiting
        except BaseException as error:
            thrown = error


async def cancel_at(work: Any, suspension: int) -> tuple[bool, Any]:
    """Whether it was cancelled, and else what it gave."""

    async def run() -> Any:
        return await cancelled_at(_coroutine(work), suspension)

    try:
        return False, await asyncio.create_task(run())
    except asyncio.CancelledError:
        return True, None


async def _coroutine(work: Awaitable[Any]) -> Any:
    return await work


num_procs = pytest.mark.parametrize("num_proc", [0, 1])


@num_procs
async def test_cancelled_at_every_await_of_entering(num_proc: int) -> None:
    for suspension in range(1, 50):
        async with leaves_nothing(2):
            p = Prefetcher(range(4), num_proc=num_proc)
            cancelled, _ = await cancel_at(p.__aenter__(), suspension)
            if cancelled:
                assert descendants() == []
                assert [item async for item in p] == [0, 1, 2, 3]
            await p.aclose()
        if not cancelled:
            return
    pytest.fail("it never got through")


@num_procs
@pytest.mark.parametrize("opened", [True, False])
async def test_cancelled_at_every_await_of_anext(num_proc: int, opened: bool) -> None:
    async with leaves_nothing(2):
        p = Prefetcher(Map(40, faulty.slow), num_proc=num_proc, num_prefetch=1)
        if opened:
            await p.start()
        iterator, seen, suspension = aiter(p), list[int](), 1
        cancellations = 0
        with contextlib.suppress(StopAsyncIteration):
            while True:
                cancelled, item = await cancel_at(anext(iterator), suspension)
                cancellations += cancelled
                suspension = suspension + 1 if cancelled else 1
                seen += [] if cancelled else [item]
        assert seen == list(range(40))
        assert cancellations >= 40
        assert descendants() == [] or opened
        await p.aclose()


CLOSES: dict[str, Callable[[Prefetcher, Any], Any]] = {
    "aclose": lambda p, iterator: p.aclose(),
    "exit": lambda p, iterator: p.__aexit__(None, None, None),
    "iterator": lambda p, iterator: iterator.aclose(),
}


@num_procs
@pytest.mark.parametrize("how", CLOSES)
async def test_cancelled_at_every_await_of_closing(how: str, num_proc: int) -> None:
    for suspension in range(1, 50):
        async with leaves_nothing(2):
            p = Prefetcher(Map(MANY, faulty.quick), num_proc=num_proc)
            if how != "iterator":
                await p.start()
            iterator = aiter(p)
            assert await anext(iterator) == 0
            cancelled, _ = await cancel_at(CLOSES[how](p, iterator), suspension)
            assert descendants() == []
            await CLOSES[how](p, iterator)
        if not cancelled:
            return
    pytest.fail("it never got through")


# The end of the process

SCRIPT = """
import asyncio, ctypes, os, signal, sys
from aioprefetch import Prefetcher
from tests import faulty

end, items, num_proc, method = sys.argv[1:]
p = None

async def main():
    global p
    context = {"mp_context": method} if num_proc != "0" else {}
    source = faulty.Map(10**6, getattr(faulty, items))
    p = Prefetcher(source, num_proc=int(num_proc), num_prefetch=4, **context)
    await p.start()
    iterator = aiter(p)
    for _ in range(2):
        await anext(iterator)
    print("ready", flush=True)
    if not end.startswith("SIG"):
        sys.stdin.readline()  # the test has looked at our processes
    if end == "sys.exit":
        sys.exit(3)
    elif end == "os._exit":
        os._exit(3)
    elif end == "segfault":
        import faulthandler
        faulthandler.disable()
        ctypes.string_at(0)
    elif end == "raise":
        raise KeyError("of main")
    elif end == "falls off":
        return
    elif end == "drops":
        p = None
        return
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""
BY_SIGNAL = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
CODES = {
    "SIGKILL": -9,
    "SIGTERM": -15,
    "SIGINT": -2,
    "sys.exit": 3,
    "os._exit": 3,
    "segfault": -11,
    "raise": 1,
    "falls off": 0,
    "drops": 0,
}
EXITS: list[tuple[str, str, int, str]] = [
    *((end, "stuck", 2, "forkserver") for end in CODES),
    *((end, "quick", 2, "forkserver") for end in ("SIGKILL", "SIGINT", "falls off", "drops")),
    *((end, "stuck", 0, "forkserver") for end in ("falls off", "sys.exit", "SIGTERM")),
    *((end, "stuck_in_c", 1, "forkserver") for end in ("SIGKILL", "falls off")),
    *((end, "stuck_with_child", 1, "forkserver") for end in ("SIGKILL", "falls off")),
    *((end, "stuck", 2, "spawn") for end in ("SIGKILL", "falls off")),
    *((end, "stuck", 2, "fork") for end in ("SIGKILL", "falls off")),
]


def workers_of(script: Script) -> list[psutil.Process]:
    """Its processes, but for its forkserver and resource tracker."""
    direct = psutil.Process(script.pid).children()
    stdlib = {c.pid for c in direct if "import main" in " ".join(c.cmdline())}
    return [process for process in descendants(script.pid) if process.pid not in stdlib]


@pytest.mark.parametrize(("end", "items", "num_proc", "method"), EXITS)
def test_nothing_outlives_the_process(
    end: str, items: str, num_proc: int, method: str, tmp_path: Path
) -> None:
    script = start_script(tmp_path, SCRIPT, end, items, str(num_proc), method)
    assert script.line() == "ready"
    workers = workers_of(script)
    everyone = descendants(script.pid)
    assert len(workers) >= num_proc
    began = time.monotonic()
    os.kill(script.pid, BY_SIGNAL[end]) if end in BY_SIGNAL else script.go_on()
    assert script.process.wait(10) == CODES[end]
    assert time.monotonic() - began < 2
    assert wait_for(lambda: not any(alive(worker.pid) for worker in workers), 1)
    assert wait_for(lambda: not any(alive(process.pid) for process in everyone), 2)
    err = script.end().err
    assert err.count("Traceback") == 2 * (end == "SIGINT") + (end == "raise"), err
    if end in ("sys.exit", "raise", "falls off", "drops"):
        assert "resource_tracker" not in err, err
