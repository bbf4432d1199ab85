"""Serve a model: images are decoded in worker processes, and the model is asked for many at once.

    python examples/inference_server.py --port 8000
    curl --data-binary @digit.png http://127.0.0.1:8000/predict
    curl http://127.0.0.1:8000/health
    curl http://127.0.0.1:8000/metrics

The event loop only waits: decoding is done in a pool of processes, the model runs on a thread of
the Batcher. A worker that dies costs no request: what it had in hand runs again in another.
"""

from __future__ import annotations

import argparse
import io
import socket
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
from PIL import Image

if __name__ != "__mp_main__":  # workers run this file too, and start sooner without these
    import uvicorn
    from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from threadpoolctl import threadpool_limits

    from aioprefetch import Batcher, PoolBroken, ProcessPool, TaskTimeout, WorkerDied
    from aioprefetch.prometheus import PrefetchCollector

LARGEST = 16 << 20  # bytes of an image
PATIENCE = 10.0  # seconds that one image may take a worker
SIDE = 224  # pixels of the model's images
PATCHES = 8  # that the model divides each side into


# In the workers


class Prepared(NamedTuple):
    """What the model needs of an image, and the checksum of the bytes that it was made of."""

    pixels: np.ndarray
    checksum: int


class BadImage(Exception):
    """The bytes are no image that can be read."""


def prepare(body: bytes) -> Prepared:
    """Decode an image and give it the size and the scale of the model's."""
    try:
        with Image.open(io.BytesIO(body), formats=["PNG", "JPEG"]) as image:
            sized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow raises many kinds, for bytes that anybody may send
        raise BadImage(f"no PNG or JPEG that can be read: {error}") from None
    pixels = np.multiply(np.asarray(sized), 1 / 255, dtype=np.float32)
    return Prepared(pixels, zlib.crc32(body))


def draw(digit: np.ndarray, side: int = 64) -> bytes:
    """A PNG of an image of the digits dataset (8 by 8 values from 0 to 16)."""
    image = Image.fromarray((digit * 255 / 16).astype(np.uint8))
    file = io.BytesIO()
    image.resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def warm_up(_: int = 0) -> None:
    """Have a worker import what it needs before the first request comes."""
    prepare(draw(np.zeros((8, 8))))


# In the server's process


class Model:
    """Tells digits: means of patches, and a regression on scikit-learn's digits.

    It is trained when it is made, in less than a second.
    """

    def __init__(self) -> None:
        threadpool_limits(1)  # the workers have the other cores
        digits = load_digits()
        self._classifier = LogisticRegression(max_iter=200).fit(digits.data / 16, digits.target)
        width = SIDE // PATCHES
        means = np.repeat(np.eye(PATCHES, dtype=np.float32), width, axis=0) / width
        self._across = np.repeat(means, 3, axis=0) / 3  # of pixels and of their three colours
        self._down = means.T.copy()

    def __call__(self, images: list[np.ndarray]) -> list[int]:
        patches = [self._down @ (image.reshape(SIDE, -1) @ self._across) for image in images]
        return self._classifier.predict(np.reshape(patches, (len(images), -1))).tolist()


class Metrics:
    """How requests went, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("requests", "Images answered.", ["status"], registry=self.registry)
        self._errors = Counter("errors", "Images refused.", registry=self.registry)
        self._seconds: deque[float] = deque(maxlen=2000)
        gauge = Gauge("request_seconds", "Of late.", ["quantile"], registry=self.registry)
        for quantile in (0.5, 0.99):
            gauge.labels(str(quantile)).set_function(partial(self._quantile, quantile))

    def count(self, status: int, seconds: float) -> None:
        self._requests.labels(str(status)).inc()
        if status >= 400:
            self._errors.inc()
        self._seconds.append(seconds)

    def _quantile(self, quantile: float) -> float:
        return float(np.quantile(self._seconds, quantile)) if self._seconds else 0.0


Prepare = Callable[[bytes], Awaitable[Prepared]]
Preparing = Callable[[Metrics], AbstractAsyncContextManager[Prepare]]


@asynccontextmanager
async def in_pool(metrics: Metrics, *, num_proc: int) -> AsyncIterator[Prepare]:
    """Prepare images in worker processes."""
    async with ProcessPool(num_proc, worker_init_fn=warm_up) as pool:
        metrics.registry.register(PrefetchCollector({"images": pool}))
        yield lambda body: pool.run(prepare, body, timeout=PATIENCE)


class Service:
    """Answers requests."""

    def __init__(
        self, prepare: Prepare, batcher: Batcher[np.ndarray, int], metrics: Metrics
    ) -> None:
        self._prepare = prepare
        self._batcher = batcher
        self._metrics = metrics
        self._broken = ""

    def health(self) -> Response:
        return PlainTextResponse(self._broken or "ok", 503 if self._broken else 200)

    async def predict(self, request: Request) -> Response:
        began, status = time.perf_counter(), 500
        try:
            response = await self._answer(request)
            status = response.status_code
            return response
        finally:
            self._metrics.count(status, time.perf_counter() - began)

    async def _answer(self, request: Request) -> Response:
        try:
            body = await read(request)
        except ClientDisconnect:
            return refusal(400, "the client has gone")  # to nobody
        if body is None:
            return refusal(413, f"more than {LARGEST} bytes")
        try:
            pixels, checksum = await self._prepare(body)
        except BadImage as error:
            return refusal(400, str(error))
        except (
            PoolBroken
        ) as error:  # no worker comes up any more: whoever watches /health sees to it
            self._broken = str(error)
            return refusal(503, self._broken)
        except (WorkerDied, TaskTimeout) as error:  # whoever sends it again, it will not help
            return refusal(422, str(error))
        return JSONResponse({"digit": await self._batcher(pixels), "checksum": checksum})

    def metrics(self) -> Response:
        return PlainTextResponse(generate_latest(self._metrics.registry))


async def read(request: Request) -> bytes | None:
    """The body of a request, unless it is too large."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > LARGEST:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def refusal(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status)


async def predict(request: Request) -> Response:
    return await request.state.service.predict(request)


async def health(request: Request) -> Response:
    return request.state.service.health()


async def metrics(request: Request) -> Response:
    return request.state.service.metrics()


def create_app(preparing: Preparing) -> Starlette:
    """The server; ``preparing`` is how images are prepared while it is up."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Service]]:
        metrics = Metrics()
        async with (
            preparing(metrics) as prepare,
            Batcher(Model(), batch_size=32, batch_timeout=0.002) as batcher,
        ):
            yield {"service": Service(prepare, batcher, metrics)}

    return Starlette(
        routes=[
            Route("/predict", predict, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
    )


def serve(preparing: Preparing, port: int) -> None:
    """Serve until SIGTERM or SIGINT, and then until all requests in flight are answered."""
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    config = uvicorn.Config(create_app(preparing), loop="uvloop", log_level="warning")
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    args = parser.parse_args()
    serve(partial(in_pool, num_proc=args.num_proc), args.port)
