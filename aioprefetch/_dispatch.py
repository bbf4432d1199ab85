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
from typing import Any

from ._arena import STALE
from ._errors import TaskError
from ._exceptions import pack_error
from ._lane import Lane
from ._messages import NO_STREAM, Again, Ended, Failed, Outcome, Progress, Report
from ._page import CLAIMS
from ._plan import Planned

CHUNK_SECONDS = 0.001  # of work that one message carries; 0 sends each task alone
PATIENCE = 0.005  # seconds after a worker's last word
_GROWTH = 1.25  # of the time that a task is taken for, from one report to the next


class Request:
    """The future of one task: made by the window, settled once by the pool."""

    __slots__ = (
        "_settled",
        "charges",
        "lost",
        "outcome",
        "payload",
        "planned",
        "ready",
        "singly",
        "task",
    )

    def __init__(self, planned: Planned, settled: Callable[[Request], None]) -> None:
        self.planned = planned
        self.task = planned.task
        self.payload = planned.payload
        self.ready: asyncio.Future[Any] | None = None  # the batch, transferred
        self.outcome: Outcome | None = None
        self.charges: dict[int, int] | None = None  # deaths, by the position in hand
        self.lost: dict[int, TaskError] | None = None  # items given up, by position
        self.singly = False  # whether its items are to be fetched one by one
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


