"""What of a worker's work is another where it never leaves this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._host import Host
from ._messages import Outcome, Report
from ._page import Page
from ._payload import Live, Payload
from ._program import Program
from ._report import Reporter
from ._wire import Segment
from ._worker import Worker


class Here:
    """A program that workers use as it is."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def close(self) -> None:
        """Nothing was set aside."""


class LiveOutbox:
    """Results that stay in this process."""

    empty = staticmethod(np.empty)

    def pack(self, result: Any) -> Live:
        return Live(result)

    def discard(self) -> None:
        """Nothing was set aside."""

    def trim(self) -> None:
        """Nothing is held."""


class _LiveIntake:
    @staticmethod
    def open(payload: Payload, segments: Sequence[Segment]) -> Sequence[Any]:
        values: Sequence[Any] = payload.open()
        return values


class LiveReporter(Reporter):
    """Reports outcomes as they are."""

    outbox = LiveOutbox()

    def __init__(self, worker: Worker | Host, page: Page, say: Callable[[Report], None]) -> None:
        super().__init__(worker, _LiveIntake(), page, say)

    @staticmethod
    def _pack(outcome: Outcome) -> tuple[Outcome, Sequence[Segment]]:
        return outcome, ()

    def _tell(self, report: Report, segments: Sequence[Segment]) -> None:
        self._send(report)
