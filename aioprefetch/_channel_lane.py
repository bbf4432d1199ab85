"""A worker with a private channel, a deadman, and memory that both sides see."""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from concurrent.futures import Future
from contextlib import suppress

from . import _serve
from ._arena import Reader, Space
from ._memory import Shipment, close_quietly
from ._messages import Order
from ._page import CLAIMS, InHand
from ._payload import Store
from ._process_lane import ProcessLane
from ._stack import ask_for_stacks, read_stacks
from ._wire import Channel, Segment

_RECORDS = 4  # of what is in hand, for each item that may be: batches are made beside them


class ChannelLane(ProcessLane):
    """A worker with a private channel, a deadman and a page that says what it has in hand."""

    _ends: _ParentEnds | None = None
    _space: Space | None = None
    knows_hand = True
    _begun = b""  # what was claimed when it died
    _channel: Channel | None = None
    _serve_over = False

    def _launch(self, post: _serve.Post, shipment: Shipment, store: Store | None) -> None:
        assert store is not None
        ends = self._ends = _ParentEnds()
        space = self._space = Space.create(_RECORDS * post.terms.concurrency)
        kit = _serve.Kit(
            post,
            channel=_serve.Descriptor(ends.theirs.fileno()),
            deadman=_serve.Descriptor(ends.deadman_theirs),
            arena=_serve.Share(space),
            items=_serve.Share(store.space),
            source=_serve.Descriptor(shipment.fd),
            extents=shipment.extents,
        )
        self._process.start(_serve.equip, kit, _serve.serve)
        ends.close_theirs()
        space.close_fd()
        self.reader = Reader(space)

    def _close(self) -> None:
        if self._ends is not None:
            self._ends.close_theirs()
            self._ends.close_deadman()
        if self._space is not None:
            self.hand = self._space.page.read()
            self.stacks = read_stacks(self._space)
            self._begun = self._space.page.begun()
            self._space.close_fd()
            if self.reader is not None:
                self.reader.abandon()
            self._space = self.reader = None

    def close_watched(self) -> None:
        super().close_watched()
        if self._ends is not None:
            with suppress(OSError):
                self._ends.sock.close()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._ends is not None
        self._channel = Channel(loop, self._ends.sock, self._hear, self._ended)
        super().attach(loop)
        self._process.first.add_done_callback(self._served)

    def _send(self, frame: list[Segment]) -> None:
        if self._channel is not None and not self.dead:
            self._channel.send(frame)

    def say_goodbye(self) -> None:
        if self._space is not None:
            self._space.page.shut()
        super().say_goodbye()

    def offer(self, orders: list[Order]) -> None:
        if self._space is None:  # buried
            return
        for ticket, *_ in orders:
            self._space.page.offer(ticket)

    def withdraw(self, ticket: int) -> bool:
        return self._space is not None and self._space.page.withdraw(ticket)

    def begun(self, ticket: int) -> bool:
        return bool(self._begun[ticket % CLAIMS])

    def in_hand(self) -> list[InHand]:
        return [] if self._space is None else self._space.page.read()

    def listen(self) -> None:
        if self._channel is not None and not self.dead:
            self._channel.drain()

    def end_hung(self) -> None:
        if self._space is not None and self._process.pidfd is not None and not self.is_stopped():
            ask_for_stacks(self._space, self._process.pidfd.send_signal)
        self.kill()

    def _served(self, _: Future[None]) -> None:
        self._serve_over = True
        self._call_on_loop(self._ended)

    def _ended(self) -> None:
        """`serve` or the channel ended: a worker that was told to end will, any other must."""
        if self.dead or self.buried:
            return
        if not self._ending:
            self.kill()
        elif self._serve_over:
            self._keeper.post(self._process.release)

    def _detach(self) -> None:
        if self._channel is not None:
            self._channel.drain()
            self._channel.detach()
        super()._detach()

    def hang_up(self) -> None:
        super().hang_up()
        if self._ends is not None:
            with suppress(OSError):
                self._ends.sock.shutdown(socket.SHUT_RDWR)


class _Socket(socket.socket):
    """A socket that an event loop may still watch when both are dropped: closed without a word."""

    def __del__(self) -> None:
        self.close()


_parent_ends: weakref.WeakSet[_ParentEnds] = weakref.WeakSet()


class _ParentEnds:
    """The parent's side of a lane; a forked child must not hold it."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.sock = _Socket(fileno=ours.detach())
        self.deadman, self.deadman_theirs = os.pipe()
        _parent_ends.add(self)

    def close_theirs(self) -> None:
        with suppress(OSError):
            self.theirs.close()
        fd, self.deadman_theirs = self.deadman_theirs, -1
        close_quietly(fd)

    def close_deadman(self) -> None:
        fd, self.deadman = self.deadman, -1
        close_quietly(fd)


def _leave_to_parent() -> None:
    # Closed, never shut down: a shutdown would reach the worker of the parent.
    for ends in list(_parent_ends):
        ends.sock.close()
        ends.close_deadman()
    _parent_ends.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