class _Post:
    """What one worker holds and what waits for it alone."""

    def __init__(self, lane: Lane, loop: asyncio.AbstractEventLoop) -> None:
        self.lane = lane
        self.resumed: set[tuple[int, int]] = set()  # streams that this worker was told about
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
    on_work
        Called when a worker has been given some.
    on_idle
        Called when nothing has been reported for some seconds.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        loop: asyncio.AbstractEventLoop,
        *,
        on_work: Callable[[], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_work = on_work
        self._on_idle = on_idle
        self._posts = [_Post(lane, loop) for lane in lanes]
        self._tracks: dict[tuple[int, int], Track] = {}  # by run and stream
        self._ended: set[tuple[int, int]] = set()  # streams
        self._forgotten: set[int] = set()  # runs
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
        if request.stream is None:
            self._queue.append(request)
            return
        if request.stream not in self._tracks:
            start, _ = request.span
            self._tracks[request.stream] = Track(start, request.planned.resume)
        self._post_of(request).pinned.append(request)

    def _post_of(self, request: Request) -> _Post:
        return self._posts[request.task.stream % len(self._posts)]

    def forget(self, run: int) -> None:
        """Drop what of a pass is not sent."""
        for key in [key for key in self._tracks if key[0] == run]:
            del self._tracks[key]
        self._ended = {key for key in self._ended if key[0] != run}
        for post in self._posts:
            post.resumed = {key for key in post.resumed if key[0] != run}
        self._forgotten.add(run)
        for queue in (self._queue, *(post.pinned for post in self._posts)):
            kept = [request for request in queue if request.task.run != run]
            queue.clear()
            queue.extend(kept)

    def halt(self) -> None:
        """Send nothing more; any thread, and inside of any of these methods."""
        self._stopped = True

    def stop(self) -> None:
        """The same on the loop, and no timers."""
        self.halt()
        self._queue.clear()
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
            if not post.lane.usable or not self._send(post, self._queue):
                return
        self._consider_withdrawing()

    @staticmethod
    def _load(post: _Post) -> tuple[bool, int]:
        return not post.lane.usable or post.silent, len(post.held)

    def _send(self, post: _Post, queue: deque[Request]) -> bool:
        """Send a chunk of a queue; False when there is no room, or it is worth waiting for more."""
        held, chunk = len(post.held), self._chunk
        room = self._hold * chunk - held
        size = min(chunk, room, len(queue))
        # A worker that has work waits for a chunk that is worth a message; an idle one does not.
        if not post.lane.usable or size <= 0 or (held > 0 and size < self.worth):
            return False
        orders = []
        for _ in range(size):
            request = queue.popleft()
            ticket = post.newest = next(post.tickets)
            post.held[ticket] = request
            orders.append((ticket, request.task, request.payload, self._again(post, request)))
        if held == 0:
            post.last_word = self._loop.time()
        post.lane.give(orders)
        self._on_work()
        return True

    def _again(self, post: _Post, request: Request) -> Again | None:
        """What a worker has to know of a task that is not new."""
        stream, resume = request.stream, None
        if stream is not None and stream not in post.resumed:
            post.resumed.add(stream)
            resume = self._tracks[stream].progress if stream in self._tracks else None
        if resume is None and not request.lost and not request.singly:
            return None
        lost = {position: pack_error(error) for position, error in (request.lost or {}).items()}
        return Again(lost, request.singly, resume)

    # Reports

    def settle(self, lane: Lane, report: Report) -> list[tuple[Request, Outcome]]:
        """A worker's report: what is to be settled with what; feeds the worker again.

        Raises
        ------
        RuntimeError
            It reports what it was not given.
        """
        post = self._posts[lane.number]
        post.last_word = self._loop.time()
        post.silent = False
        try:
            settled = [(post.held.pop(ticket), outcome) for ticket, outcome in report.done]
        except KeyError as error:
            raise RuntimeError(
                f"worker {lane.number} (pid {lane.pid}) reports task {error}, and holds "
                f"{list(post.held)}"
            ) from None
        for request, outcome in settled:
            if request.task.stream != NO_STREAM:
                self.note(request, outcome)
        for ticket in report.declined:
            if ticket in post.held:  # both had claimed it, and the worker gave way
                self._queue.appendleft(post.held.pop(ticket))
        self._learn(report)
        self.feed()
        self._reported = post.last_word
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(STALE, self._look_idle)
        return settled

    def note(self, request: Request, outcome: Outcome) -> None:
        """How far a stream has come, if it is one."""
        if request.stream is None or request.task.run in self._forgotten:
            return
        if isinstance(outcome, Ended) or (isinstance(outcome, Failed) and outcome.ends):
            self._ended.add(request.stream)
        else:
            self._tracks[request.stream].note(request.span, outcome.progress)

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

    def lose(self, lane: Lane) -> dict[int, Request]:
        """A worker has died: what it held, by ticket, in the order sent."""
        post = self._posts[lane.number]
        held, post.held = post.held, {}
        return held

    def at_work(self) -> list[tuple[Lane, float]]:
        """The workers that hold something, and since when each has said nothing."""
        posts = [post for post in self._posts if post.held and post.lane.usable]
        return [(post.lane, post.last_word) for post in posts]

    def take_ended(self, requests: list[Request]) -> list[Request]:
        """Those of streams that have ended, of requests to run again and of what waits."""
        ended = [request for request in requests if request.stream in self._ended]
        for queue in (post.pinned for post in self._posts):
            ended += [request for request in queue if request.stream in self._ended]
            kept = [request for request in queue if request.stream not in self._ended]
            queue.clear()
            queue.extend(kept)
        return ended

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put what a dead worker held where it will be taken next."""
        for request in reversed(requests):
            if request.task.run in self._forgotten:
                continue
            if request.task.stream == NO_STREAM:
                self._queue.appendleft(request)
            else:
                self._post_of(request).pinned.appendleft(request)

    def take_all(self) -> list[Request]:
        """Everything that is not settled; nothing is left here."""
        left = list(self._queue)
        self._queue.clear()
        for post in self._posts:
            left += [*post.held.values(), *post.pinned]
            post.held.clear()
            post.pinned.clear()
        return left

    def replace(self, lane: Lane) -> None:
        """Another worker takes the place of a dead one."""
        post = self._posts[lane.number]
        post.lane = lane
        post.silent = False
        post.resumed = set()
        post.last_word = self._loop.time()

    # Withdrawing

    def _consider_withdrawing(self) -> None:
        """With the queue empty and a worker idle: see what others have not begun."""
        if self._timer is None and self._idle() and any(map(self._waits, self._posts)):
            self._timer = self._loop.call_later(PATIENCE, self._withdraw)

    def _idle(self) -> bool:
        return any(not (post.held or post.silent) and post.lane.usable for post in self._posts)

    def _waits(self, post: _Post) -> bool:
        return len(post.held) > self._hold - 1 and post.lane.usable

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
