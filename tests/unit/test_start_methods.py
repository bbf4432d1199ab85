"""Start methods: what travels to a worker, what runs in it first, and ``__main__``."""

import asyncio
import multiprocessing
import os
import pickle
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import Prefetcher, TaskError, WorkerStartError, worker_info
from tests import faulty
from tests.faulty import Map
from tests.processes import Script, alive, descendants, run_script, start_script, wait_for

METHODS = ["spawn", "forkserver", "fork"]

methods = pytest.mark.parametrize("method", METHODS)


def prefetcher(method: Any, source: Any, **arguments: Any) -> Prefetcher:
    """A Prefetcher; the warning of fork is tested on its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return Prefetcher(source, mp_context=method, **arguments)


async def read(p: Prefetcher) -> list[Any]:
    async with asyncio.timeout(15), aiter(p) as iterator:
        return [item async for item in iterator]


@methods
@pytest.mark.parametrize("wrap", [str, multiprocessing.get_context])
async def test_names_and_contexts(method: str, wrap: Callable[[str], Any]) -> None:
    pids = await read(prefetcher(wrap(method), range(3), map_fn=lambda _: os.getppid()))
    assert len(set(pids)) == 1
    assert (pids[0] == os.getpid()) == (method != "forkserver")


async def test_the_default_is_forkserver() -> None:
    pids = await read(Prefetcher(range(1), map_fn=lambda _: os.getppid()))
    assert pids[0] != os.getpid()


@pytest.mark.parametrize("wrap", [str, multiprocessing.get_context])
def test_fork_warns_once_at_the_callers_line(wrap: Callable[[str], Any]) -> None:
    async def main() -> None:
        async with p:
            assert await read(p) == [0, 1, 2]

    context = wrap("fork")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        p = Prefetcher(range(3), mp_context=context, num_proc=2)
        here = "p = Prefetcher(range(3), mp_context=context, num_proc=2)"
        asyncio.run(main())
    assert [warning.category for warning in caught] == [RuntimeWarning]
    line = Path(caught[0].filename).read_text().splitlines()[caught[0].lineno - 1]
    assert line.strip() == here


@methods
async def test_lambdas_closures_and_local_classes(method: str) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    offset = 10
    p = prefetcher(method, lambda: [Local(1), Local(2)], map_fn=lambda x: Local(x.value + offset))
    items = await read(p)
    assert [type(item) for item in items] == [Local, Local]
    assert [item.value for item in items] == [11, 12]


# __main__

MAIN = """
import asyncio, dataclasses, enum, os, sys
from typing import NamedTuple
from aioprefetch import Prefetcher

@dataclasses.dataclass
class Sample:
    value: int

class Point(NamedTuple):
    x: int

class Color(enum.Enum):
    RED = 1

class MyError(Exception):
    pass

OFFSET = 100

class Data:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            raise MyError("mine", os.getpid())
        return Sample(index), Point(index), Color.RED, global_function(index)

def global_function(x):
    return x + OFFSET

async def main():
    seen = []
    async with Prefetcher(Data(), map_fn=lambda item: (*item, lambda: OFFSET), num_proc=2,
                          mp_context=sys.argv[1]) as p:
        iterator = aiter(p)
        while True:
            try:
                seen.append(await anext(iterator))
            except StopAsyncIteration:
                break
            except Exception as error:
                seen.append(error)
    for sample, point, color, value, function in seen[:3]:
        assert type(sample) is Sample, type(sample)
        assert type(point) is Point
        assert color is Color.RED
        assert value == OFFSET + sample.value
        assert function() == OFFSET
    assert type(seen[3].__cause__) is MyError, repr(seen[3].__cause__)
    assert seen[3].__cause__.args[1] != os.getpid()
    print("all mine")
"""
GUARD = """
if __name__ == "__main__":
    asyncio.run(main())
"""
NO_GUARD = """
asyncio.run(main())
"""


@methods
def test_classes_of_main_come_back_as_the_parents_own(method: str, tmp_path: Path) -> None:
    ended = run_script(tmp_path, MAIN + GUARD, method)
    assert ended.out.strip() == "all mine", ended.err


@methods
@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_scripts_without_a_file(method: str, how: str) -> None:
    text = MAIN.replace("sys.argv[1]", repr(method)) + NO_GUARD
    script = Script("-c", text) if how == "-c" else Script("-", stdin=text)
    ended = script.end()
    assert ended.out.strip() == "all mine", ended.err


@methods
def test_classes_of_a_notebooks_cell(method: str) -> None:
    """They are made by exec in a ``__main__`` that has no file."""
    text = MAIN.replace("sys.argv[1]", repr(method))
    kernel = f"""
