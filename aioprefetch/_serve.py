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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process, reduction
from typing import Any, NamedTuple

import numpy as np
import threadpoolctl

from . import _codec
from ._arena import Space, Writer
from ._conversation import Conversation
from ._exceptions import pack_error
from ._host import Host
from ._logs import Forwarder
from ._memory import Extent, open_shipment, open_shipped
from ._messages import (
    Do,
    Goodbye,
    Hello,
    Join,
    Joined,
    Logged,
    Refused,
    Release,
    Settle,
    Trim,
)
from ._page import Page
from ._payload import Intake
from ._program import Program, Terms, drive
from ._report import Reporter
from ._source import Facts
from ._stack import write_stacks_into
from ._wire import BlockingChannel, Channel, Frame, Segment
from ._worker import Worker

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_Packed = tuple[_codec.Packed | bytes, Sequence[Segment]]

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
    incarnation: int  # workers of this number before
    terms: Terms
    worker_threads: int | None
    shared: bool  # whether tenants may join
    depth: int
    oom_score_adj: int | None
    log_level: int = 0  # from which on records are wanted, where they can be sent


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
    logs = Forwarder(kit.post.number, partial(_tell, channel))
    logs.install(kit.post.log_level)
    start = _Start()
    try:
        worker = start.make(kit)
        start.doing = "running the function given as the source"
        facts = None if worker.is_async else drive(worker.make_source())
    except BaseException as error:
        _refuse(channel, error, start.doing)
        return
    assert start.page is not None
    assert start.intake is not None
    if worker.is_async:
        on_loop = _OnLoop(worker, start.intake, start.page, sock, kit.post, logs)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(on_loop.hold(channel, facts))
    else:
        _converse(worker, start.intake, start.page, channel, facts)
    logs.drain()


def _tell(channel: BlockingChannel, logged: Logged) -> None:
    channel.send(_codec.message(logged))


class _Start:
    """How far a worker has come, for the error that says so."""

    doing = "setting itself up"
    page: Page | None = None
    intake: Intake | None = None

    def make(self, kit: Kit) -> Worker | Host:
        settle_in(kit.post)
        _arm_deadman(kit.deadman.fd)
        space = kit.arena.open()
        self.page = space.page
        write_stacks_into(space)
        self.doing = "loading the source and functions"
        program = load(kit.post, open_shipment(kit.source.fd, kit.extents))
        self.intake = intake_of(program, kit.items.open())
        return make_worker(program, kit.post, space)


def intake_of(program: Program, space: Space | None) -> Intake:
    return Intake(space, keeps=program.map_fn is not None or program.collate_fn is not None)


def make_worker(program: Program, post: Post, space: Space | None) -> Worker | Host:
    outbox = _Outbox(space)
    page = None if space is None else space.page

    def make(program: Program, terms: Terms, state: Any = None) -> Worker:
        return Worker(
            program,
            terms,
            post.number,
            outbox=outbox,
            page=page,
            closing=_never if page is None else page.is_shut,
            incarnation=post.incarnation,
            state=state,
        )

    own = make(program, post.terms)
    return Host(own, post.terms, make) if post.shared else own


def _never() -> bool:
    return False


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


OPENING = "running the source's reset_state() or worker_init_fn"


def _refuse(channel: BlockingChannel, error: BaseException, doing: str) -> None:
    with suppress(OSError):
        channel.send(_codec.message(Refused(pack_error(error), doing)))
        _await_end(channel)


def _await_end(channel: BlockingChannel) -> None:
    with suppress(EOFError, OSError):
        while not isinstance(_codec.decode(channel.receive()[:1]), Goodbye):
            pass


# Setting up


def settle_in(post: Post) -> None:
    global depth
    depth = post.depth
    _lead_a_group()
    _reset_signals()
    _offer_to_the_oom_killer(post.oom_score_adj)
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
        watch_parent()
        return
    # The kernel kills, so it works while C code holds the interpreter, and for the children.
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, set_signal, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):  # it went before the deadman was armed
        os._exit(1)


