"""Runs a contender's stream into a meter, on an event loop where it is asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from .contenders import Contender, Job, Stream

Sink = Callable[[Any], bool]  # true when enough has been seen


def consume(contender: Contender, job: Job, sink: Sink) -> None:
    """Plain `for` or `async for`, as the contender has it."""
    opened = contender.open(job)
    if isinstance(opened, AbstractAsyncContextManager):
        run(contender, _consume(opened, sink))
        return
    with opened as stream:
        for item in stream:
            if sink(item):
                break


async def consume_on_loop(opened: Stream, sink: Sink) -> None:
    """Always on the loop: what is not asynchronous is asked in a thread for each item."""
    if isinstance(opened, AbstractAsyncContextManager):
        await _consume(opened, sink)
        return
    with opened as stream:
        iterator = await asyncio.to_thread(iter, stream)
        while not sink(await asyncio.to_thread(next, iterator)):
            pass


async def _consume(opened: AbstractAsyncContextManager[Any], sink: Sink) -> None:
    async with opened as stream:
        async for item in stream:
            if sink(item):
                break


def run(contender: Contender, work: Any) -> Any:
    """`asyncio.run`, on uvloop where the contender says so."""
    factory = None
    if contender.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
