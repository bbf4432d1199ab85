"""Workers that hang: which are over their time, judged by their own clock.

A worker notes when it begins an item in memory that the parent reads. It is judged only after
what it has sent has been read, so that a blocked loop is no hang of the worker's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from ._lane import Hang, Lane
from ._page import GROUP, READING, InHand

_BEGINS = 1.0  # seconds after which a worker that has begun nothing is looked at
_SOON = 0.01  # seconds between two looks, at least


class Watch:
    """Looks at busy workers when the first of them could be over its time.

    Parameters
    ----------
    timeout
        Seconds that an item or a batch may take, or None for any.
    busy
        Gives the workers that hold work, and since when each has said nothing.
    on_hang
        Called with a worker that hangs, its ``hang`` set.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float | None,
        busy: Callable[[], Iterable[tuple[Lane, float]]],
        on_hang: Callable[[Lane], None],
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._busy = busy
        self._on_hang = on_hang
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Work has been given out."""
        if self._timer is None:
            self._timer = self._loop.call_later(min(_BEGINS, self._timeout or _BEGINS), self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        suspects = [lane for lane, _ in self._busy() if self._judge(lane)]
        for lane in suspects:
            lane.listen()
        for lane, silent_since in self._busy():
            hang = self._judge(lane) or self._is_stopped(lane, silent_since)
            if hang is not None:
                lane.hang = hang
                self._on_hang(lane)
        waits = [self._wait(lane) for lane, _ in self._busy()]
        if waits:
            self._timer = self._loop.call_later(max(min(waits), _SOON), self._look)

    def _judge(self, lane: Lane) -> Hang | None:
        """Whether an item of the worker's is over its time."""
        if self._timeout is None:
            return None
        now = time.monotonic()
        late = [item for item in _timed(lane) if now - item.since > self._timeout]
        if not late:
            return None
        worst = min(late, key=lambda item: item.since)
        return Hang(worst, f"took longer than task_timeout={self._timeout:g} s")

    def _is_stopped(self, lane: Lane, silent_since: float) -> Hang | None:
        """Whether the worker was stopped where no limit of time would end it."""
        if _timed(lane) or self._loop.time() - silent_since < _BEGINS or not lane.is_stopped():
            return None
        return Hang(None, "was stopped (SIGSTOP)")

    def _wait(self, lane: Lane) -> float:
        """Seconds until the worker is to be looked at again."""
        hand = _timed(lane)
        if self._timeout is None or not hand:
            return min(_BEGINS, self._timeout or _BEGINS)
        return min(item.since for item in hand) + self._timeout - time.monotonic()


def _timed(lane: Lane) -> list[InHand]:
    """What has a time limit: an item's fetch and map, a batch's collate; not waiting for data."""
    return [item for item in lane.in_hand() if item.position >= GROUP or item.position < READING]
