"""A worker where a loop cannot watch descriptors: every message is a call of the executor's.

No channel, no memory of its own, and the source is copied to each; for the rest the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import _codec
from ._exceptions import pack_error
from ._host import Host
from ._messages import Do, Goodbye, Hello, Join, Joined, Leave, Order, Refused, Release, Settle
from ._payload import Intake
from ._program import Program, drive
from ._report import Reporter
from ._serve import (
    OPENING,
    Post,
    intake_of,
    load,
    load_tenant,
    make_worker,
    new_loop,
    settle_in,
    watch_parent,
)
from ._wire import Frame, Segment
from ._worker import Worker


class Copies:
    """The shipped source, where descriptors cannot be handed over: a copy for each worker."""

    shipped = None  # nowhere: the segments travel

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = [bytearray(segment) for segment in segments]

    def close(self) -> None:
        self.segments.clear()


class PlainKit(NamedTuple):
    """What such a worker starts with."""

    post: Post
    source: Sequence[Segment]  # the shipment


class PlainWorker:
    """Such a worker, between one call and the next.

    Parameters
    ----------
    owns_process
        Whether the process is this worker's, to be set up as it likes.
    """

    def __init__(self, kit: PlainKit, *, owns_process: bool) -> None:
        self.kit = kit
        self._owns_process = owns_process
        self.runner: asyncio.Runner | None = None
        self.intake: Intake | None = None
        self.worker: Worker | Host | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self.worker is not None and self.worker.is_async and self.runner is None:
            self.runner = asyncio.Runner(loop_factory=new_loop)
        return drive(work) if self.runner is None else self.runner.run(work)

    def open(self) -> Frame:
        doing = "setting itself up"
        try:
            if self._owns_process:
                settle_in(self.kit.post)
                watch_parent()
            doing = "loading the source and functions"
            program = load(self.kit.post, self.kit.source)
            self.intake = intake_of(program, None)
            self.worker = make_worker(program, self.kit.post, None)
            doing = OPENING
            facts = self.run(self.worker.make_source())
            self.run(self.worker.open())
        except BaseException as error:
            return _codec.message(Refused(pack_error(error), doing))
        return _codec.message(Hello(facts))

    def run_orders(self, orders: Sequence[Order], segments: Sequence[Segment]) -> list[Frame]:
        assert self.worker is not None
        assert self.intake is not None
        sent: list[Frame] = []
        reporter = Reporter(self.worker, self.intake, None, sent.append)
        if self.runner is None:
            for order in orders:
                drive(reporter.run(order, segments))
        else:
            self.runner.run(_all([reporter.run(order, segments) for order in orders]))
        reporter.send()
        return [[bytearray(segment) for segment in frame] for frame in sent]

    async def _admit(self, join: Join, load: Callable[[], Program]) -> Joined | Refused:
        assert isinstance(self.worker, Host)
        return await self.worker.admit(join, load)

    def answer(self, frame: Frame) -> list[Frame] | None:
        """One message; gives what there is to say to it, and None once it was Goodbye."""
        assert self.worker is not None
        message = _codec.decode(frame[:1])
        if type(message) is Do:
            return self.run_orders(message.orders, frame[1:])
        if type(message) is Goodbye:
            self.run(self.worker.close())
            if self.runner is not None:
                self.runner.close()
            return None
        if type(message) is Join:
            assert isinstance(self.worker, Host)
            load = partial(load_tenant, self.kit.post, message, frame[1:])
            return [_codec.message(self.run(self._admit(message, load)))]
        if type(message) is Settle:
            self.worker.settle(*message)
        elif type(message) is Leave:
            assert isinstance(self.worker, Host)
            self.run(self.worker.leave(message.tenant))
        elif type(message) is Release:
            self.run(self.worker.release(message.run))
        return []


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*work)


_plain: PlainWorker | None = None


def equip(kit: PlainKit) -> None:
    """The executor's initializer."""
    global _plain
    _plain = PlainWorker(kit, owns_process=True)


def open_up() -> list[Frame]:
    """The first call: Hello or Refused."""
    assert _plain is not None
    return [_plain.open()]


def answer(frame: Frame) -> list[Frame] | None:
    """One message, and what there is to say to it."""
    assert _plain is not None
    return _plain.answer(frame)
