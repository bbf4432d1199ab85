"""What becomes of an error: each stage under each policy, odd exceptions, deaths."""

import asyncio
import gc
import os
import pickle
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from aioprefetch import (
    Prefetcher,
    PrefetchError,
    SerializationError,
    TaskError,
    WorkerDied,
    WorkerStartError,
)
from tests import faulty
from tests.faulty import BAD, NAMES, Map
from tests.outcomes import POLICIES, error_of, outcomes, tell, told

HERE = os.getpid()

num_procs = pytest.mark.parametrize("num_proc", [0, 1])
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

# Each stage under each policy

Rule = tuple[str, int | None, list[Any], int]  # policy, batch_size, what comes, p.skipped
Cell = tuple[str, str, int | None, list[Any], int]

ITEM_RULE: list[Rule] = [
    ("raise", None, [0, 1, "{} 2", 3, 4], 0),
    ("skip", None, [0, 1, 3, 4], 1),
    ("call", None, [0, 1, "mended 2", 3, 4], 0),
    ("raise", 2, [[0, 1], "{} 2", [4]], 0),
    ("skip", 2, [[0, 1], [3], [4]], 1),
    ("call", 2, [[0, 1], ["mended 2", 3], [4]], 0),
]


def governed(stage: str, rules: list[Rule] = ITEM_RULE) -> list[Cell]:
    return [(stage, *rule) for rule in rules]


def always(stage: str, batch_size: int | None, expected: list[Any]) -> list[Cell]:
    """The same under every policy."""
    return [(stage, policy, batch_size, expected, 0) for policy in POLICIES]


STAGES: dict[str, dict[str, Any]] = {
    "fetch": {"source": Map(5, faulty.fail)},
    "fetch async": {"source": faulty.AsyncMap(5, faulty.fail)},
    "map": {"source": range(5), "map_fn": faulty.fail},
    "collate": {"source": range(5), "collate_fn": faulty.fail},
    "result": {"source": range(5), "map_fn": faulty.unpicklable},
    "iterate": {"source": faulty.Items(5), "split": "worker"},
    "iterate here": {"source": faulty.Items(5), "split": "parent"},
    "iterate async": {"source": faulty.AsyncItems(5), "split": "parent"},
}

CELLS: list[Cell] = [
    *governed("fetch"),
    *governed("fetch async"),
    *governed("map"),
    *always("collate", None, [0, 1, "{} [2]", 3, 4]),
    *always("collate", 2, [[0, 1], "{} [2, 3]", [4]]),
    *always("iterate", None, [0, 1, "{} 2"]),
    *always("iterate", 3, [[0, 1], "{} 2"]),
    *always("iterate here", None, [0, 1, "{} 2"]),
    *always("iterate here", 3, [[0, 1], "{} 2"]),
    *always("iterate async", None, [0, 1, "{} 2"]),
]
RESULT_CELLS: list[Cell] = [
    *governed("result", ITEM_RULE[:3]),
    *always("result", 2, [[0, 1], "{} [2, 3]", [4]]),
]


def prefetcher_of(stage: str, policy: str, batch_size: int | None, **more: Any) -> Prefetcher:
    arguments = {"batch_size": batch_size, "on_error": POLICIES[policy], **STAGES[stage], **more}
    if batch_size is not None:
        arguments.setdefault("collate_fn", list)
    return Prefetcher(arguments.pop("source"), **arguments)


async def check_cell(cell: Cell, num_proc: int) -> None:
    stage, policy, batch_size, expected, skipped = cell
    p = prefetcher_of(stage, policy, batch_size, num_proc=num_proc)
    name = stage.split()[0]
    wanted = [item.format(name) if isinstance(item, str) else item for item in expected]
    assert await tell(p) == wanted
    assert p.skipped == skipped
    assert p.delivered == sum(not str(item).startswith(name) for item in wanted)


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_stage_under_policy_on_the_thread(cell: Cell) -> None:
    await check_cell(cell, 0)


@one_loop
@pytest.mark.parametrize("cell", CELLS + RESULT_CELLS, ids=str)
async def test_stage_under_policy_in_a_process(cell: Cell) -> None:
    await check_cell(cell, 1)


async def test_the_thread_pickles_no_result() -> None:
    seen = await outcomes(prefetcher_of("result", "raise", None, num_proc=0))
    assert isinstance(seen[BAD], type(threading.Lock()))


