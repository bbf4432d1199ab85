"""Micro-batching: who is answered with what, when a batch begins, what goes wrong for whom."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioprefetch import Batcher, ProcessPool, TaskError
from tests import callees
from tests.helpers import LOOPS, Loop, run
from tests.processes import eventually

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


class Doubles:
    """Doubles numbers, and notes each batch."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[list[int]] = []
        self._seconds = seconds

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        await asyncio.sleep(self._seconds)
        return [2 * item for item in items]


def double_all(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def odd_ones_fail(items: list[int]) -> list[int | Exception]:
    return [ValueError(f"{item} is odd") if item % 2 else item for item in items]


async def ask(batcher: Batcher[Any, Any], items: Any) -> list[Any]:
    return await asyncio.gather(*map(batcher, items), return_exceptions=True)


async def test_each_caller_has_its_own_answer() -> None:
    async with ProcessPool(1) as pool:
        for fn, more in ((Doubles(), {}), (double_all, {}), (double_all, {"pool": pool})):
            async with Batcher(fn, batch_size=8, **more) as batcher:  # type: ignore[arg-type]
                assert await ask(batcher, range(50)) == [2 * n for n in range(50)]


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 99), max_size=40),
    st.integers(1, 9),
    st.sampled_from([0, 0.001]),
    st.sampled_from(LOOPS),
)
def test_batches_hold_everything_once_in_its_order(
    items: list[int], size: int, timeout: float, loop: Loop
) -> None:
    async def work() -> None:
        doubles = Doubles()
        async with Batcher(doubles, batch_size=size, batch_timeout=timeout) as batcher:
            assert await ask(batcher, items) == [2 * item for item in items]
        assert [item for batch in doubles.batches for item in batch] == items
        assert all(len(batch) == size for batch in doubles.batches[:-1])

    run(work(), loop)


async def test_a_batch_begins_when_it_is_full_or_its_oldest_has_waited() -> None:
    doubles = Doubles()
    batcher = Batcher(doubles, batch_size=3, batch_timeout=0.1)
    began = time.monotonic()
    assert await ask(batcher, [1, 2, 3]) == [2, 4, 6]
    assert time.monotonic() - began < 0.09, "it was full"
    began = time.monotonic()
    assert await batcher(4) == 8
    assert 0.09 < time.monotonic() - began < 0.4, "it has waited for others"
    assert doubles.batches == [[1, 2, 3], [4]]


async def test_items_gather_while_a_batch_runs() -> None:
    doubles = Doubles(0.1)
    batcher = Batcher(doubles, batch_size=4, batch_timeout=0)
    first = asyncio.create_task(batcher(0))
    await asyncio.sleep(0.03)
    began = time.monotonic()
    assert await ask(batcher, range(1, 7)) == [2, 4, 6, 8, 10, 12]
    assert time.monotonic() - began < 0.5
    assert await first == 0
    assert doubles.batches == [[0], [1, 2, 3, 4], [5, 6]], "one after another"


async def test_what_waits_at_a_batchs_end_waits_for_its_own_time() -> None:
    doubles = Doubles(0.05)
    batcher = Batcher(doubles, batch_size=2, batch_timeout=0.3)
    full = [asyncio.create_task(batcher(number)) for number in (0, 1)]
    await asyncio.sleep(0.01)
    late = asyncio.create_task(batcher(2))
    await asyncio.gather(*full)
    await asyncio.sleep(0.02)
    assert await ask(batcher, [3]) == [6]
    assert await late == 4
    assert doubles.batches == [[0, 1], [2, 3]]


