"""Workers that hang: which are over their time, judged by their own clock.

A worker notes when it begins an item in memory that the parent reads. It is judged only after
what it has sent has been read, so that a blocked loop is no hang of the worker's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from ._lane import Hang, Lane
from ._page import GROUP, READING, InHand
from ._request import Request
from ._threads import Helper

_BEGINS = 1.0  # seconds after which a worker that has begun nothing is looked at
_SOON = 0.01  # seconds between two looks, at least


class Watch:
    """Looks at busy workers when the first of them could be over its time.

    Parameters
    ----------
    busy
        Gives the workers that hold work, and since when each has said nothing.
    held_by
        Gives the request that a worker has under a ticket.
    on_hang
        Called with a worker that hangs, its ``hang`` set.
    keeper
        Where files of /proc are read.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        busy: Callable[[], Iterable[tuple[Lane, float]]],
        held_by: Callable[[Lane, int], Request | None],
        on_hang: Callable[[Lane], None],
        keeper: Helper,
    ) -> None:
        self._keeper = keeper
        self._loop = loop
        self._busy = busy
        self._held_by = held_by
        self._on_hang = on_hang
        self._timer: asyncio.TimerHandle | None = None
        self._pace = _BEGINS  # seconds between two looks, at most

    def wake(self, timeout: float | None) -> None:
        """Work has been given out of which an item may take so many seconds."""
        if timeout is not None and timeout < self._pace:
            self._pace = timeout
            self.stop()
        if self._timer is None:
            self._timer = self._loop.call_later(self._pace, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        suspects = [lane for lane, _ in self._busy() if self._judge(lane)]
        for lane in suspects:
            lane.listen()
        for lane, silent_since in self._busy():
            hang = self._judge(lane)
            if hang is not None:
                self._tell(lane, hang)
            elif not _timed(lane) and self._loop.time() - silent_since >= _BEGINS:
                self._keeper.post(self._look_whether_stopped, lane)
        waits = [self._wait(lane) for lane, _ in self._busy()]
        if waits:
            self._timer = self._loop.call_later(max(min(waits), _SOON), self._look)

    def _left(self, lane: Lane) -> list[tuple[float, InHand, Request]]:
        """The items in hand that have a limit, and the seconds that each has left."""
        now = time.monotonic()
        limited = []
        for item in _timed(lane):
            request = self._held_by(lane, item.ticket)
            if request is not None and request.timeout is not None:
                limited.append((request.timeout - (now - item.since), item, request))
        return limited

    def _judge(self, lane: Lane) -> Hang | None:
        """Whether an item of the worker's is over its time."""
        late = [found for found in self._left(lane) if found[0] < 0]
        if not late:
            return None
        _, item, request = min(late, key=lambda found: found[0])
        return Hang(item, f"took longer than {request.line.rules.limit}={request.timeout:g} s")

    def _look_whether_stopped(self, lane: Lane) -> None:
        """On the keeper: whether a worker was stopped where no limit of time would end it."""
        if lane.is_stopped():
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(
                    self._tell, lane, Hang(None, "was stopped (SIGSTOP)")
                )

    def _tell(self, lane: Lane, hang: Hang) -> None:
        if lane.usable:
            lane.hang = hang
            self._on_hang(lane)

    def _wait(self, lane: Lane) -> float:
        """Seconds until the worker is to be looked at again."""
        lefts = [left for left, _, _ in self._left(lane)]
        return min([self._pace, *lefts])


def _timed(lane: Lane) -> list[InHand]:
    """What has a time limit: an item's fetch and map, a batch's collate; not waiting for data."""
    return [item for item in lane.in_hand() if item.position >= GROUP or item.position < READING]
