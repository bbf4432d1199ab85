"""The server of examples/inference_server.py, in a process of its own and under fire."""

from __future__ import annotations

import asyncio
import signal
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from sklearn.datasets import load_digits

from aioprefetch import PoolBroken
from examples.inference_server import LARGEST, Metrics, Prepare, Prepared, create_app, draw
from tests.benchmarks.serving.client import Answer, connect, ready, scans
from tests.benchmarks.serving.faults import damage
from tests.benchmarks.serving.processes import server

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
COMMAND = ("examples/inference_server.py", "--port", "0")


@one_loop
async def test_it_answers_and_ends_when_all_are_answered() -> None:
    with server(*COMMAND) as up:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{up.port}", timeout=30) as client:
            assert (await client.get("/health")).text == "ok"
            assert await right_of(client, 20) >= 18
            bad = await client.post("/predict", content=b"no image")
            assert bad.status_code == 400
            assert "no PNG or JPEG" in bad.json()["error"]
            large = await client.post("/predict", content=bytes(LARGEST + 1))
            assert large.status_code == 413
            lines = (await client.get("/metrics")).text.splitlines()
            assert 'requests_total{status="200"} 20.0' in lines
            assert "errors_total 2.0" in lines
            assert any(line.startswith('request_seconds{quantile="0.99"}') for line in lines)
            assert 'aioprefetch_delivered_total{name="images"} 21.0' in lines
        (scan,) = scans(1024, 1)
        begun = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(up.port, scan, begun)) for _ in range(12)]
            await begun.wait()
            assert not all(task.done() for task in asking)
            up.process.send_signal(signal.SIGTERM)
        assert {task.result().status for task in asking} == {200}
        assert await asyncio.to_thread(up.process.wait, 10) in (0, -signal.SIGTERM)


async def right_of(client: httpx.AsyncClient, count: int) -> int:
    """How many digits it tells, of answers that are all their request's own."""
    digits = load_digits()
    images = [draw(digit) for digit in digits.images[:count]]
    answers = await asyncio.gather(*[client.post("/predict", content=image) for image in images])
    assert {answer.status_code for answer in answers} == {200}
    told = [answer.json() for answer in answers]
    assert [answer["checksum"] for answer in told] == [zlib.crc32(image) for image in images]
    return sum(answer["digit"] == digit for answer, digit in zip(told, digits.target, strict=False))


async def ask(port: int, image: bytes, begun: asyncio.Event) -> Answer:
    async with connect(port) as connection:
        answer = await connection.post("/predict", image)
        begun.set()  # by the first: by then all others have come too
        return answer


@one_loop
async def test_no_client_notices_a_worker_that_is_killed_nor_anothers_bad_image() -> None:
    with server(*COMMAND) as up:
        await ready(up.port)
        done = await damage(up, side=128, connections=8, lasts=3)
        assert done.killed == 3
        assert done.load.wrong == []
        assert done.load.statuses.keys() == {200, 400}


@one_loop
async def test_health_says_when_no_worker_comes_up_any_more() -> None:
    @asynccontextmanager
    async def broken(_: Metrics) -> AsyncIterator[Prepare]:
        async def prepare(body: bytes) -> Prepared:
            raise PoolBroken("workers do not come up")

        yield prepare

    app = create_app(broken)
    async with app.router.lifespan_context(app) as state:

        async def opened(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": state}, receive, send)

        transport = httpx.ASGITransport(opened)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/predict", content=b"")).status_code == 503
            health = await client.get("/health")
            assert (health.status_code, health.text) == (503, "workers do not come up")