class Busy:
    """Notes how many batches are asked for at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self, items: list[int]) -> list[int]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        return items


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_as_many_batches_run_at_once_as_may(concurrency: int) -> None:
    busy = Busy()
    async with Batcher(busy, batch_size=2, concurrency=concurrency) as batcher:
        assert await ask(batcher, range(20)) == list(range(20))
    assert busy.most == concurrency


@one_loop
async def test_batches_run_in_several_workers_at_once() -> None:
    async with ProcessPool(2) as pool:
        batcher: Batcher[float, int] = Batcher(_nap, batch_size=1, concurrency=2, pool=pool)
        assert len(set(await ask(batcher, [0.3, 0.3]))) == 2
        await batcher.aclose()


def _nap(items: list[float]) -> list[int]:
    return [callees.nap(item) for item in items]


async def test_a_function_that_gives_an_awaitable_is_awaited() -> None:
    def double_later(items: list[int]) -> Awaitable[list[int]]:
        return doubles(items)

    doubles = Doubles()
    async with Batcher(double_later, batch_size=3) as batcher:
        assert await ask(batcher, range(3)) == [0, 2, 4]


async def test_a_batch_is_nobodys_own_context() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")

    async def whose(items: list[str]) -> list[str]:
        return [name.get()] * len(items)

    batcher = Batcher(whose, batch_size=2)

    async def ask_as(caller: str) -> str:
        name.set(caller)
        return await batcher(caller)

    assert set(await asyncio.gather(ask_as("a"), ask_as("b"))) == {"nobody"}


async def test_a_synchronous_function_runs_on_a_thread_of_its_own() -> None:
    threads: set[int] = set()

    def where(items: list[int]) -> list[int]:
        threads.add(threading.get_ident())
        time.sleep(0.05)
        return items

    async with Batcher(where, batch_timeout=0) as batcher:
        asking = asyncio.create_task(ask(batcher, range(3)))
        beats = 0
        while not asking.done():
            await asyncio.sleep(0.002)
            beats += 1
        assert await asking == [0, 1, 2]
        assert beats > 8, "the loop ran on"
        await batcher(9)
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


@pytest.mark.parametrize("in_pool", [False, True])
async def test_an_exception_in_the_list_is_one_callers(in_pool: bool) -> None:
    async with ProcessPool(1) as pool:
        batcher = Batcher(odd_ones_fail, batch_size=4, pool=pool if in_pool else None)
        answers = await ask(batcher, range(4))
        assert answers[0::2] == [0, 2]
        assert [str(answer) for answer in answers[1::2]] == ["1 is odd", "3 is odd"]
        await batcher.aclose()


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(1), asyncio.CancelledError()])
async def test_one_that_is_raised_is_everybodys(error: BaseException) -> None:
    async def fails(items: list[int]) -> list[int]:
        raise error

    batcher = Batcher(fails, batch_size=3)
    answers = await ask(batcher, range(3))
    assert len({id(answer) for answer in answers}) == 3, "each has one of its own"
    for answer in answers:
        expected = KeyError if isinstance(error, KeyError) else RuntimeError
        assert type(answer) is expected
        assert expected is KeyError or type(error).__name__ in str(answer)
    assert len(await ask(batcher, range(3))) == 3, "and the next batch is asked"


class Refused(Exception):
    """What ``copy`` would make something else of."""

    def __init__(self, who: str) -> None:
        super().__init__(f"refused {who}")
        self.who = who


async def test_what_one_caller_adds_to_its_exception_no_other_sees() -> None:
    async def fails(items: list[int]) -> list[int]:
        error = Refused("x")
        error.add_note("by the model")
        raise error from KeyError("why")

    told = await ask(Batcher(fails, batch_size=3), range(3))
    told[0].add_note("seen by the first")
    told[0].__cause__ = None
    for error in told[1:]:
        assert (str(error), error.who) == ("refused x", "x")
        assert error.__notes__ == ["by the model"]
        assert isinstance(error.__cause__, KeyError)
    depths = [len(traceback.extract_tb(error.__traceback__)) for error in told]
    assert len(set(depths)) == 1, "each has the same traceback"
    assert "in fails" in "".join(traceback.format_exception(told[2]))


async def test_an_exception_that_many_are_given_is_each_ones_own() -> None:
    error = ValueError("all of you")
    told = await ask(Batcher(lambda items: [error] * len(items), batch_size=3), range(3))
    assert [str(each) for each in told] == ["all of you"] * 3
    assert len({id(each) for each in told}) == 3


async def test_an_error_goes_without_the_garbage_collector() -> None:
    async def fails(items: list[int]) -> list[int]:
        raise Refused("x")

    batcher = Batcher(fails, batch_size=1)
    gc.disable()
    try:
        try:
            await batcher(1)
        except Refused as error:
            gone = weakref.ref(error)
            cause = weakref.ref(error.__context__ or error)
        await asyncio.sleep(0)
        assert gone() is None
        assert cause() is None
    finally:
        gc.enable()


async def test_a_worker_that_dies_in_a_batch_is_everybodys_error() -> None:
    async with ProcessPool(1, retries=0) as pool:
        batcher: Batcher[int, int] = Batcher(_dies, batch_size=2, pool=pool)
        answers = await ask(batcher, [1, 2])
        assert all(isinstance(answer, TaskError) for answer in answers)
        await batcher.aclose()


def _dies(items: list[int]) -> list[int]:
    callees.exit_at_once()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([1], "gave 1 answers to 3 items"),
        (None, "not NoneType"),
        (iter("abc"), "must return a"),
        ("abc", "not str"),
    ],
)
async def test_a_wrong_number_of_answers_is_told(answers: Any, message: str) -> None:
    batcher: Batcher[int, Any] = Batcher(lambda _: answers, batch_size=3)
    told = await ask(batcher, range(3))
    assert all(message in str(error) for error in told)
    await batcher.aclose()


async def test_a_cancelled_callers_item_is_left_out() -> None:
    doubles = Doubles(0.05)
    batcher = Batcher(doubles, batch_size=9, batch_timeout=0.02)
    callers = [asyncio.create_task(batcher(number)) for number in range(4)]
    await asyncio.sleep(0)
    callers[1].cancel()
    await asyncio.sleep(0.04)  # the batch has begun
    callers[2].cancel()
    answers = await asyncio.gather(*callers, return_exceptions=True)
    assert answers[0::3] == [0, 6]
    assert all(isinstance(answers[n], asyncio.CancelledError) for n in (1, 2))
    assert doubles.batches == [[0, 2, 3]]
    alone = asyncio.create_task(batcher(5))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.sleep(0.04)
    assert len(doubles.batches) == 1, "a batch of nobody is not asked for"


async def test_one_that_is_cancelled_does_not_fill_a_batch() -> None:
    doubles = Doubles()
    batcher = Batcher(doubles, batch_size=2, batch_timeout=0.1)
    first = asyncio.create_task(batcher(1))
    await asyncio.sleep(0.03)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(batcher(2))
    await asyncio.sleep(0.08)
    assert not second.done(), "its own time has not come"
    assert await ask(batcher, [3]) == [6]
    assert await second == 4
    assert doubles.batches == [[2, 3]]


async def test_in_a_cancelled_scope_of_anyio() -> None:
    doubles = Doubles(0.02)
    batcher = Batcher(doubles, batch_size=2, batch_timeout=0.05)
    other = asyncio.create_task(batcher(1))
    with anyio.move_on_after(0.01) as scope:
        await batcher(2)  # fills the batch, which is not its own
    assert scope.cancelled_caught
    assert await other == 2
    assert doubles.batches == [[2, 1]]


async def test_a_coroutine_that_is_closed_warns_of_nothing() -> None:
    async def fails(items: list[int]) -> list[int]:
        raise KeyError("x")

    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    batcher = Batcher(fails, batch_size=2, batch_timeout=0.01)
    waiting = batcher(1)
    waiting.send(None)
    waiting.close()
    with pytest.raises(KeyError):
        await batcher(2)
    del waiting
    gc.collect()
    await asyncio.sleep(0)
    assert told == []


async def test_within_a_time_out_and_a_task_group() -> None:
    batcher = Batcher(Doubles(0.2), batch_timeout=0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await batcher(1)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(batcher(number)) for number in range(3)]
    assert [task.result() for task in tasks] == [0, 2, 4]


async def test_closing_answers_those_who_wait() -> None:
    batcher = Batcher(Doubles(0.02), batch_size=2, batch_timeout=30)
    waiting = [asyncio.create_task(batcher(number)) for number in range(5)]
    await asyncio.sleep(0)
    await batcher.aclose()
    assert await asyncio.gather(*waiting) == [0, 2, 4, 6, 8]
    with pytest.raises(RuntimeError, match="closed"):
        await batcher(1)
    await batcher.aclose()


async def test_closing_can_be_cancelled_and_its_callers_are_answered() -> None:
    batcher = Batcher(Doubles(0.1), batch_size=2, batch_timeout=30)
    waiting = [asyncio.create_task(batcher(number)) for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await batcher.aclose()
    assert await asyncio.gather(*waiting) == [0, 2, 4]
    await batcher.aclose()


async def test_a_dropped_one_leaves_no_thread() -> None:
    batcher: Batcher[int, int] = Batcher(double_all, batch_timeout=0)
    assert await batcher(1) == 2
    assert _threads()
    del batcher
    gc.collect()
    assert await eventually(lambda: not _threads(), 2)


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "aioprefetch-batcher"]


@one_loop
async def test_it_belongs_to_its_loop() -> None:
    batcher = Batcher(Doubles(), batch_timeout=0)
    assert await batcher(1) == 2

    def elsewhere() -> None:
        with pytest.raises(RuntimeError, match="belongs to the event loop"):
            asyncio.run(batcher.aclose())

    await asyncio.to_thread(elsewhere)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Batcher(3), TypeError, "fn must be a function"),  # type: ignore[arg-type]
        (lambda: Batcher(double_all, batch_size=0), ValueError, "batch_size must be 1 or more"),
        (lambda: Batcher(double_all, batch_timeout=-1), ValueError, "batch_timeout must be"),
        (lambda: Batcher(double_all, concurrency=2), ValueError, "needs an async fn or a pool"),
        (lambda: Batcher(double_all, pool=3), TypeError, "pool must be"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