import __main__, asyncio
del __main__.__dict__["__builtins__"]
exec(compile({text!r}, "<ipython-input-1>", "exec"), __main__.__dict__)
exec(compile("Data.cell = 1", "<ipython-input-2>", "exec"), __main__.__dict__)
asyncio.run(main())
"""
    ended = Script("-c", kernel).end()
    assert ended.out.strip() == "all mine", ended.err


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("num_proc", [1, 3])
def test_a_main_without_guard_is_told(method: str, num_proc: int, tmp_path: Path) -> None:
    text = MAIN.replace("num_proc=2", f"num_proc={num_proc}") + NO_GUARD
    ended = run_script(tmp_path, text, method)
    assert ended.code == 1
    assert ended.took < 10
    assert "if __name__ == '__main__'" in ended.err
    assert "WorkerStartError" in ended.err
    assert "all mine" not in ended.out


@methods
def test_a_module_that_runs_one_in_its_body(method: str, tmp_path: Path) -> None:
    """Workers that need what it defines wait for its import, which waits for them."""
    body = (
        "import asyncio, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from aioprefetch import Prefetcher\n"
        "def double(x):\n    return 2 * x\n"
        "async def main():\n"
        f"    p = Prefetcher(range(3), map_fn=double, mp_context={method!r})\n"
        "    return [x async for x in p]\n"
        "print(asyncio.run(main()))\n"
    )
    (tmp_path / "in_its_body.py").write_text(body)
    ended = run_script(tmp_path, "if __name__ == '__main__':\n    import in_its_body\n")
    assert ended.took < 10
    if ended.code == 0:
        assert ended.out.strip() == "[0, 2, 4]"
    else:
        assert "WorkerStartError" in ended.err
        assert "__main__" in ended.err


# worker_init_fn


class Log:
    """A file that functions in workers append lines to."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, *words: Any) -> None:
        with self.file.open("a") as file:
            file.write(" ".join(map(str, (*words, os.getpid()))) + "\n")

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.file.read_text().splitlines()]


def plain(log: Log) -> Callable[[int], Any]:
    def init(worker: int) -> str:
        log("first", worker)
        return f"state {worker}"

    return init


def coroutine(log: Log) -> Callable[[int], Any]:
    async def init(worker: int) -> str:
        await asyncio.sleep(0)
        log("first", worker)
        return f"state {worker}"

    return init


def generator(log: Log) -> Callable[[int], Any]:
    def init(worker: int) -> Iterator[str]:
        log("first", worker)
        yield f"state {worker}"
        log("second", worker)

    return init


def async_generator(log: Log) -> Callable[[int], Any]:
    async def init(worker: int) -> AsyncIterator[str]:
        await asyncio.sleep(0)
        log("first", worker)
        yield f"state {worker}"
        await asyncio.sleep(0)
        log("second", worker)

    return init


INITS = [plain, coroutine, generator, async_generator]

CASES = [(method, init) for method in ("forkserver", None) for init in INITS] + [
    (method, generator) for method in ("spawn", "fork")
]


def state_of_worker(log: Log) -> Callable[[Any], Any]:
    def item(index: int) -> Any:
        info = worker_info()
        assert info is not None
        log("item", info.id)
        return info.id, info.state, os.getpid()

    return item


@pytest.mark.parametrize(("method", "init"), CASES)
async def test_worker_init_fn(method: str | None, init: Any, tmp_path: Path) -> None:
    """Once in each worker before its first task; its second half at the end, once."""
    log = Log(tmp_path / "log")
    workers = 0 if method is None else 2
    p = prefetcher(
        method,
        Map(20, state_of_worker(log)),
        worker_init_fn=init(log),
        num_proc=workers,
    )
    async with p:
        for _ in range(2):
            for number, state, pid in await read(p):
                assert state == f"state {number}"
                assert (pid == os.getpid()) == (method is None)
        assert "second" not in {line[0] for line in log.lines()}
    for pid in {line[-1] for line in log.lines()}:
        words = [line[0] for line in log.lines() if line[-1] == pid]
        halves = [word for word in words if word != "item"]
        assert halves == ["first", "second"][: 1 + ("generator" in init.__name__)]
        assert words[0] == "first"
        assert words[-1] == ("second" if "generator" in init.__name__ else "item")
    assert len([line for line in log.lines() if line[0] == "first"]) == max(1, workers)


