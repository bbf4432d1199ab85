"""Workers that die, hang or do not come up: what is run again, charged, given up."""

from __future__ import annotations

import asyncio
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import (
    PoolBroken,
    Prefetcher,
    TaskError,
    TaskTimeout,
    WorkerDied,
    WorkerStartError,
    _pool,
)
from aioprefetch._lane import Lane
from aioprefetch._process import PidFd
from tests import faulty, mortal
from tests.faulty import BAD, DEATHS, Map
from tests.outcomes import POLICIES, error_of, outcomes, tell, told
from tests.processes import eventually, leftovers, send, workers

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there are no pidfds")
def test_a_process_that_nobody_saw_die_is_dead_from_the_first() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    pidfd = PidFd(done.pid)
    assert wait([pidfd.fileno()], 5)
    with pytest.raises(OSError, match="Bad file descriptor"):
        pidfd.send_signal(signal.SIGKILL)


# One item that kills


AT_BAD: dict[str, list[Any]] = {"raise": ["died 2"], "skip": [], "call": ["mended 2"]}


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", DEATHS)
@one_loop
async def test_an_item_that_kills_fails_alone(how: str, policy: str, num_proc: int) -> None:
    p = Prefetcher(Map(9, faulty.Die(how)), num_proc=num_proc, on_error=POLICIES[policy], retries=0)
    async with p:
        assert await tell(p) == [0, 1, *AT_BAD[policy], *range(3, 9)]
        assert p.skipped == (policy == "skip")


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_an_item_is_tried_again_so_many_times(retries: int, tmp_path: Path) -> None:
    tries = mortal.Tries(tmp_path, {BAD: 99})
    async with Prefetcher(Map(5, tries), retries=retries) as p:
        assert await tell(p) == [0, 1, "died 2", 3, 4]
    assert tries.made() == {0: 1, 1: 1, 2: retries + 1, 3: 1, 4: 1}


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("batch_size", [None, 3])
@one_loop
async def test_deaths_that_are_forgiven_leave_no_trace(
    num_proc: int, ordered: bool, batch_size: int | None, tmp_path: Path
) -> None:
    """Two here and there, and every item comes once, as if there had been none."""
    arguments: dict[str, Any] = {"num_proc": num_proc, "batch_size": batch_size, "shuffle": True}
    there = [plain async for plain in Prefetcher(Map(60, mortal.drawn), **arguments)]
    tries = mortal.Tries(tmp_path, {7: 2, 8: 1, 30: 2, 59: 1}, mortal.drawn)
    p = Prefetcher(Map(60, tries), ordered=ordered, **arguments)
    back = [plain async for plain in p]
    key = repr if not ordered else (lambda _: 0)
    assert list(map(str, sorted(back, key=key))) == list(map(str, sorted(there, key=key)))


@pytest.mark.parametrize("how", DEATHS)
async def test_a_death_says_who_and_how(how: str) -> None:
    async with Prefetcher(Map(4, faulty.PidThenDie(how)), num_prefetch=1, retries=0) as p:
        outcome = await outcomes(p)
    pid, error = outcome[0], outcome[2]
    _, exitcode, word = DEATHS[how]
    assert (error.pid, error.exitcode, error.worker, error.index) == (pid, exitcode, 0, BAD)
    assert word in str(error)
    assert str(pid) in str(error)
    assert outcome[3] not in (pid, outcome[2])
    if how in ("segfault", "abort"):
        assert "faulty.py" in error.stack
    assert isinstance(outcome[3], int)  # another worker goes on


@pytest.mark.parametrize("stage", ["map_fn", "collate_fn"])
async def test_a_death_in_a_batch(stage: str) -> None:
    """Charged to the item in hand, and to none where it was the whole batch."""
    arguments: dict[str, Any] = {"collate_fn": list, stage: faulty.Die("exit 3")}
    p = Prefetcher(range(6), batch_size=3, num_proc=2, retries=0, **arguments)
    error = await error_of(p)
    assert isinstance(error, WorkerDied)
    assert error.indices == (0, 1, 2)
    wanted = (BAD, "fetch") if stage == "map_fn" else (None, "collate")
    assert (error.index, error.stage) == wanted


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_batch_is_made_again_without_the_item_that_kills(policy: str) -> None:
    p = Prefetcher(
        Map(8, faulty.Die("SIGKILL")), batch_size=4, collate_fn=list, on_error=POLICIES[policy]
    )
    wanted: Any = {"raise": "died 2", "skip": [0, 1, 3], "call": [0, 1, "mended 2", 3]}[policy]
    assert await tell(p) == [wanted, [4, 5, 6, 7]]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_death_in_getitems(policy: str) -> None:
    """Charged to no item; under skip the batch is fetched item by item, which finds it."""
    p = Prefetcher(
        faulty.Groups(8, faulty.Die("exit 3")),
        batch_size=4,
        collate_fn=list,
        on_error=POLICIES[policy],
        retries=0,
    )
    wanted: Any = {
        "raise": "died [0, 1, 2, 3]", "skip": [0, 1, 3], "call": [0, 1, "mended 2", 3]
    }[policy]  # fmt: skip
    assert await tell(p) == [wanted, [4, 5, 6, 7]]