def watch_parent() -> None:
    threading.Thread(target=_outlive_no_parent, name="aioprefetch-deadman", daemon=True).start()


def _outlive_no_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _offer_to_the_oom_killer(score: int | None) -> None:
    """Have the kernel prefer workers to the parent when memory runs out."""
    if score is not None:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(score))


def _limit_threads(limit: int | None) -> None:
    if limit is None:
        return
    # The environment is for libraries to come, the call for those that are here.
    os.environ.update(dict.fromkeys(_THREAD_LIMITS, str(limit)))
    threadpoolctl.threadpool_limits(limit)
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(limit)


def load(post: Post, segments: Sequence[Segment]) -> Program:
    global loading
    loading = True
    try:
        program: Program = _codec.decode(segments)
    finally:
        loading = False
    _codec.remember_received_classes()
    _limit_threads(post.worker_threads)  # for what the source has imported
    return program


def load_tenant(post: Post, join: Join, segments: Sequence[Segment]) -> Program:
    return load(post, segments if join.shipped is None else open_shipped(join.shipped))


# Conversing


def _converse(
    worker: Worker | Host, intake: Intake, page: Page, channel: BlockingChannel, facts: Facts | None
) -> None:
    """Orders one after another, until Goodbye; the end without one is the parent's death."""
    try:
        drive(worker.open())
    except BaseException as error:
        _refuse(channel, error, OPENING)
        return
    channel.send(_codec.message(Hello(facts)))
    reporter = Reporter(worker, intake, page, channel.send, watched=True)
    try:
        while True:
            frame = channel.receive()
            message = _codec.decode(frame[:1])
            if type(message) is Do:
                for order in message.orders:
                    drive(reporter.run(order, frame[1:]))
                reporter.send()
            elif type(message) is Settle:
                worker.settle(*message)
            elif type(message) is Release:
                drive(worker.release(message.run))
            elif type(message) is Trim:
                worker.trim()
            else:
                break
    except (EOFError, OSError):
        os._exit(1)
    drive(worker.close())


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop()  # the one that watches sockets, on every platform
    return uvloop.new_event_loop()


class _OnLoop:
    """The same on a loop, for functions that are awaited, and for tenants that come."""

    def __init__(
        self,
        worker: Worker | Host,
        intake: Intake,
        page: Page,
        sock: socket.socket,
        post: Post,
        logs: Forwarder,
    ) -> None:
        self._worker = worker
        self._logs = logs
        self._sock = sock
        self._channel: Channel | None = None
        reporter = Reporter(worker, intake, page, self._send)
        load = partial(load_tenant, post)
        self._conversation = Conversation(worker, reporter, load, self._say)

    async def hold(self, start: BlockingChannel, facts: Facts | None) -> None:
        try:
            facts = await self._worker.make_source() or facts
            await self._worker.open()
        except BaseException as error:
            _refuse(start, error, OPENING)
            return
        start.send(_codec.message(Hello(facts)))
        loop = asyncio.get_running_loop()
        self._logs.send_by(lambda logged: loop.call_soon_threadsafe(self._tell, logged))
        self._channel = Channel(loop, self._sock, self._hear, lambda: os._exit(1))
        await self._conversation.end()
        self._logs.drain()
        await asyncio.sleep(0)  # in which the last of them are sent
        self._channel.detach()
        if self._channel.sent:
            self._sock.setblocking(True)
            self._logs.send_by(partial(_tell, start))
        await self._worker.close()

    def _tell(self, logged: Logged) -> None:
        self._send(_codec.message(logged))

    def _hear(self, frame: Frame) -> None:
        self._conversation.hear(_codec.decode(frame[:1]), frame[1:])

    def _say(self, message: Joined | Refused) -> None:
        self._send(_codec.message(message))

    def _send(self, frame: Frame) -> None:
        assert self._channel is not None
        self._channel.send(frame)
