"""A worker whose every message is a call of its executor's: slower, and needs no descriptors."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from . import _plain, _serve
from ._payload import Store
from ._process_lane import ProcessLane
from ._wire import Frame, Segment


class SubmitLane(ProcessLane):
    """The same where a loop cannot watch descriptors: every message is a call. Slower."""

    largest_chunk = 1  # so that a death can be laid to the first task that is not answered

    def _launch(self, post: _serve.Post, shipment: _plain.Copies, store: Store | None) -> None:
        kit = _plain.PlainKit(post, shipment.segments)
        self._process.start(_plain.equip, kit, _plain.open_up)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        super().attach(loop)
        self._process.first.add_done_callback(self._answered)

    def _send(self, frame: list[Segment]) -> None:
        if not self.dead:
            with suppress(RuntimeError):  # broken or shut down: its death is told
                portable = [bytearray(segment) for segment in frame]
                call = self._process.submit(_plain.answer, portable)
                call.add_done_callback(self._answered)

    def _answered(self, call: Future[Any]) -> None:
        if call.cancelled() or call.exception() is not None:  # the process broke down
            return
        answer = call.result()
        if answer is None:
            self._keeper.post(self._process.release)
        else:
            for frame in answer:
                self._call_on_loop(self._hear_alive, frame)

    def _hear_alive(self, frame: Frame) -> None:
        if not self.dead:
            self._hear(frame)