ON_ERROR: list[tuple[Any, list[Any], int]] = [
    (faulty.mend_with_error, [0, 1, "on_error 2", 3], 0),
    (faulty.mend_by_raising_it, [0, 1, "on_error 2", 3], 0),
    (faulty.mend_with_skip, [0, 1, 3], 1),
    (faulty.mend_async, [0, 1, "mended 2", 3], 0),
    (lambda error: None, [0, 1, None, 3], 0),
]


@num_procs
@pytest.mark.parametrize(("on_error", "expected", "skipped"), ON_ERROR)
async def test_on_error_that_fails_or_skips(
    num_proc: int, on_error: Any, expected: list[Any], skipped: int
) -> None:
    p = Prefetcher(Map(4, faulty.fail), on_error=on_error, num_proc=num_proc)
    assert await tell(p) == expected
    assert p.skipped == skipped


@num_procs
async def test_on_error_that_fails_loses_its_batch(num_proc: int) -> None:
    p = Prefetcher(
        Map(5, faulty.fail),
        on_error=faulty.mend_with_error,
        num_proc=num_proc,
        batch_size=2,
        collate_fn=list,
    )
    assert await tell(p) == [[0, 1], "on_error 2", [4]]


async def test_on_error_whose_value_does_not_travel() -> None:
    p = Prefetcher(range(4), map_fn=faulty.unpicklable, on_error=faulty.mend_with_lock)
    seen = await outcomes(p)
    assert [type(outcome) for outcome in seen] == [int, int, TaskError, int]
    assert isinstance(seen[BAD].__cause__, SerializationError)


@num_procs
async def test_a_mended_item_is_not_mapped(num_proc: int) -> None:
    p = Prefetcher(
        Map(4, faulty.fail), map_fn=lambda x: x * 10, on_error=faulty.mend, num_proc=num_proc
    )
    assert await tell(p) == [0, 10, "mended 2", 30]


@num_procs
async def test_a_batch_that_is_all_left_out_is_not_delivered(num_proc: int) -> None:
    p = Prefetcher(Map(5, faulty.fail), batch_size=1, on_error="skip", num_proc=num_proc)
    assert [batch.tolist() for batch in await outcomes(p)] == [[0], [1], [3], [4]]
    assert (p.delivered, p.skipped) == (4, 1)


@num_procs
async def test_drop_last_looks_at_the_planned_size(num_proc: int) -> None:
    p = prefetcher_of("fetch", "skip", 2, num_proc=num_proc, drop_last=True)
    assert await tell(p) == [[0, 1], [3]]


@num_procs
async def test_items_left_out_of_a_batch_that_then_fails_are_counted(num_proc: int) -> None:
    p = Prefetcher(
        Map(3, faulty.fail),
        batch_size=3,
        collate_fn=lambda items: items[9],
        on_error="skip",
        num_proc=num_proc,
    )
    assert await tell(p) == ["collate [0, 1, 2]"]
    assert p.skipped == 1


@num_procs
@pytest.mark.parametrize("policy", POLICIES)
async def test_map_errors_of_a_stream(num_proc: int, policy: str) -> None:
    p = Prefetcher(
        faulty.Shards(faulty.identity, [0]),
        map_fn=faulty.fail,
        num_shards=1,
        on_error=POLICIES[policy],
        num_proc=num_proc,
    )
    at_bad = {"raise": ["map 2"], "skip": [], "call": ["mended 2"]}[policy]
    assert await tell(p) == [0, 1, *at_bad, 3]
    assert p.skipped == (policy == "skip")


GROUPS = {
    "raise": [[0, 1], "fetch [2, 3]", [4]],
    "skip": [[0, 1], [3], [4]],
    "call": [[0, 1], ["mended 2", 3], [4]],
}


@num_procs
@pytest.mark.parametrize("policy", POLICIES)
async def test_getitems_that_raises_is_fetched_again_item_by_item(
    num_proc: int, policy: str
) -> None:
    p = Prefetcher(
        faulty.Groups(5, faulty.fail),
        batch_size=2,
        collate_fn=list,
        on_error=POLICIES[policy],
        num_proc=num_proc,
    )
    assert await tell(p) == GROUPS[policy]


@num_procs
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("source", "map_fn"), [(Map(4, faulty.leave_out), None), (range(4), faulty.leave_out)]
)
async def test_the_users_skip_leaves_out_and_is_not_counted(
    num_proc: int, policy: str, source: Any, map_fn: Any
) -> None:
    p = Prefetcher(source, map_fn=map_fn, on_error=POLICIES[policy], num_proc=num_proc)
    assert await tell(p) == [0, 1, 3]
    assert p.skipped == 0