async def test_a_death_in_on_error_ends_the_batch() -> None:
    p = Prefetcher(Map(4, faulty.Die("exit 3")), on_error=mortal.die, retries=1)
    assert await tell(p) == [0, 1, "died 2", 3]


async def test_a_death_while_awaiting_is_charged_to_each_item_in_flight() -> None:
    p = Prefetcher(faulty.AsyncMap(8, faulty.Die("exit 3")), num_proc=2, retries=0)
    async with p:
        seen = await outcomes(p)
    died = [error for error in seen if isinstance(error, WorkerDied)]
    assert BAD in [error.index for error in died]
    values = [item for item in seen if isinstance(item, int)]
    assert len(values) + len(died) == 8


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_death_under_a_source_read_here(policy: str) -> None:
    p = Prefetcher(
        iter(range(6)), map_fn=faulty.Die("SIGKILL"), num_proc=2, on_error=POLICIES[policy]
    )
    assert await tell(p) == [0, 1, *AT_BAD[policy], 3, 4, 5]


async def test_what_a_dead_worker_wrote_into_an_item_is_not_seen_by_the_next(
    tmp_path: Path,
) -> None:
    p = Prefetcher(
        mortal.blocks(6), map_fn=mortal.AddInPlaceThenDie(tmp_path, 3), split="parent", num_proc=2
    )
    assert [float(item.max()) async for item in p] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


# Streams


@pytest.mark.parametrize("kind", ["plain", "state", "iterator state"])
@pytest.mark.parametrize("split", ["shard", "worker"])
@pytest.mark.parametrize("batch_size", [None, 3])
@one_loop
async def test_streams_go_on(kind: str, split: str, batch_size: int | None, tmp_path: Path) -> None:
    """Every item once and in its place, however often the workers that read it die."""
    arguments: Any = {"split": split, "num_proc": 2, "batch_size": batch_size}
    there = [str(x) async for x in Prefetcher(mortal.Flow(20, kind), **arguments)]
    tries = mortal.Tries(tmp_path, {4: 1, 13: 2, 105: 1, 118: 2}, mortal.same)
    flow = mortal.Flow(20, kind, tries)
    assert [str(x) async for x in Prefetcher(flow, **arguments)] == there


@one_loop
async def test_a_stream_with_state_is_not_read_again(tmp_path: Path) -> None:
    tries = mortal.Tries(tmp_path, {15: 1}, mortal.same)
    flow = mortal.Flow(20, "state", tries)
    await tell(Prefetcher(flow, num_proc=1, num_prefetch=2))
    assert all(count == 1 for item, count in tries.made().items() if item < 12)


@pytest.mark.parametrize("change", ["other items", "shorter"])
async def test_a_stream_that_does_not_repeat_itself_is_an_error(
    change: str, tmp_path: Path
) -> None:
    flow = mortal.Fickle(20, change, tmp_path)
    seen = await outcomes(Prefetcher(flow, num_proc=1))
    assert seen[:10] == list(range(10))
    error = seen[-1]
    assert (error.stage, type(error)) == ("iterate", TaskError)
    assert "repeat" in str(error)
    assert all(isinstance(item, int) for item in seen[:-1])


async def test_reading_that_kills_ends_its_stream_and_others_go_on() -> None:
    p = Prefetcher(faulty.Shards(faulty.Die("SIGKILL")), num_proc=2, retries=1)
    seen = [told(outcome) for outcome in await outcomes(p)]
    assert seen == [0, 10, 1, 11, "died 2", 12, 13]


