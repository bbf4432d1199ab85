"""A client that costs less than what it measures: connections kept open, requests made before.

Each request differs from every other by a number behind the image's end, which decoders do not
read and the checksum does. So an answer can be told from those of all other requests.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

HEALTH_EVERY = 0.01  # seconds between two questions for /health


class Body(NamedTuple):
    data: bytes
    checksum: int
    status: int  # that its answer should have


class Answer(NamedTuple):
    status: int
    body: bytes


def scans(side: int, count: int = 32) -> list[bytes]:
    """Digits as a scanner gives them: PNGs of ``side`` by ``side`` grey pixels, with noise."""
    rng = np.random.default_rng(0)
    return [_scan(digit, side, rng) for digit in load_digits().images[:count]]


def _scan(digit: np.ndarray, side: int, rng: np.random.Generator) -> bytes:
    image = Image.fromarray((digit * 15).astype(np.uint8))
    pixels = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
    noisy = np.minimum(pixels, 240) + rng.integers(0, 12, pixels.shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "PNG")
    return file.getvalue()


def bodies(images: Sequence[bytes], poison_every: int = 0) -> Iterator[Body]:
    """Requests without end, no two alike; one in so many is no image."""
    sums = [zlib.crc32(image) for image in images]
    for number in itertools.count():
        if poison_every and number % poison_every == poison_every - 1:
            yield Body(b"no image" + number.to_bytes(8, "big"), 0, 400)
            continue
        own = number.to_bytes(8, "big")
        which = number % len(images)
        yield Body(images[which] + own, zlib.crc32(own, sums[which]), 200)


class Connection:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def get(self, path: str) -> Answer:
        return await self._ask(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())

    async def post(self, path: str, data: bytes) -> Answer:
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(data)}\r\n\r\n"
        return await self._ask(head.encode() + data)

    async def _ask(self, request: bytes) -> Answer:
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return Answer(int(head[9:12]), await self._reader.readexactly(int(length)))


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


@dataclass
class Load:
    """What became of the requests of one load."""

    seconds: list[float] = field(default_factory=list)  # of each /predict
    health: list[float] = field(default_factory=list)  # of each /health
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # answers that are not their request's
    lasted: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.seconds) / self.lasted

    def summary(self) -> dict[str, float]:
        return {
            "requests_a_second": self.rate,
            "p50_ms": _quantile(self.seconds, 0.5),
            "p99_ms": _quantile(self.seconds, 0.99),
            "health_p99_ms": _quantile(self.health, 0.99),
        }


def _quantile(seconds: list[float], quantile: float) -> float:
    return 1000 * float(np.quantile(seconds, quantile))


async def ready(port: int) -> None:
    """Wait for a server to answer; it accepts connections while it starts."""
    async with connect(port) as connection:
        assert (await connection.get("/health")).status == 200


async def load(
    port: int,
    requests: Iterator[Body],
    connections: int,
    lasts: float,
    rate: float | None = None,
) -> Load:
    """Ask on so many connections, each again as soon as it is answered; or by the clock.

    With ``rate`` so many requests a second are due, and the time of each counts from then.
    """
    made = Load()
    began = time.perf_counter()
    until = began + lasts
    every = connections / rate if rate else 0.0  # seconds, on one connection
    async with asyncio.TaskGroup() as group:
        for number in range(connections):
            first = began + every * number / connections
            group.create_task(_predict(port, requests, made, Clock(first, every, until)))
        group.create_task(_health(port, made, until))
    made.lasted = time.perf_counter() - began
    return made


class Clock(NamedTuple):
    """When one connection asks."""

    first: float
    every: float
    until: float

    async def beats(self) -> AsyncIterator[float]:
        """The times at which a request is due, when it is; at once where none is set."""
        due = self.first
        while (now := time.perf_counter()) < self.until and due < self.until:
            if self.every and due > now:
                await asyncio.sleep(due - now)
            yield due if self.every else now
            due += self.every


async def _predict(port: int, requests: Iterator[Body], made: Load, clock: Clock) -> None:
    async with connect(port) as connection:
        async for due in clock.beats():
            request = next(requests)
            answer = await connection.post("/predict", request.data)
            made.seconds.append(time.perf_counter() - due)
            made.statuses[answer.status] += 1
            if not _is_its_own(request, answer):
                made.wrong.append(f"{answer.status} {answer.body!r}")


def _is_its_own(request: Body, answer: Answer) -> bool:
    if answer.status != request.status:
        return False
    return answer.status != 200 or json.loads(answer.body)["checksum"] == request.checksum


async def _health(port: int, made: Load, until: float) -> None:
    async with connect(port) as connection:
        while (began := time.perf_counter()) < until:
            await connection.get("/health")
            made.health.append(time.perf_counter() - began)
            await asyncio.sleep(HEALTH_EVERY)