@num_procs
async def test_counts_begin_anew_with_each_epoch(num_proc: int) -> None:
    async with Prefetcher(Map(5, faulty.fail), on_error="skip", num_proc=num_proc) as p:
        for _ in range(2):
            assert await tell(p) == [0, 1, 3, 4]
            assert (p.delivered, p.skipped) == (4, 1)


# What the error says


@num_procs
async def test_the_error_names_its_place(num_proc: int) -> None:
    p = Prefetcher(Map(6, faulty.fail), batch_size=2, num_proc=num_proc, sampler=[5, 4, BAD, 3])
    p.set_epoch(3)
    error = await error_of(p)
    place = (error.index, error.indices, error.seq, error.epoch, error.worker, error.stage)
    assert place == (BAD, (BAD, 3), 1, 3, 0, "fetch")
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("bad 2",)
    for word in ("item 2", "fetch", "ValueError: bad 2", "batch 1", "epoch 3", "worker 0"):
        assert word in str(error)


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("stage", ["fetch", "fetch async", "map", "collate", "iterate"])
async def test_the_remote_traceback_is_in_the_formatted_one(
    stage: str, batch_size: int | None
) -> None:
    text = "".join(traceback.format_exception(await error_of(prefetcher_of(stage, "raise", None))))
    assert "tests/faulty.py" in text
    assert "ValueError: bad 2" in text
    assert text.index("faulty.py") < text.rindex("TaskError")


async def test_the_thread_keeps_the_live_original() -> None:
    raised: list[BaseException] = []

    def keep(item: int) -> None:
        raised.append(ValueError(item))
        raise raised[-1]

    seen = await outcomes(Prefetcher(range(3), map_fn=keep, num_proc=0))
    assert all(error.__cause__ is original for error, original in zip(seen, raised, strict=True))


async def test_the_error_of_another_prefetcher_stays_a_cause() -> None:
    """A TaskError of the user's, from a Prefetcher inside of the source, say."""
    seen = await outcomes(Prefetcher(Map(1, lambda _: faulty.odd(NAMES.index("TaskError")))))
    assert str(seen[0].__cause__) == "of another Prefetcher"
    assert (seen[0].__cause__.index, seen[0].index) == (7, 0)
    assert "faulty.py" in "".join(traceback.format_exception(seen[0]))


@pytest.mark.parametrize("kind", [TaskError, WorkerDied])
def test_errors_pickle(kind: type[TaskError]) -> None:
    error = kind("text", index=1, indices=[1, 2], seq=3, epoch=4, worker=5, stage="map")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "text"
    assert copy.__dict__ == error.__dict__


async def test_a_death_pickles() -> None:
    error = await error_of(Prefetcher(Map(3, faulty.Die("exit 3")), num_prefetch=1))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.pid, copy.exitcode, copy.index) == (error.__dict__["pid"], 3, BAD)


# Odd exceptions: every one in one pass, and one item more

ODD_PLACES: dict[str, dict[str, Any]] = {
    "fetch": {"source": Map(len(NAMES) + 1, faulty.odd)},
    "fetch async": {"source": faulty.AsyncMap(len(NAMES) + 1, faulty.odd)},
    "map": {"map_fn": faulty.odd},
    "map async": {"map_fn": faulty.odd_async},
    "collate": {"collate_fn": faulty.odd},
    "collate async": {"collate_fn": faulty.odd_async},
    "on_error": {"source": Map(len(NAMES), lambda _: 1 / 0), "on_error": faulty.odd_on_error},
    "fetch many": {
        "source": faulty.Groups(len(NAMES) + 1, faulty.odd),
        "batch_size": 1,
        "collate_fn": lambda batch: batch[0],
    },
}


def check_odd(seen: list[Any], stage: str) -> None:
    """Each of the errors in its place, told by the name of its type."""
    assert [type(error) for error in seen] == [TaskError] * len(NAMES)
    assert {error.stage for error in seen} == {stage}
    assert [name for name, error in zip(NAMES, seen, strict=True) if name not in str(error)] == []
    assert [n for n, e in zip(NAMES, seen, strict=True) if n.strip(":") not in cause_of(e)] == []
    assert all(len(str(error)) < 10_000 for error in seen)


def cause_of(error: TaskError) -> str:
    cause = error.__cause__
    return f"{type(cause).__name__}: {'' if 'BeShown' in type(cause).__name__ else cause}"


