"""Who gets what, and when: the queues of a pool, chunks, and tasks that are taken back.

A worker holds what it runs and as much again, so that a blocked loop leaves it work. Quick
tasks travel several to a message. What a worker has not begun while another is idle, and has
said nothing for a while, is withdrawn and goes to that one. The loop alone calls this.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ._arena import STALE
from ._lane import Lane
from ._messages import NO_STREAM, Outcome, Report, Task
from ._page import CLAIMS
from ._payload import Payload

CHUNK_SECONDS = 0.001  # of work that one message carries; 0 sends each task alone
PATIENCE = 0.005  # seconds after a worker's last word
_GROWTH = 1.25  # of the time that a task is taken for, from one report to the next


class Request:
    """The future of one task: made by the window, settled once by the pool."""

    __slots__ = ("_settled", "outcome", "payload", "task")

    def __init__(self, task: Task, payload: Payload, settled: Callable[[Request], None]) -> None:
        self.task = task
        self.payload = payload
        self.outcome: Outcome | None = None
        self._settled = settled

    def settle(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            raise RuntimeError(f"batch {self.task.seq} has two outcomes: {self.outcome}, {outcome}")
        self.outcome = outcome
        self._settled(self)

    def item_keys(self) -> Sequence[object]:
        """What names its items: their keys, or their ordinals where they have none."""
        task = self.task
        if task.fetches:
            keys: Sequence[object] = self.payload.open()
            return keys
        if task.stream != NO_STREAM:  # they are numbered where they are read
            return ()
        return range(task.position, task.position + task.size)

    def key_at(self, position: int) -> object:
        """What names the item at a position of the plan."""
        return self.item_keys()[position - self.task.position] if self.task.fetches else position


class _Post:
    """What one worker holds and what waits for it alone."""

    def __init__(self, lane: Lane, loop: asyncio.AbstractEventLoop) -> None:
        self.lane = lane
        self.held: dict[int, Request] = {}  # by ticket, in the order sent
        self.pinned: deque[Request] = deque()  # of streams that it reads
        self.tickets = itertools.count(1)  # 0 is no ticket, in a worker's page
        self.newest = 0
        self.silent = False  # its tasks were taken back, and it has said nothing since
        self.last_word = loop.time()

    def waiting(self) -> Iterable[int]:
        """Tickets that could be given to another worker, if they are not begun."""
        oldest = self.newest - CLAIMS
        return [
            ticket
            for ticket, request in self.held.items()
            if request.task.stream == NO_STREAM and ticket > oldest
        ]


class Dispatcher:
    """The tasks of a pool on their way to its workers.

    Parameters
    ----------
    on_idle
        Called when nothing has been reported for some seconds.
    """

    def __init__(
        self, lanes: Sequence[Lane], loop: asyncio.AbstractEventLoop, on_idle: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._posts = [_Post(lane, loop) for lane in lanes]
        self._queue: deque[Request] = deque()
        self._stopped = False
        self._hold = 2
        self._most = 1  # tasks a chunk may have, so that every worker gets some of the window
        self._seconds: float | None = None  # that a task takes
        self._chunk = 1  # tasks that make a message worth sending
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reported = 0.0  # when a worker last did

    def configure(self, hold: int, window: int) -> None:
        """Learn how many tasks a worker holds, and how many are out at most."""
        self._hold = hold
        self._most = max(1, window // (2 * max(1, len(self._posts))))

    @property
    def worth(self) -> int:
        """Requests that make a message worth sending."""
        return (self._chunk + 1) // 2

    @property
    def busy(self) -> bool:
        return bool(self._queue) or any(post.held or post.pinned for post in self._posts)

    def put(self, request: Request) -> None:
        """Queue a request; `feed` sends it."""
        if request.task.stream == NO_STREAM:
            self._queue.append(request)
        else:
            self._post_of(request).pinned.append(request)

    def _post_of(self, request: Request) -> _Post:
        return self._posts[request.task.stream % len(self._posts)]

    def lane_of(self, request: Request) -> Lane:
        """The worker that a stream is read by."""
        return self._post_of(request).lane

    def forget(self, run: int) -> None:
        """Drop what of a pass is not sent."""
        for queue in (self._queue, *(post.pinned for post in self._posts)):
            kept = [request for request in queue if request.task.run != run]
            queue.clear()
            queue.extend(kept)

    def clear(self) -> None:
        self._queue.clear()

    def halt(self) -> None:
        """Send nothing more; any thread."""
        self._stopped = True
        self._queue.clear()

    def stop(self) -> None:
        """The same, and no timers."""
        self.halt()
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()

    # Sending

    def feed(self) -> None:
        """Send what workers have room for."""
        if self._stopped:
            return
        for post in self._posts:
            if post.pinned:
                self._send(post, post.pinned)
        while self._queue:
            if len(self._queue) < self.worth and not self._idle():
                return  # not worth a message, and nobody waits for it
            post = min(self._posts, key=self._load)
            if post.lane.dead or not self._send(post, self._queue):
                return
        self._consider_withdrawing()

    @staticmethod
    def _load(post: _Post) -> tuple[bool, int]:
        return post.lane.dead or post.silent, len(post.held)

    def _send(self, post: _Post, queue: deque[Request]) -> bool:
        """Send a chunk of a queue; False when there is no room, or it is worth waiting for more."""
        held, chunk = len(post.held), self._chunk
        room = self._hold * chunk - held
        size = min(chunk, room, len(queue))
        # A worker that has work waits for a chunk that is worth a message; an idle one does not.
        if post.lane.dead or size <= 0 or (held > 0 and size < self.worth):
            return False
        orders = []
        for _ in range(size):
            request = queue.popleft()
            ticket = post.newest = next(post.tickets)
            post.held[ticket] = request
            orders.append((ticket, request.task, request.payload))
        if held == 0:
            post.last_word = self._loop.time()
        post.lane.give(orders)
        return True

    # Reports

    def settle(self, lane: Lane, report: Report) -> list[tuple[Request, Outcome]]:
        """A worker's report: what is to be settled with what; feeds the worker again."""
        post = self._posts[lane.number]
        post.last_word = self._loop.time()
        post.silent = False
        settled = [(post.held.pop(ticket), outcome) for ticket, outcome in report.done]
        for ticket in report.declined:
            if ticket in post.held:  # both had claimed it, and the worker gave way
                self._queue.appendleft(post.held.pop(ticket))
        self._learn(report)
        self.feed()
        self._reported = post.last_word
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(STALE, self._look_idle)
        return settled

    def _look_idle(self) -> None:
        self._idle_timer = None
        left = self._reported + STALE - self._loop.time()
        if left > 0:
            self._idle_timer = self._loop.call_later(left, self._look_idle)
        else:
            self._on_idle()

    def _learn(self, report: Report) -> None:
        if not report.done:
            return
        seconds = max(report.seconds / len(report.done), 1e-7)
        known = self._seconds or seconds
        # Down at once and up slowly: a worker that was kept waiting for a core says too much.
        self._seconds = min(seconds, known * _GROWTH)
        self._chunk = max(1, min(int(CHUNK_SECONDS / self._seconds), self._most))

    def lose(self, lane: Lane) -> list[tuple[int, Request]]:
        """A worker has died: what it had begun or read. What it had not begun is queued again."""
        post = self._posts[lane.number]
        begun = [
            (ticket, request)
            for ticket, request in post.held.items()
            if request.task.stream != NO_STREAM or lane.begun(ticket)
        ]
        lost = {ticket for ticket, _ in begun}
        again = [request for ticket, request in post.held.items() if ticket not in lost]
        begun += [(0, request) for request in post.pinned]
        post.held.clear()
        post.pinned.clear()
        self._queue.extendleft(reversed(again))
        return begun

    # Withdrawing

    def _consider_withdrawing(self) -> None:
        """With the queue empty and a worker idle: see what others have not begun."""
        if self._timer is None and self._idle() and any(map(self._waits, self._posts)):
            self._timer = self._loop.call_later(PATIENCE, self._withdraw)

    def _idle(self) -> bool:
        return any(not (post.held or post.silent or post.lane.dead) for post in self._posts)

    def _waits(self, post: _Post) -> bool:
        return len(post.held) > self._hold - 1 and not post.lane.dead

    def _withdraw(self) -> None:
        self._timer = None
        if self._queue or not self._idle():
            return
        patience = self._loop.time() - PATIENCE
        for post in self._posts:
            if self._waits(post) and post.last_word <= patience:
                self._take_back(post)
        self.feed()

    def _take_back(self, post: _Post) -> None:
        post.silent = True
        for ticket in post.waiting():
            if post.lane.withdraw(ticket):
                self._queue.append(post.held.pop(ticket))
