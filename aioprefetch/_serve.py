"""A worker process, from its first line to its last.

The executor's initializer only stores the kit, so it cannot fail. Everything else happens in
`serve`, the one call that the executor is given: its first message is Hello or Refused, and
from then on tasks come and outcomes go on the worker's private channel.

However the parent ends, the worker does: the end of the channel without a Goodbye, or the
deadman, whichever comes first.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process, reduction
from typing import Any, NamedTuple

import numpy as np
import threadpoolctl

from . import _codec
from ._arena import Space, Writer
from ._errors import TaskError
from ._exceptions import pack_error
from ._memory import Extent, open_shipment
from ._messages import (
    Do,
    Done,
    Failed,
    Goodbye,
    Hello,
    Made,
    Order,
    Outcome,
    Refused,
    Release,
    Report,
    Settle,
    Task,
    Trim,
)
from ._page import Page
from ._payload import Intake
from ._source import Facts
from ._wire import BlockingChannel, Channel, Frame, Segment
from ._worker import Program, Terms, Worker, drive

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_Packed = tuple[_codec.Packed | bytes, Sequence[Segment]]

_MOMENT = 0.0005  # seconds after which finished tasks are reported, others waiting or not
_LATE = 0.002  # the same while a task is being done

MAX_DEPTH = 4  # pools in workers of pools: a source that starts itself must not fork for ever

loading = False  # whether this process is a worker that imports what it is to run
depth = 0  # how many pools this process is inside of

_THREAD_LIMITS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


class Descriptor:
    """A descriptor that travels to the worker in the arguments of its process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd),)


def _received(handed: Any) -> Descriptor:
    return Descriptor(handed.detach())


class Share:
    """Shared memory that travels with the worker's arguments."""

    def __init__(self, space: Space) -> None:
        self._file = Descriptor(space.fd)
        self._form = space.size, space.records

    def open(self) -> Space:
        return Space(self._file.fd, *self._form)


class Post(NamedTuple):
    """Which worker this is, and how it is to work."""

    number: int
    terms: Terms
    worker_threads: int | None
    depth: int


@dataclass(frozen=True)
class Kit:
    """What a worker starts with."""

    post: Post
    channel: Descriptor  # its end
    deadman: Descriptor  # the reading end
    arena: Share  # that it writes
    items: Share  # that it is given work in
    source: Descriptor  # the shipment
    extents: Sequence[Extent]


_kit: Kit | None = None


def equip(kit: Kit) -> None:
    """The executor's initializer."""
    global _kit
    _kit = kit


def serve() -> None:
    """Be a worker until the parent says goodbye or is gone."""
    assert _kit is not None
    with socket.socket(fileno=_kit.channel.fd) as sock:
        _serve_on(sock, _kit)


def _serve_on(sock: socket.socket, kit: Kit) -> None:
    channel = BlockingChannel(sock)
    start = _Start()
    try:
        worker = start.make_worker(kit)
        start.doing = "running the function given as the source"
        facts = None if worker.is_async else drive(worker.make_source())
    except BaseException as error:
        _refuse(channel, error, start.doing)
        return
    assert start.page is not None
    assert start.intake is not None
    if worker.is_async:
        conversation = _Conversation(worker, start.intake, start.page, sock)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(conversation.hold(channel, facts))
    else:
        _converse(worker, start.intake, start.page, channel, facts)


class _Start:
    """How far a worker has come, for the error that says so."""

    doing = "setting itself up"
    page: Page | None = None
    intake: Intake | None = None

    def make_worker(self, kit: Kit) -> Worker:
        _settle_in(kit.post)
        _arm_deadman(kit.deadman.fd)
        self.doing = "loading the source and functions"
        program = _load(kit.post, open_shipment(kit.source.fd, kit.extents))
        space = kit.arena.open()
        self.page = space.page
        self.intake = _intake(program, kit.items.open())
        return _make_worker(program, kit.post, space)