@one_loop
async def test_a_replica_starts_afresh(tmp_path: Path) -> None:
    tries = mortal.Tries(tmp_path, {13: 1}, mortal.drawn)
    p = Prefetcher(mortal.Flow(20, "plain", tries), split="replicate", ordered=False, num_proc=1)
    iterator = aiter(p)
    seen = [await anext(iterator) for _ in range(40)]
    await iterator.aclose()
    assert len({value for _, value in seen}) == 40  # its second beginning has other seeds


# Killed from outside


async def until_it_breaks(iterator: Any) -> None:
    async with asyncio.timeout(15):
        while True:
            with suppress(WorkerDied):
                await anext(iterator)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@one_loop
async def test_workers_killed_at_random_are_replaced(method: str) -> None:
    p = Prefetcher(mortal.Sleeps(400, 0.002), num_proc=2, mp_context=method, retries=9)
    async with p:
        seen = []
        async for item in p:
            seen.append(item)
            if item % 80 == 40:
                send(workers()[item % 2])
    assert seen == list(range(400))


@one_loop
async def test_the_fork_server_is_killed() -> None:
    """It takes with it what the stdlib knows of the workers; another is started for the next."""
    async with Prefetcher(mortal.Sleeps(80, 0.005), num_proc=2, retries=9) as p:
        seen = []
        async for item in p:
            seen.append(item)
            if item == 20:
                server: Any = multiprocessing.forkserver
                os.kill(server._forkserver._forkserver_pid, signal.SIGKILL)
    assert seen == list(range(80))


@one_loop
async def test_a_pool_whose_workers_die_again_and_again_does_not_grow() -> None:
    async with Prefetcher(mortal.Sleeps(10**6, 0.001), num_proc=1) as p:
        iterator = aiter(p)
        held = []
        for _ in range(12):
            await anext(iterator)
            held.append(len(leftovers().fds) + len(leftovers().threads))
            pid = workers()[0].pid
            send(workers()[0])
            while not any(worker.pid != pid for worker in workers()):
                await anext(iterator)
        assert max(held) <= held[0] + 4


async def test_all_workers_killed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with Prefetcher(mortal.Sleeps(60, 0.005), num_proc=3) as p:
        seen = []
        async for item in p:
            seen.append(item)
            if item == 20:
                for worker in workers():
                    send(worker)
    assert seen == list(range(60))
    assert sum("another takes its place" in record.message for record in caplog.records) == 3


async def test_an_idle_worker_that_is_killed_is_replaced_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Prefetcher(range(10), num_proc=2) as p:
        await p.start()
        first = {worker.pid for worker in workers()}
        send(workers()[0])
        began = time.monotonic()
        assert await eventually(lambda: caplog.records, 2)
        assert time.monotonic() - began < 0.15
        assert await eventually(lambda: len({w.pid for w in workers()} - first) == 1, 5)
        assert [item async for item in p] == list(range(10))
    assert len(caplog.records) == 1
    assert "SIGKILL" in caplog.records[0].message


@one_loop
async def test_results_that_were_finished_are_not_made_again(tmp_path: Path) -> None:
    """The loop is blocked while they come, and their worker dies."""
    tries = mortal.Tries(tmp_path, {})
    async with Prefetcher(Map(6, tries), num_proc=1, num_prefetch=4) as p:
        iterator = aiter(p)
        first = await anext(iterator)
        mortal.block(0.3)
        send(workers()[0])
        mortal.block(0.1)
        rest = [item async for item in iterator]
    assert [first, *rest] == list(range(6))
    assert set(tries.made().values()) == {1}


@one_loop
@pytest.mark.parametrize("rubbish", [b"\xff" * 64, b"\1\0\0\0\4\0\0\0\0\0\0\0text"])
async def test_a_worker_that_writes_rubbish_to_its_socket_is_replaced(
    rubbish: bytes, tmp_path: Path
) -> None:
    """Whether it looks like a message or not."""
    source = Map(20, mortal.WritesRubbish(tmp_path, rubbish))
    async with Prefetcher(source, num_proc=2, num_prefetch=4) as p:
        assert await tell(p) == list(range(20))