@pytest.mark.parametrize("init", [generator, async_generator])
async def test_the_second_half_runs_after_an_early_end(init: Any, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    async with Prefetcher(range(10**6), worker_init_fn=init(log)) as p:
        async for _ in p:
            break
    assert [line[0] for line in log.lines()] == ["first", "second"]


def raises(worker: int) -> None:
    raise LookupError(f"in worker {worker}")


async def raises_async(worker: int) -> None:
    raise LookupError(f"in worker {worker}")


def raises_first(worker: int) -> Iterator[None]:
    raises(worker)
    yield


@pytest.mark.parametrize("init", [raises, raises_async, raises_first])
@pytest.mark.parametrize("num_proc", [0, 2])
@pytest.mark.parametrize("how", ["start", "anext"])
async def test_worker_init_fn_that_raises(init: Any, num_proc: int, how: str) -> None:
    p = Prefetcher(range(3), worker_init_fn=init, num_proc=num_proc)
    begin: Any = p.start if how == "start" else aiter(p).__anext__
    with pytest.raises(WorkerStartError, match="LookupError: in worker") as caught:
        await asyncio.wait_for(begin(), 10)
    cause = caught.value.__cause__
    assert isinstance(cause, LookupError)
    if num_proc:
        assert "test_start_methods.py" in str(cause.__cause__)
    assert descendants() == []


async def test_worker_init_fn_that_dies() -> None:
    p = Prefetcher(range(3), worker_init_fn=faulty.Die("exit 3", bad=0))
    with pytest.raises(WorkerStartError, match="exited with code 3"):
        await asyncio.wait_for(p.start(), 10)


def test_no_worker_info_in_the_parent() -> None:
    assert worker_info() is None


@pytest.mark.parametrize("num_proc", [0, 1])
async def test_no_worker_info_in_the_parent_while_it_reads(num_proc: int) -> None:
    def source() -> Iterator[Any]:
        yield worker_info()

    async for item in Prefetcher(source, split="parent", num_proc=num_proc):
        assert item is None
        assert worker_info() is None


# Pools in workers of pools


def inner(length: int, **arguments: Any) -> Prefetcher:
    return Prefetcher(range(length), **arguments)


@methods
async def test_nested_replicas(method: str) -> None:
    nested = prefetcher(method, Map(8, faulty.identity), num_proc=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fork, and of a length that replicas repeat
        p = Prefetcher(nested, mp_context=method, num_proc=2, split="replicate", ordered=False)
    async with asyncio.timeout(20), p, aiter(p) as iterator:
        items = [await anext(iterator) for _ in range(8)]
    assert set(items) <= set(range(8))
    assert wait_for(lambda: descendants() == [], 1)


@methods
async def test_nested_shards(method: str) -> None:
    nested = prefetcher(method, faulty.Shards(faulty.identity), num_proc=1)
    p = prefetcher(method, nested, num_proc=2, num_shards=2)
    assert await read(p) == [0, 10, 1, 11, 2, 12, 3, 13]
    assert wait_for(lambda: descendants() == [], 1)


def test_a_prefetcher_pickles_until_it_is_started() -> None:
    p = Prefetcher(faulty.Shards(faulty.identity), num_proc=2, num_shards=2, seed=7)
    copy = pickle.loads(pickle.dumps(p))
    assert copy._config.arguments()["seed"] == 7
    assert hasattr(copy, "shard")
    assert not hasattr(inner(3), "shard")


class ItselfAgain:
    """A source whose workers open it again."""

    async def __aiter__(self) -> AsyncIterator[int]:
        async for item in Prefetcher(ItselfAgain(), split="worker"):
            yield item


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_source_that_contains_itself_ends() -> None:
    async with Prefetcher(ItselfAgain(), split="worker") as p:
        with pytest.raises(TaskError, match="contains itself"):
            await read(p)
    assert wait_for(lambda: descendants() == [], 2)


NESTED = """
import asyncio, sys, warnings
from aioprefetch import Prefetcher
from tests import faulty

async def main():
    warnings.simplefilter("ignore")
    method, kind = sys.argv[1:]
    if kind == "shards":
        source = Prefetcher(faulty.Shards(faulty.stuck), mp_context=method)
        p = Prefetcher(source, mp_context=method, num_proc=2, num_shards=2)
    else:
        source = Prefetcher(faulty.Map(100, faulty.stuck), mp_context=method)
        p = Prefetcher(source, mp_context=method, num_proc=2, split="replicate", ordered=False)
    iterator = aiter(p)
    await anext(iterator)
    print("ready", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@methods
@pytest.mark.parametrize("kind", ["shards", "replicas"])
def test_nested_processes_go_down_with_their_parent(method: str, kind: str, tmp_path: Path) -> None:
    script = start_script(tmp_path, NESTED, method, kind)
    assert script.line() == "ready", script.end().err
    assert wait_for(lambda: len(descendants(script.pid)) >= 4, 10)
    below = [process.pid for process in descendants(script.pid)]
    script.process.kill()
    assert wait_for(lambda: not any(map(alive, below)), 2)
    script.end()
