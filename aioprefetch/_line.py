"""One user's tasks on their way to the workers of a pool.

A Prefetcher is such a user, and so are the calls that a shared pool is asked for. A line knows
what waits, how much of it a worker is to hold, and what it has had of the workers' time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ._messages import NO_STREAM
from ._meter import Meter
from ._request import Request

CHUNK_SECONDS = 0.001  # of work that one message carries; 0 sends each task alone
_GROWTH = 1.25  # of the time that a task is taken for, from one report to the next


class Rules(NamedTuple):
    """What is forgiven, and what becomes of what is not."""

    on_error: Any
    retries: int  # deaths that an item is forgiven
    timeout: float | None = None  # seconds that an item, or a batch, may take
    late: int = 0  # times that an item is forgiven to have taken longer
    limit: str = "task_timeout"  # what users call the limit of time


class Line:
    """One user's tasks.

    Parameters
    ----------
    urgent
        Whether its tasks go ahead of those that are not.
    meter
        What is told of its tasks.
    """

    def __init__(self, rules: Rules, *, urgent: bool = False, meter: Meter | None = None) -> None:
        self.rules = rules
        self.meter = meter or Meter()
        self.urgent = urgent
        self.closed = False  # nobody waits for its outcomes any more
        self.emptied: Callable[[], None] | None = None  # called when workers hold none of it
        self.is_async = False  # its tasks overlap in a worker
        self.hold = 2  # chunks that a worker holds
        self.chunk = 1  # tasks that make a message worth sending
        self.out = 0  # tasks that workers hold
        self.queue: deque[Request] = deque()  # for any worker
        self.pinned: dict[int, deque[Request]] = {}  # of streams, by the worker that reads them
        self.spent = 0.0  # seconds of the workers' time
        self._most = 1  # tasks a chunk may have, so that every worker gets some of the window
        self._seconds: float | None = None  # that a task takes

    def configure(self, hold: int, most: int, *, is_async: bool) -> None:
        """Learn how many tasks a worker holds, and how many a chunk may have at most."""
        self.hold, self._most, self.is_async = hold, max(1, most), is_async

    @property
    def worth(self) -> int:
        """Requests that make a message worth sending."""
        return (self.chunk + 1) // 2

    @property
    def waits(self) -> bool:
        """Whether anything does."""
        return bool(self.queue) or any(self.pinned.values())

    @property
    def due(self) -> tuple[bool, float]:
        """Whose turn it is among several lines: the least, who has had least."""
        return not self.urgent, self.spent + self.out * (self._seconds or 0.0)

    def put(self, request: Request, worker: int | None) -> None:
        """Queue a request, for one worker alone or for any."""
        self._queue_of(worker).append(request)

    def put_back(self, request: Request, worker: int | None) -> None:
        """Put it where it is taken next."""
        self._queue_of(worker).appendleft(request)

    def _queue_of(self, worker: int | None) -> deque[Request]:
        return self.queue if worker is None else self.pinned.setdefault(worker, deque())

    def _queues(self) -> Iterable[deque[Request]]:
        return self.queue, *self.pinned.values()

    def __iter__(self) -> Iterator[Request]:
        """What waits."""
        for queue in self._queues():
            yield from queue

    def drop(self, request: Request) -> bool:
        """Take a request out of what waits; False when it does not."""
        waits = request.task.stream == NO_STREAM and request in self.queue
        if waits:
            self.queue.remove(request)
        return waits

    def keep(self, wanted: Iterable[Request]) -> None:
        """Drop all that waits and is not wanted."""
        ids = {id(request) for request in wanted}
        for queue in self._queues():
            kept = [request for request in queue if id(request) in ids]
            queue.clear()
            queue.extend(kept)

    def learn(self, seconds: float, tasks: int) -> bool:
        """A worker has done so many in that time; whether chunks are larger from now on."""
        self.spent += seconds
        each = max(seconds / tasks, 1e-7)
        known = self._seconds or each
        # Down at once and up slowly: a worker that was kept waiting for a core says too much.
        self._seconds = min(each, known * _GROWTH)
        before = self.chunk
        self.chunk = max(1, min(int(CHUNK_SECONDS / self._seconds), self._most))
        return self.chunk > before
