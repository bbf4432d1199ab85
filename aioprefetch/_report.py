"""Orders in, reports out: what a worker does with its messages, whichever way they come."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from . import _codec
from ._errors import TaskError
from ._exceptions import pack_error
from ._host import Host
from ._messages import Done, Failed, Made, Order, Outcome, Report, Task, tenant_of
from ._page import Page
from ._wire import Segment
from ._worker import Worker

_MOMENT = 0.0005  # seconds after which finished tasks are reported, others waiting or not
_LATE = 0.002  # the same while a task is being done


class Opens(Protocol):
    """What turns a payload into the keys or items that it holds."""

    def open(self, sent: Any, segments: Sequence[Segment]) -> Sequence[Any]:
        """Keys or items as they have come."""


class Reporter:
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
        worker: Worker | Host,
        intake: Opens,
        page: Page | None,
        send: Callable[[Any], None],
        *,
        watched: bool = False,
    ) -> None:
        self._worker = worker
        self._intake = intake
        self._page = page
        self._send = send
        self._pid = os.getpid()
        self._done: list[Done] = []
        self._declined: list[int] = []
        self._seconds = 0.0
        self._tenant = 0
        self._sent = time.perf_counter()
        self._lock = threading.Lock()
        self._waiting = threading.Event() if watched else None
        if watched:
            name = "aioprefetch-report"
            threading.Thread(target=self._report_late, name=name, daemon=True).start()

    async def run(self, order: Order, segments: Sequence[Segment]) -> None:
        """Run an order, unless it has been withdrawn."""
        ticket, task, payload, *again = order
        page = self._page
        if page is not None and (page.is_shut() or not page.claim(ticket)):
            with self._lock:
                self._declined.append(ticket)
            return
        if self._done and self._waiting is not None and not self._waiting.is_set():
            self._waiting.set()  # what is done must not wait for this task
        worker, named, values = self._worker, Task(*task), self._intake.open(payload, segments)
        began = time.perf_counter()
        try:
            outcome = await worker.run(ticket, named, values, *again)
        except asyncio.CancelledError as error:  # by the user's function: here nobody else does
            outcome = worker.failed(named, values, error)
        if os.getpid() != self._pid:  # a child that the user's function forked, and let return
            os._exit(0)
        ended = time.perf_counter()
        self._put(ticket, tenant_of(named.run), outcome, ended, ended - began)

    def send(self) -> None:
        """Report what is finished."""
        with self._lock:
            if self._done or self._declined:
                self._flush(())

    def _put(
        self, ticket: int, tenant: int, outcome: Outcome, ended: float, seconds: float
    ) -> None:
        done, segments = self._pack(outcome)
        with self._lock:
            if tenant != self._tenant:  # a report says what one tenant's tasks took
                if self._done:
                    self._flush(())
                self._tenant = tenant
            self._done.append((ticket, done))
            self._seconds += seconds
            if segments or ended - self._sent > _MOMENT:
                self._flush(segments)

    def _flush(self, segments: Sequence[Segment]) -> None:
        spans = self._worker.take_spans(self._tenant) if self._done else None
        report = Report(self._done, self._declined, self._seconds, spans)
        self._tell(report, segments)
        self._done, self._declined, self._seconds = [], [], 0.0
        self._sent = time.perf_counter()

    @staticmethod
    def _pack(outcome: Outcome) -> tuple[Any, Sequence[Segment]]:
        """An outcome as it is reported, and its segments."""
        if type(outcome) is Made:
            packed, segments = outcome.payload
            if type(packed) is bytes and not outcome.skipped and outcome.progress is None:
                return packed, segments
            return outcome._replace(payload=packed), segments
        if type(outcome) is Failed:
            assert isinstance(outcome.error, TaskError)
            return outcome._replace(error=pack_error(outcome.error)), ()
        return outcome, ()

    def _tell(self, report: Report, segments: Sequence[Segment]) -> None:
        self._send([*_codec.message(report), *segments])

    def _report_late(self) -> None:
        """What is finished must not wait for a task that takes its time."""
        assert self._waiting is not None
        with suppress(OSError):  # the parent is gone, which the reader of the channel sees
            while True:
                self._waiting.wait()
                time.sleep(_LATE)
                self._waiting.clear()
                self.send()