def _intake(program: Program, space: Space | None) -> Intake:
    return Intake(space, keeps=program.map_fn is not None or program.collate_fn is not None)


def _make_worker(program: Program, post: Post, space: Space | None) -> Worker:
    outbox = _Outbox(space)
    if space is None:
        return Worker(program, post.terms, post.number, outbox=outbox)
    page, shut = space.page, space.page.is_shut
    return Worker(program, post.terms, post.number, outbox=outbox, page=page, closing=shut)


class _Outbox:
    """Results on their way to the parent, in this worker's memory where it has some."""

    def __init__(self, space: Space | None) -> None:
        self._writer = None if space is None else Writer(space)
        self.empty: Callable[..., Any] = np.empty
        if self._writer is not None:
            self.empty = self._writer.empty

    def pack(self, result: Any) -> _Packed:
        return _codec.encode_result(result, self._writer)

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.drop_opened()

    def trim(self) -> None:
        if self._writer is not None:
            self._writer.trim(now=True)


_OPENING = "running the source's reset_state() or worker_init_fn"


def _refuse(channel: BlockingChannel, error: BaseException, doing: str) -> None:
    with suppress(OSError):
        channel.send(_codec.message(Refused(pack_error(error), doing)))
        _await_end(channel)


def _await_end(channel: BlockingChannel) -> None:
    with suppress(EOFError, OSError):
        while not isinstance(_codec.decode(channel.receive()[:1]), Goodbye):
            pass


# Setting up


def _settle_in(post: Post) -> None:
    global depth
    depth = post.depth
    _lead_a_group()
    _reset_signals()
    _limit_threads(post.worker_threads)


def _lead_a_group() -> None:
    if hasattr(os, "setpgid"):
        with suppress(OSError):
            os.setpgid(0, 0)  # its children are killed with it, and ^C reaches the parent alone


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)  # a forked worker must not wake the parent's loop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _arm_deadman(fd: int) -> None:
    """Have this worker's group killed when the parent, the only writer, is gone."""
    set_signal = getattr(fcntl, "F_SETSIG", None)
    if set_signal is None:
        _watch_parent()
        return
    # The kernel kills, so it works while C code holds the interpreter, and for the children.
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, set_signal, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):  # it went before the deadman was armed
        os._exit(1)


def _watch_parent() -> None:
    threading.Thread(target=_outlive_no_parent, name="aioprefetch-deadman", daemon=True).start()


def _outlive_no_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _limit_threads(limit: int | None) -> None:
    if limit is None:
        return
    # The environment is for libraries to come, the call for those that are here.
    os.environ.update(dict.fromkeys(_THREAD_LIMITS, str(limit)))
    threadpoolctl.threadpool_limits(limit)
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(limit)


def _load(post: Post, segments: Sequence[Segment]) -> Program:
    global loading
    loading = True
    try:
        program: Program = _codec.decode(segments)
    finally:
        loading = False
    _codec.remember_received_classes()
    _limit_threads(post.worker_threads)  # for what the source has imported
    return program


# Conversing