@num_procs
@pytest.mark.parametrize("place", ODD_PLACES)
async def test_odd_errors(place: str, num_proc: int) -> None:
    arguments = {"source": range(len(NAMES) + 1), **ODD_PLACES[place]}
    p = Prefetcher(arguments.pop("source"), num_proc=num_proc, **arguments)
    seen = await outcomes(p)
    assert seen[len(NAMES) :] == ([] if place == "on_error" else [len(NAMES)])
    check_odd(seen[: len(NAMES)], place.split()[0])


@num_procs
@pytest.mark.parametrize("place", ["map", "map async", "fetch"])
async def test_odd_errors_are_skipped(place: str, num_proc: int) -> None:
    arguments = {"source": range(len(NAMES) + 1), **ODD_PLACES[place]}
    p = Prefetcher(arguments.pop("source"), num_proc=num_proc, on_error="skip", **arguments)
    assert await outcomes(p) == [len(NAMES)]
    assert p.skipped == len(NAMES)


@num_procs
@pytest.mark.parametrize(
    ("shards", "end"),
    [(faulty.OddShards, "StopIteration"), (faulty.AsyncOddShards, "StopAsyncIteration")],
)
async def test_odd_errors_end_their_stream_alone(shards: Any, end: str, num_proc: int) -> None:
    """``end`` is how an iterator says that it has no more."""
    p = Prefetcher(shards(), num_shards=len(NAMES) + 1, num_proc=num_proc)
    seen = await outcomes(p)
    assert seen[: len(NAMES) + 1] == list(range(len(NAMES) + 1))
    errors = seen[len(NAMES) + 1 :]
    assert {error.stage for error in errors} == {"iterate"}
    raised = [name for name in NAMES if name != end]
    assert [name for name, e in zip(raised, errors, strict=True) if name not in str(e)] == []


async def pass_over(p: Prefetcher) -> AsyncIterator[tuple[str, list[Any]]]:
    """An epoch of each odd error."""
    for name in NAMES:
        yield name, await outcomes(p)


IN_THE_PARENT: list[tuple[type, int, str]] = [
    (faulty.OddEpochs, 1, "StopIteration"),
    (faulty.AsyncOddEpochs, 1, "StopAsyncIteration"),
    (faulty.OddIter, 0, ""),
    (faulty.AsyncOddIter, 0, ""),
    (faulty.OddSetEpoch, 0, ""),
]


@num_procs
@pytest.mark.parametrize(("source", "before", "end"), IN_THE_PARENT)
async def test_odd_errors_of_a_source_read_in_the_parent(
    source: Any, before: int, end: str, num_proc: int
) -> None:
    async with Prefetcher(source(), split="parent", num_proc=num_proc) as p:
        async for name, seen in pass_over(p):
            errors = [error for error in seen if isinstance(error, TaskError)]
            assert len(seen) - len(errors) == before, name
            assert len(errors) == (name != end), name
            for error in errors:
                assert name in str(error)
                assert (error.stage, error.index) == ("iterate", before)