@one_loop
async def test_a_crash_loop_is_pool_broken_and_prompt() -> None:
    """Whatever comes up is killed, every 50 ms."""
    async with Prefetcher(mortal.Sleeps(10**6, 0.01), num_proc=2, num_prefetch=2) as p:
        iterator = aiter(p)
        killing = asyncio.create_task(mortal.kill_all_again_and_again())
        with pytest.raises(PoolBroken) as caught:
            await until_it_breaks(iterator)
        killing.cancel()
        assert isinstance(caught.value.__cause__, WorkerDied)
        with pytest.raises(PoolBroken):
            await until_it_breaks(iterator)
    assert await eventually(lambda: not workers(), 2)


async def test_workers_that_cannot_come_up_again_are_pool_broken(tmp_path: Path) -> None:
    init = mortal.WorksTwice(tmp_path)
    p = Prefetcher(
        mortal.Sleeps(100, 0.01), num_proc=2, worker_init_fn=init, retries=0, num_prefetch=2
    )
    async with p:
        iterator = aiter(p)
        await anext(iterator)
        for worker in workers():
            send(worker)
        with pytest.raises(PoolBroken, match="enough") as caught:
            await until_it_breaks(iterator)
        assert isinstance(caught.value.__cause__, WorkerStartError)


async def test_a_broken_prefetcher_can_be_opened_again() -> None:
    p = Prefetcher(Map(10**4, mortal.die), num_proc=1, retries=0)
    for _ in range(2):
        async with p:
            assert (await tell(p))[-1] == "broken"


async def test_a_death_in_the_start_is_tried_again(tmp_path: Path) -> None:
    async with Prefetcher(range(4), worker_init_fn=mortal.DiesOnce(tmp_path, 9)) as p:
        assert [item async for item in p] == [0, 1, 2, 3]


async def test_a_start_that_always_dies_is_a_start_error() -> None:
    p = Prefetcher(range(4), worker_init_fn=mortal.die)
    with pytest.raises(WorkerStartError, match="exited with code 3"):
        await asyncio.wait_for(p.start(), 15)


@one_loop
async def test_closing_while_a_worker_is_replaced(tmp_path: Path) -> None:
    for delay in (0.0, 0.01, 0.05, 0.1):
        p = Prefetcher(mortal.Sleeps(100, 0.01), num_proc=2)
        await p.start()
        send(workers()[0])
        await asyncio.sleep(delay)
        began = time.monotonic()
        await p.aclose()
        assert time.monotonic() - began < 2
        assert not workers()


# Hangs


AT_LATE: dict[str, list[Any]] = {"raise": ["late 2"], "skip": [], "call": ["mended 2"]}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["sleep", "C loop", "lock", "stop"])
@one_loop
async def test_an_item_that_hangs_is_given_up(how: str, policy: str) -> None:
    p = Prefetcher(
        Map(6, mortal.Hangs(how)),
        num_proc=2,
        task_timeout=0.3,
        retries=0,
        on_error=POLICIES[policy],
    )
    async with p:
        assert await tell(p) == [0, 1, *AT_LATE[policy], 3, 4, 5]


async def test_a_time_out_says_where_it_was_stuck() -> None:
    p = Prefetcher(Map(4, mortal.Hangs("sleep")), task_timeout=0.2, retries=1)
    error = await error_of(p)
    assert isinstance(error, TaskTimeout)
    assert (error.index, error.worker) == (BAD, 0)
    assert error.stack is not None
    assert "mortal.py" in error.stack
    assert "task_timeout=0.2 s" in str(error)


async def test_a_time_out_of_a_collate() -> None:
    p = Prefetcher(
        range(6), batch_size=3, collate_fn=mortal.Hangs("sleep"), task_timeout=0.2, retries=0
    )
    seen = await outcomes(p)
    assert told(seen[0]) == "late [0, 1, 2]"
    assert seen[1] == [3, 4, 5]


async def test_only_what_is_late_is_given_up_of_what_is_awaited() -> None:
    p = Prefetcher(range(12), map_fn=mortal.hangs_async, num_proc=1, task_timeout=0.5, retries=0)
    assert await tell(p) == [0, 1, "late 2", *range(3, 12)]


async def test_a_blocked_loop_is_no_hang() -> None:
    async with Prefetcher(mortal.Sleeps(20, 0.05), num_proc=2, task_timeout=0.3) as p:
        seen = []
        async for item in p:
            seen.append(item)
            if item == 3:
                mortal.block(1.0)
    assert seen == list(range(20))