class _Desk:
    """Orders in, reports out; both kinds of conversation have one.

    Finished tasks are reported together: when ``send`` is called, and before that when the
    last report is older than a moment or a result has segments of its own.

    Parameters
    ----------
    watched
        Whether another thread is to report what is finished when the next task takes long.
    """

    def __init__(
        self,
        worker: Worker,
        intake: Intake,
        page: Page | None,
        send: Callable[[Frame], None],
        *,
        watched: bool = False,
    ) -> None:
        self._worker = worker
        self._intake = intake
        self._page = page
        self._send = send
        self._done: list[Done] = []
        self._declined: list[int] = []
        self._seconds = 0.0
        self._sent = time.perf_counter()
        self._lock = threading.Lock()
        self._waiting = threading.Event() if watched else None
        if watched:
            name = "aioprefetch-report"
            threading.Thread(target=self._report_late, name=name, daemon=True).start()

    async def run(self, order: Order, segments: Sequence[Segment]) -> None:
        """Run an order, unless it has been withdrawn."""
        ticket, task, payload = order
        page = self._page
        if page is not None and (page.is_shut() or not page.claim(ticket)):
            with self._lock:
                self._declined.append(ticket)
            return
        if self._done and self._waiting is not None:  # which must not wait for this task
            self._waiting.set()
        worker, named, values = self._worker, Task(*task), self._intake.open(payload, segments)
        began = time.perf_counter()
        try:
            outcome = await worker.run(ticket, named, values)
        except asyncio.CancelledError as error:  # by the user's function: here nobody else does
            outcome = worker.failed(named, values, error)
        ended = time.perf_counter()
        self._put(ticket, outcome, ended, ended - began)

    def send(self) -> None:
        """Report what is finished."""
        with self._lock:
            if self._done or self._declined:
                self._flush(())

    def _put(self, ticket: int, outcome: Outcome, ended: float, seconds: float) -> None:
        done, segments = _packed(outcome)
        with self._lock:
            self._done.append((ticket, done))
            self._seconds += seconds
            if segments or ended - self._sent > _MOMENT:
                self._flush(segments)

    def _flush(self, segments: Sequence[Segment]) -> None:
        report = Report(self._done, self._declined, self._seconds)
        self._send([*_codec.message(report), *segments])
        self._done, self._declined, self._seconds = [], [], 0.0
        self._sent = time.perf_counter()

    def _report_late(self) -> None:
        """What is finished must not wait for a task that takes its time."""
        assert self._waiting is not None
        with suppress(OSError):  # the parent is gone, which the reader of the channel sees
            while True:
                self._waiting.wait()
                time.sleep(_LATE)
                self._waiting.clear()
                self.send()


def _packed(outcome: Outcome) -> tuple[Any, Sequence[Segment]]:
    """An outcome as it is reported, and its segments."""
    if type(outcome) is Made:
        packed, segments = outcome.payload
        if type(packed) is bytes and not outcome.skipped:
            return packed, segments
        return Made(outcome.skipped, packed), segments
    if type(outcome) is Failed:
        assert isinstance(outcome.error, TaskError)
        return outcome._replace(error=pack_error(outcome.error)), ()
    return outcome, ()


def _converse(
    worker: Worker, intake: Intake, page: Page, channel: BlockingChannel, facts: Facts | None
) -> None:
    """Orders one after another, until Goodbye; the end without one is the parent's death."""
    try:
        drive(worker.open())
    except BaseException as error:
        _refuse(channel, error, _OPENING)
        return
    channel.send(_codec.message(Hello(facts)))
    desk = _Desk(worker, intake, page, channel.send, watched=True)
    try:
        while True:
            frame = channel.receive()
            message = _codec.decode(frame[:1])
            if type(message) is Do:
                for order in message.orders:
                    drive(desk.run(order, frame[1:]))
                desk.send()
            elif type(message) is Settle:
                worker.settle(message.split, message.num_streams)
            elif type(message) is Release:
                drive(worker.release(message.run))
            elif type(message) is Trim:
                worker.trim()
            else:
                break
    except (EOFError, OSError):
        os._exit(1)
    drive(worker.close())


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop()  # the one that watches sockets, on every platform
    return uvloop.new_event_loop()


