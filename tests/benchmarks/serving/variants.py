"""The same server with images prepared elsewhere: ``python -m tests.benchmarks.serving.variants``.

Everything else is the example's: routes, model, Batcher, uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from examples.inference_server import (
    Metrics,
    Prepare,
    Prepared,
    Preparing,
    in_pool,
    prepare,
    serve,
    warm_up,
)


@asynccontextmanager
async def inline(_: Metrics) -> AsyncIterator[Prepare]:
    async def on_the_loop(body: bytes) -> Prepared:
        return prepare(body)

    yield on_the_loop


@asynccontextmanager
async def in_threads(_: Metrics) -> AsyncIterator[Prepare]:
    yield lambda body: asyncio.to_thread(prepare, body)


@asynccontextmanager
async def in_executor(_: Metrics, *, num_proc: int) -> AsyncIterator[Prepare]:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(num_proc, context, initializer=warm_up) as executor:
        for _each in range(num_proc):
            executor.submit(warm_up)
        loop = asyncio.get_running_loop()
        yield lambda body: loop.run_in_executor(executor, prepare, body)


# By the name that results have, with what a reader calls it.
VARIANTS: dict[str, tuple[str, Callable[[int], Preparing]]] = {
    "inline": ("inline, on the loop", lambda _: inline),
    "threads": ("asyncio.to_thread", lambda _: in_threads),
    "executor": (
        "run_in_executor(ProcessPoolExecutor)",
        lambda n: partial(in_executor, num_proc=n),
    ),
    "pool": ("aioprefetch's ProcessPool", lambda n: partial(in_pool, num_proc=n)),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=list(VARIANTS))
    parser.add_argument("--num-proc", type=int, default=2)
    args = parser.parse_args()
    _, preparing = VARIANTS[args.variant]
    serve(preparing(args.num_proc), 0)