@one_loop
async def test_a_stopped_idle_worker_is_replaced_at_its_first_task() -> None:
    async with Prefetcher(range(40), num_proc=2) as p:
        await p.start()
        send(workers()[0], signal.SIGSTOP)
        began = time.monotonic()
        assert [item async for item in p] == list(range(40))
        assert time.monotonic() - began < 3


async def test_waiting_for_data_is_no_hang(tmp_path: Path) -> None:
    flow = mortal.Slow(4, 0.5)
    p = Prefetcher(flow, num_proc=1, task_timeout=0.2, retries=0)
    assert await tell(p) == [0, 1, 2, 3]


# Between the rules


@one_loop
async def test_a_successor_that_does_not_come_up_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool, "START_DEADLINE", 1.5)
    init = mortal.HangsSecond(tmp_path)
    async with Prefetcher(mortal.Sleeps(40, 0.005), num_proc=1, worker_init_fn=init) as p:
        iterator = aiter(p)
        assert await anext(iterator) == 0
        send(workers()[0])
        async with asyncio.timeout(20):
            assert [item async for item in iterator] == list(range(1, 40))


@one_loop
async def test_a_worker_stopped_while_it_reads_is_replaced() -> None:
    p = Prefetcher(mortal.Slow(20, 0.02), num_proc=1, split="worker", task_timeout=1.0)
    seen = []
    async with p, asyncio.timeout(20):
        async for item in p:
            seen.append(item)
            if item == 5:
                send(workers()[0], signal.SIGSTOP)
    assert seen == list(range(20))


@one_loop
async def test_a_replica_leaves_out_the_item_that_killed_it(tmp_path: Path) -> None:
    tries = mortal.Tries(tmp_path, {13: 99}, mortal.same)
    p = Prefetcher(
        mortal.Flow(20, "plain"),
        map_fn=tries,
        split="replicate",
        ordered=False,
        num_proc=1,
        batch_size=10,
        collate_fn=list,
        on_error="skip",
        retries=0,
    )
    iterator = aiter(p)
    batches = [await anext(iterator) for _ in range(3)]
    await iterator.aclose()
    assert sorted(map(len, batches)) == [9, 9, 10] or 9 in map(len, batches)
    assert p.skipped >= 1


@one_loop
async def test_poison_here_and_there_does_not_break_the_run() -> None:
    source = Map(1000, mortal.SegfaultsAt(100))
    async with Prefetcher(source, num_proc=1, on_error="skip") as p:
        assert await outcomes(p, 2000) == [item for item in range(1000) if item % 100 != 50]
        assert p.skipped == 10


@one_loop
async def test_what_cannot_be_taken_in_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant that fails in the parent costs a worker, and no item."""
    received, calls = Lane._received, []

    def fail_once(lane: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("sent again while it is lent")
        return received(lane, *args)

    monkeypatch.setattr(Lane, "_received", fail_once)
    async with Prefetcher(mortal.Sleeps(60, 0.002), num_proc=2) as p:
        assert await tell(p) == list(range(60))


@one_loop
async def test_tracks_of_streams_do_not_grow(tmp_path: Path) -> None:
    tries = mortal.Tries(tmp_path, {13: 99}, mortal.same)
    p = Prefetcher(mortal.Flow(400, "plain"), map_fn=tries, split="worker", retries=0)
    async with p:
        await tell(p)
        for _ in range(5):
            await anext(aiter(p))
        dispatch = p._session._pool.dispatch  # type: ignore[union-attr]
        assert all(not track._later for track in dispatch._tracks.values())
        assert len(dispatch._tracks) <= 1


async def test_an_async_stream_that_is_left_is_closed_in_its_worker(tmp_path: Path) -> None:
    flow = mortal.ClosedFlow(tmp_path)
    async with Prefetcher(flow, split="worker", num_proc=1) as p:
        async for item in p:
            if item == 3:
                break
        assert await eventually(lambda: flow.closed() == 1, 3)


# Asked for by the environment


@one_loop
async def test_workers_can_offer_themselves_to_the_oom_killer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOPREFETCH_OOM_SCORE_ADJ", "500")
    async with Prefetcher(Map(2, mortal.oom_score)) as p:
        assert [item async for item in p] == [500, 500]
    monkeypatch.setenv("AIOPREFETCH_OOM_SCORE_ADJ", "much")
    with pytest.raises(ValueError, match="from -1000 to 1000, not 'much'"):
        await Prefetcher(range(2)).start()