class _Conversation:
    """The same on a loop, for functions that are awaited: tasks overlap."""

    def __init__(self, worker: Worker, intake: Intake, page: Page, sock: socket.socket) -> None:
        self._worker = worker
        self._sock = sock
        self._tasks: set[asyncio.Task[None]] = set()
        self._goodbye = asyncio.Event()
        self._channel: Channel | None = None
        self._desk = _Desk(worker, intake, page, self._send)
        self._sending = False

    async def hold(self, start: BlockingChannel, facts: Facts | None) -> None:
        try:
            facts = await self._worker.make_source() or facts
            await self._worker.open()
        except BaseException as error:
            _refuse(start, error, _OPENING)
            return
        start.send(_codec.message(Hello(facts)))
        loop = asyncio.get_running_loop()
        self._channel = Channel(loop, self._sock, self._hear, lambda: os._exit(1))
        await self._goodbye.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._channel.detach()
        await self._worker.close()

    def _hear(self, frame: Frame) -> None:
        message = _codec.decode(frame[:1])
        if type(message) is Do:
            for order in message.orders:
                self._begin(self._run(order, frame[1:]))
        elif type(message) is Settle:
            self._worker.settle(message.split, message.num_streams)
        elif type(message) is Release:
            self._begin(self._worker.release(message.run))
        elif type(message) is Trim:
            self._worker.trim()
        else:
            self._goodbye.set()

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, order: Order, segments: Sequence[Segment]) -> None:
        await self._desk.run(order, segments)
        if not self._sending:  # together with what else ends in this turn of the loop
            self._sending = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._sending = False
        self._desk.send()

    def _send(self, frame: Frame) -> None:
        assert self._channel is not None
        self._channel.send(frame)


# The plain way: every message is a call of the executor's


class Copies:
    """The shipped source, where descriptors cannot be handed over: a copy for each worker."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = [bytearray(segment) for segment in segments]

    def close(self) -> None:
        self.segments.clear()


class PlainKit(NamedTuple):
    """What such a worker starts with."""

    post: Post
    source: Copies


class _Plain:
    """Such a worker, between one call and the next."""

    def __init__(self, kit: PlainKit) -> None:
        self.kit = kit
        self.runner: asyncio.Runner | None = None
        self.intake: Intake | None = None
        self.worker: Worker | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self.worker is not None and self.worker.is_async and self.runner is None:
            self.runner = asyncio.Runner(loop_factory=_new_loop)
        return drive(work) if self.runner is None else self.runner.run(work)

    def open(self) -> Frame:
        doing = "setting itself up"
        try:
            _settle_in(self.kit.post)
            _watch_parent()
            doing = "loading the source and functions"
            program = _load(self.kit.post, self.kit.source.segments)
            self.intake = _intake(program, None)
            self.worker = _make_worker(program, self.kit.post, None)
            doing = _OPENING
            facts = self.run(self.worker.make_source())
            self.run(self.worker.open())
        except BaseException as error:
            return _codec.message(Refused(pack_error(error), doing))
        return _codec.message(Hello(facts))

    def run_orders(self, orders: Sequence[Order], segments: Sequence[Segment]) -> Frame:
        assert self.worker is not None
        assert self.intake is not None
        sent: list[Frame] = []
        desk = _Desk(self.worker, self.intake, None, sent.append)
        (order,) = orders  # so that there is one answer
        self.run(desk.run(order, segments))
        desk.send()
        (reply,) = sent
        return [bytearray(segment) for segment in reply]

    def answer(self, frame: Frame) -> Frame | None:
        assert self.worker is not None
        message = _codec.decode(frame[:1])
        if type(message) is Do:
            return self.run_orders(message.orders, frame[1:])
        if type(message) is Goodbye:
            self.run(self.worker.close())
            return None
        if type(message) is Settle:
            self.worker.settle(message.split, message.num_streams)
        elif type(message) is Release:
            self.run(self.worker.release(message.run))
        return []


_plain: _Plain | None = None


def equip_plainly(kit: PlainKit) -> None:
    """The executor's initializer."""
    global _plain
    _plain = _Plain(kit)


def open_plainly() -> Frame:
    """The first call: Hello or Refused."""
    assert _plain is not None
    return _plain.open()


def answer_plainly(frame: Frame) -> Frame | None:
    """One message; gives what there is to say to it, and None once it was Goodbye."""
    assert _plain is not None
    return _plain.answer(frame)
