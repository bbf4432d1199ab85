"""What workers log comes to the handlers of the process that started them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aioprefetch import Prefetcher, ProcessPool
from aioprefetch._logs import Forwarder
from aioprefetch._messages import Logged
from tests.datasets import Numbers
from tests.helpers import collect, until

log = logging.getLogger("tests.worker")


def chat(item: int) -> int:
    log.info("item %d", item)
    log.debug("not wanted")
    return item


async def chat_async(item: int) -> int:
    return chat(item)


@pytest.mark.parametrize("function", [chat, chat_async])
async def test_records_are_handled_here(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await collect(Prefetcher(Numbers(6), map_fn=function, num_proc=2))
    records = [record for record in caplog.records if record.name == "tests.worker"]
    assert sorted(record.getMessage() for record in records) == [f"item {n}" for n in range(6)]
    assert {record.levelname for record in records} == {"INFO"}
    assert {vars(record)["worker"] for record in records} == {0, 1}
    assert len({record.process for record in records}) == 2


async def test_what_is_not_wanted_does_not_come(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await collect(Prefetcher(Numbers(3), map_fn=chat, num_proc=1))
    assert "tests.worker" not in [record.name for record in caplog.records]


async def test_levels_of_this_process_hold(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.ERROR, "tests.worker"):
        await collect(Prefetcher(Numbers(3), map_fn=chat, num_proc=1))
    assert "tests.worker" not in [record.name for record in caplog.records]


class Awkward:
    """Neither pickled nor, if it is asked to, printed."""

    def __init__(self, *, mute: bool = False) -> None:
        self.mute = mute

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")

    def __str__(self) -> str:
        if self.mute:
            raise RuntimeError("cannot be printed")
        return "awkward"


def log_awkward(item: int) -> int:
    logging.raiseExceptions = False  # or the worker's stderr shows it
    try:
        raise KeyError(item)
    except KeyError:
        log.exception("got %s", Awkward(), extra={"what": Awkward()})
    log.error("lost %s", Awkward(mute=True))
    log.error("the next")
    return item


async def test_anything_may_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert await collect(Prefetcher(Numbers(1), map_fn=log_awkward, num_proc=1)) == [0]
    assert [record.getMessage() for record in caplog.records] == ["got awkward", "the next"]
    assert vars(caplog.records[0])["what"] == "awkward"
    assert "KeyError: 0" in caplog.text
    assert "in log_awkward" in caplog.text


def log_and_work(item: int) -> int:
    log.warning("begun")
    time.sleep(30)
    return item


async def test_they_come_while_a_task_is_done(caplog: pytest.LogCaptureFixture) -> None:
    p = Prefetcher(Numbers(1), map_fn=log_and_work, num_proc=1)
    await p.start()
    batches = aiter(p)
    assert await until(lambda: "begun" in caplog.text, 10.0)
    await batches.aclose()
    p.kill()


def init(worker: int) -> Iterator[None]:
    log.warning("up")
    yield
    log.warning("down")


@pytest.mark.parametrize("function", [chat, chat_async])
async def test_the_first_and_the_last_come_too(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await collect(Prefetcher(Numbers(2), map_fn=function, worker_init_fn=init, num_proc=1))
    assert [record.getMessage() for record in caplog.records] == ["up", "down"]


async def test_they_come_from_calls_on_a_pool(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with ProcessPool(1) as pool:
            await pool.run(chat, 7)
    assert "item 7" in caplog.text


async def test_with_num_proc_0_they_are_here_already(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await collect(Prefetcher(Numbers(2), map_fn=chat, num_proc=0))
    records = [record for record in caplog.records if record.name == "tests.worker"]
    assert [record.getMessage() for record in records] == ["item 0", "item 1"]
    assert not hasattr(records[0], "worker")


def flood(item: int) -> int:
    for number in range(500):
        log.warning("%d %s", number, "x" * 1000)
    return item


async def test_a_flood_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """More than a socket holds, while this process does not read."""
    async with Prefetcher(Numbers(4), map_fn=flood, num_proc=1) as p:
        time.sleep(0.2)  # noqa: ASYNC251 - the loop is blocked
        assert await collect(p) == [0, 1, 2, 3]
    assert len(caplog.records) == 2000


def test_records_beyond_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioprefetch._logs._MANY", 3)
    sent: list[Logged] = []
    may_send = threading.Event()

    def send(logged: Logged) -> None:
        may_send.wait(5)
        sent.append(logged)

    forwarder = Forwarder(4, send)
    for number in range(10):
        forwarder.handle(logging.LogRecord("a", 30, "", 0, "%d", (number,), None))
    may_send.set()
    forwarder.drain()
    texts = [logged.record["msg"] for logged in sent]
    assert texts[0] == "0"
    told = sum(text.isdigit() for text in texts)
    assert f"{10 - told} log records of worker 4 were dropped: too many at once" in texts
