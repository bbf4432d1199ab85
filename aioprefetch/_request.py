"""The future of one task, and how far the stream that it is read from is known to have come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ._errors import TaskError, shorten
from ._messages import NO_STREAM, Outcome, Progress
from ._plan import Planned

if TYPE_CHECKING:
    from ._line import Line


class Request:
    """The future of one task: made by the window, settled once by the pool."""

    __slots__ = (
        "_settled",
        "alone",
        "cancelled",
        "charges",
        "line",
        "lost",
        "outcome",
        "payload",
        "planned",
        "ready",
        "singly",
        "task",
        "timeout",
    )

    line: Line  # that it was queued on

    def __init__(self, planned: Planned, settled: Callable[[Request], None]) -> None:
        self.planned = planned
        self.task = planned.task
        self.payload = planned.payload
        self.ready: asyncio.Future[Any] | None = None  # the batch, transferred
        self.outcome: Outcome | None = None
        self.charges: dict[int, int] | None = None  # deaths, by the position in hand
        self.lost: dict[int, TaskError] | None = None  # items given up, by position
        self.alone = False  # whether it may share no message with others
        self.singly = False  # whether its items are to be fetched one by one
        self.timeout: float | None = None  # seconds that an item may take
        self.cancelled = False  # nobody waits for it
        self._settled = settled

    def settle(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            raise RuntimeError(f"batch {self.task.seq} has two outcomes: {self.outcome}, {outcome}")
        self.outcome = outcome
        self._settled(self)

    @property
    def stream(self) -> tuple[int, int] | None:
        """The pass and the number of the stream that it is read from, if it is."""
        task = self.task
        return None if task.stream == NO_STREAM else (task.run, task.stream)

    @property
    def span(self) -> tuple[int, int]:
        """What of its stream it asks for."""
        assert self.planned.span is not None
        return self.planned.span

    def item_keys(self) -> Sequence[object]:
        """What names its items: their keys, or their ordinals where they have none."""
        task = self.task
        if task.fetches:
            keys: Sequence[object] = self.payload.open()
            return keys
        return [task.place(offset) for offset in range(task.size)]

    def complaint(self, index: object, stage: str, what: str) -> str:
        """What to say when it has failed, for one of its items or as a whole."""
        which = "the batch" if index is None else f"item {shorten(index)}"
        task = self.task
        return f"{which} failed in {stage}: {what} (batch {task.seq}, epoch {task.epoch})"

    def key_at(self, position: int) -> object:
        """What names the item that a worker noted as being at a position."""
        return self.item_keys()[position - self.task.position]


class Track:
    """How far one stream is known to have been read: what of it is reported without a gap."""

    def __init__(self, start: int, progress: Progress | None) -> None:
        self.progress = progress  # the last that was told
        self._position = start  # up to which everything has been done
        self._later: dict[int, tuple[int, Progress | None]] = {}  # by where it began

    def note(self, span: tuple[int, int], progress: Progress | None) -> None:
        """A task of the stream has been done, or given up, and then tells nothing."""
        self._later[span[0]] = span[1], progress
        while self._position in self._later:
            self._position, told = self._later.pop(self._position)
            self.progress = told or self.progress