@num_procs
@pytest.mark.parametrize("sampler", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("kind", [faulty.OddEpochs, faulty.AsyncOddEpochs, faulty.OddIter])
async def test_odd_errors_of_a_sampler(sampler: str, kind: Any, num_proc: int) -> None:
    end = {faulty.OddEpochs: "StopIteration", faulty.AsyncOddEpochs: "StopAsyncIteration"}
    arguments = {sampler: kind()}
    async with Prefetcher(Map(100, faulty.identity), num_proc=num_proc, **arguments) as p:
        if sampler == "batch_sampler" and kind is not faulty.OddIter:
            # Its one item is no list of keys, which is an error too.
            assert "TypeError" in str((await outcomes(p))[0])
            return
        async for name, seen in pass_over(p):
            errors = [error for error in seen if isinstance(error, TaskError)]
            assert len(errors) == (name != end.get(kind)), name
            assert all(name in str(error) for error in errors)


@one_loop
async def test_odd_errors_while_a_result_is_pickled() -> None:
    seen = await outcomes(Prefetcher(Map(len(NAMES) + 1, faulty.OddReduce)))
    assert seen.pop() == len(NAMES)
    assert [type(error) for error in seen] == [TaskError] * len(NAMES)
    assert {error.stage for error in seen} == {"result"}


async def test_odd_errors_while_a_result_is_rebuilt() -> None:
    seen = await outcomes(Prefetcher(Map(len(NAMES) + 1, faulty.OddSetState)))
    assert seen.pop().number == len(NAMES)
    assert [type(error) for error in seen] == [TaskError] * len(NAMES)
    assert {error.stage for error in seen} == {"result"}


STARTING: dict[str, Callable[[int], dict[str, Any]]] = {
    "factory": lambda n: {"source": lambda: [faulty.odd(n)]},
    "worker_init_fn": lambda n: {"worker_init_fn": lambda _: faulty.odd(n)},
}


@pytest.mark.parametrize(
    "name", ["SystemExit", "KeyboardInterrupt", "CancelledError", "ValueError"]
)
@pytest.mark.parametrize("place", STARTING)
@num_procs
async def test_odd_errors_while_starting(place: str, name: str, num_proc: int) -> None:
    arguments = {"source": range(3), **STARTING[place](NAMES.index(name))}
    p = Prefetcher(arguments.pop("source"), num_proc=num_proc, **arguments)
    with pytest.raises(WorkerStartError, match=name) as caught:
        await asyncio.wait_for(p.start(), 10)
    assert "faulty.py" in "".join(traceback.format_exception(caught.value))


@num_procs
async def test_a_cancelled_error_of_the_users_cancels_nothing(num_proc: int) -> None:
    number = NAMES.index("CancelledError")
    p = Prefetcher(range(2), map_fn=lambda _: faulty.odd(number), num_proc=num_proc)
    task = asyncio.ensure_future(outcomes(p))
    seen = await task
    assert [type(error.__cause__) for error in seen] == [asyncio.CancelledError] * 2
    assert not task.cancelled()


# What does not travel


class KeySource(Map):
    """Takes any key that is an index by ``__index__``."""

    def __getitem__(self, key: Any) -> int:
        return faulty.fail(int(key.__index__()))  # type: ignore[no-any-return]


UNSHIPPABLE: dict[str, tuple[dict[str, Any], str]] = {
    "source": ({"source": faulty.Holder(threading.Lock())}, "source.config['inner'][1]"),
    "resisting": ({"source": faulty.Holder(faulty.Resisting())}, "[1].handle"),
    "map_fn": ({"map_fn": faulty.Holder(threading.Lock())}, "map_fn.config['inner'][1]"),
    "collate_fn": ({"collate_fn": faulty.Holder(threading.Lock())}, "collate_fn.config"),
    "on_error": ({"on_error": faulty.Holder(threading.Lock())}, "on_error.config"),
    "worker_init_fn": ({"worker_init_fn": faulty.Holder(threading.Lock())}, "worker_init_fn.con"),
    "closure": (
        {"map_fn": (lambda held: lambda x: held and x)(threading.Lock())},
        "map_fn → variable held",
    ),
    "generator": (
        {"map_fn": (lambda held: lambda x: held and x)(x for x in "ab")},
        "map_fn → variable held",
    ),
}


@pytest.mark.parametrize("what", UNSHIPPABLE)
@pytest.mark.parametrize("how", ["start", "enter", "anext"])
@one_loop
async def test_what_cannot_be_shipped_is_named(what: str, how: str) -> None:
    arguments, path = UNSHIPPABLE[what]
    arguments = {"source": range(3), **arguments}
    p = Prefetcher(arguments.pop("source"), **arguments)
    begin: Any = {"start": p.start, "enter": p.__aenter__, "anext": aiter(p).__anext__}[how]
    with pytest.raises(SerializationError) as caught:
        await asyncio.wait_for(begin(), 5)
    assert path in str(caught.value)


async def test_what_was_not_shipped_can_be_mended_and_started() -> None:
    holder = faulty.Holder(threading.Lock())
    p = Prefetcher(holder)
    with pytest.raises(SerializationError):
        await p.start()
    holder.config = {}
    async with p:
        assert await outcomes(p) == [0, 1, 2]


@pytest.mark.parametrize("batch_size", [None, 2])
async def test_an_unpicklable_result_is_named(batch_size: int | None) -> None:
    p = Prefetcher(
        Map(3, lambda i: faulty.Holder(threading.Lock()) if i == BAD else i),
        batch_size=batch_size,
        collate_fn=None if batch_size is None else list,
    )
    error = await error_of(p)
    assert isinstance(error.__cause__, SerializationError)
    assert "config['inner'][1]" in str(error.__cause__)
    assert error.stage == "result"


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_unpicklable_key_fails_alone(policy: str) -> None:
    keys = [0, 1, faulty.Holder(threading.Lock()), 3]
    p = Prefetcher(
        Map(9, faulty.identity),
        sampler=keys,
        batch_size=2,
        collate_fn=list,
        on_error=POLICIES[policy],
    )
    seen = await outcomes(p)
    assert seen[0] == [0, 1]
    if policy == "raise":
        assert "config['inner'][1]" in str(seen[1])
        assert isinstance(seen[1].__cause__, SerializationError)
        assert "Holder" in str(seen[1].index)
        assert "Lost" not in f"{seen[1].index}{seen[1].indices}"
    elif policy == "skip":
        assert seen[1:] == [[3]]
    else:
        assert seen[1][1] == 3
        assert "Holder" in seen[1][0]
        assert "Lost" not in seen[1][0]


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_unpicklable_item_of_a_source_read_here_fails_alone(policy: str) -> None:
    items = [0, 1, faulty.Holder(threading.Lock()), 3]
    p = Prefetcher(
        iter(items), batch_size=2, collate_fn=list, on_error=POLICIES[policy], split="parent"
    )
    seen = await outcomes(p)
    wanted: Any = {"raise": ["fetch 2"], "skip": [[3]], "call": [["mended 2", 3]]}[policy]
    assert [told(outcome) for outcome in seen] == [[0, 1], *wanted]
    if policy == "raise":
        assert "config['inner'][1]" in str(seen[1].__cause__)


async def test_a_source_that_cannot_be_rebuilt_fails_the_start() -> None:
    p = Prefetcher(Map(3, faulty.identity), map_fn=faulty.Holder(faulty.FailsIn("worker")))
    with pytest.raises(PrefetchError, match="not in the worker") as caught:
        await asyncio.wait_for(p.start(), 10)
    assert "faulty.py" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("policy", POLICIES)
async def test_an_item_that_cannot_be_rebuilt_in_the_worker(
    policy: str, batch_size: int | None
) -> None:
    """It counts as a fetch that failed."""
    items = [0, 1, faulty.FailsIn("worker"), 3]
    collate = None if batch_size is None else list
    p = Prefetcher(
        iter(items),
        split="parent",
        batch_size=batch_size,
        collate_fn=collate,
        on_error=POLICIES[policy],
    )
    mended = {"raise": ["fetch 2"], "skip": [], "call": ["mended 2"]}[policy]
    if batch_size is None:
        assert await tell(p) == [0, 1, *mended, 3]
    elif policy == "raise":
        assert (await tell(p))[0] == [0, 1]
    else:
        assert await tell(p) == [[0, 1], [*mended, 3]]
    assert p.skipped == (policy == "skip")


async def test_a_key_that_cannot_be_rebuilt_in_the_worker_fails_alone() -> None:
    p = Prefetcher(KeySource(9, faulty.identity), sampler=[0, faulty.FailsIn("worker", 1), 3])
    seen = await outcomes(p)
    assert [seen[0], type(seen[1]), seen[2]] == [0, TaskError, 3]
    assert "not in the worker" in str(seen[1])


async def test_a_result_that_cannot_be_rebuilt_here() -> None:
    seen = await outcomes(Prefetcher(faulty.MadeWithPid(HERE)))
    assert [told(outcome) for outcome in seen] == [0, 1, "result [2]", 3, 4]
    assert "not in the parent" in str(seen[BAD])


async def test_a_key_that_cannot_be_rebuilt_here_still_names_its_error() -> None:
    """The key comes back with the error, where it resists."""
    keys = [0, faulty.FailsIn("parent", BAD), 3]
    seen = await outcomes(Prefetcher(KeySource(9, faulty.identity), sampler=keys))
    assert [seen[0], type(seen[1]), seen[2]] == [0, TaskError, 3]
    assert "bad 2" in str(seen[1])


@one_loop
@pytest.mark.parametrize("arguments", [{"map_fn": faulty.fail}, {"transfer": faulty.fail}])
async def test_an_error_does_not_keep_its_pass_alive(arguments: dict[str, Any]) -> None:
    """Nor does it wait for the garbage collector to end what was dropped."""
    async with Prefetcher(Map(4, faulty.identity), num_proc=0, **arguments) as p:
        gc.disable()
        try:
            iterator = aiter(p)
            for _ in range(4):
                with suppress(TaskError):
                    await anext(iterator)
            there = weakref.ref(iterator)
            del iterator
            assert there() is None
        finally:
            gc.enable()
