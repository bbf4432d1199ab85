"""Who gets what, and when: the tasks of a pool, chunks, and tasks that are taken back.

A worker holds what it runs and as much again, so that a blocked loop leaves it work. Quick
tasks travel several to a message. What a worker has not begun while another is idle, and has
said nothing for a while, is withdrawn and goes to that one. Of several lines the one that has
had least of the workers' time comes first, and an urgent one before all. The loop alone calls
this.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace

from ._arena import STALE
from ._exceptions import pack_error
from ._lane import Lane
from ._line import Line
from ._messages import NO_STREAM, Again, Cancel, Ended, Failed, Outcome, Report
from ._meter import Ledger
from ._page import CLAIMS
from ._request import Request, Track

PATIENCE = 0.005  # seconds after a worker's last word
_WHOLE = 1e-6  # of a task, that rounding may take from the room for it


class _Roster:
    """Which workers to look at: of a thousand, only a few at a time."""

    def __init__(self) -> None:
        self.free: dict[_Post, None] = {}  # that hold nothing
        self.roomy: dict[_Post, None] = {}  # that hold something, and may have room for more
        self.laden: dict[_Post, None] = {}  # that hold more than they can have begun

    def place(self, post: _Post) -> None:
        """What a worker holds has changed."""
        for group, belongs in (
            (self.free, not post.held),
            (self.roomy, bool(post.held)),
            (self.laden, post.waits()),
        ):
            if belongs:
                group[post] = None
            else:
                group.pop(post, None)

    def idle(self) -> _Post | None:
        """A worker that has nothing to do."""
        return next((post for post in self.free if post.usable and not post.silent), None)


class _Post:
    """What one worker holds."""

    def __init__(self, lane: Lane, loop: asyncio.AbstractEventLoop, roster: _Roster) -> None:
        self.lane = lane
        self._roster = roster
        self.resumed: set[tuple[int, int]] = set()  # streams that this worker was told about
        self.held: dict[int, Request] = {}  # by ticket, in the order sent
        self._counts: Counter[Line] = Counter()
        self._newest = 0  # ticket, which is none in a worker's page
        self.silent = False  # its tasks were taken back, and it has said nothing since
        self.last_word = loop.time()
        roster.place(self)

    @property
    def usable(self) -> bool:
        return self.lane.usable

    def hold(self, line: Line, requests: Sequence[Request]) -> Iterable[int]:
        """Hold some of a line; gives their tickets."""
        first, self._newest = self._newest + 1, self._newest + len(requests)
        tickets = range(first, self._newest + 1)
        self.held.update(zip(tickets, requests, strict=True))
        self._counts[line] += len(requests)
        line.out += len(requests)
        self._roster.place(self)
        return tickets

    def take(self, *tickets: int) -> list[Request]:
        """Hold them no more; KeyError, and nothing has changed, where one is not held."""
        unknown = [ticket for ticket in tickets if ticket not in self.held]
        if unknown:
            raise KeyError(*unknown)
        requests = [self.held.pop(ticket) for ticket in tickets]
        for line, count in Counter([request.line for request in requests]).items():
            self._counts[line] -= count
            if not self._counts[line]:
                del self._counts[line]
            line.out -= count
        self._roster.place(self)
        for line in {request.line for request in requests}:
            if line.emptied is not None and not line.out:
                line.emptied()
        return requests

    def load(self, *, is_async: bool) -> float:
        """How much it holds of what it is to hold; what overlaps has a measure of its own."""
        return sum(
            count / (line.hold * line.chunk)
            for line, count in self._counts.items()
            if line.is_async == is_async
        )

    def room(self, line: Line) -> int:
        """Tasks of a line that it may be given."""
        most = line.hold * line.chunk
        if self._counts.keys() <= {line}:
            return most - self._counts[line]
        return int(most * (1 - self.load(is_async=line.is_async)) + _WHOLE)

    def waits(self) -> bool:
        """Whether it holds more than it can have begun."""
        apart = sum(count for line, count in self._counts.items() if not line.is_async)
        return apart > 1 or any(
            line.is_async and count > line.hold - 1 for line, count in self._counts.items()
        )

    def waiting(self) -> Iterable[int]:
        """Tickets that could be given to another worker, if they are not begun."""
        oldest = self._newest - CLAIMS
        return [
            ticket
            for ticket, request in self.held.items()
            if request.task.stream == NO_STREAM and ticket > oldest
        ]


def _soonest(post: _Post) -> tuple[bool, int, float]:
    """Who is likely to take up an urgent task first: it was begun with longest ago."""
    urgent = sum(request.line.urgent for request in post.held.values())
    return not post.usable or post.silent, urgent, post.last_word if post.held else 0.0


class _Ranks:
    """Workers by how little they hold, while they are fed."""

    def __init__(self, roomy: Iterable[_Post]) -> None:
        self._roomy = roomy
        self._heaps: dict[bool, list[tuple[bool, float, int, _Post]]] = {}

    def least(self, line: Line, kept: set[int]) -> _Post | None:
        """The worker that holds least of those that are not kept for others."""
        heap = self._heaps.get(line.is_async)
        if heap is None:
            heap = [_rank(post, line) for post in self._roomy]
            heapify(heap)
            self._heaps[line.is_async] = heap
        while heap:
            post = heap[0][-1]
            rank = _rank(post, line)
            if post.lane.number in kept:
                heappop(heap)
            elif rank > heap[0]:  # it has been given more since
                heapreplace(heap, rank)
            else:
                return post
        return None


def _rank(post: _Post, line: Line) -> tuple[bool, float, int, _Post]:
    away = not post.usable or post.silent
    return away, post.load(is_async=line.is_async), post.lane.number, post


class Dispatcher:
    """The tasks of a pool on their way to its workers.

    Parameters
    ----------
    on_work
        Called with a request when a worker has been given it, and others like it.
    on_idle
        Called when nothing has been reported for some seconds.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        loop: asyncio.AbstractEventLoop,
        *,
        on_work: Callable[[Request], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_work = on_work
        self._on_idle = on_idle
        self._roster = _Roster()
        self._posts = [_Post(lane, loop, self._roster) for lane in lanes]
        self._lines: list[Line] = []
        self.ledger = Ledger()  # of theirs
        self._tracks: dict[tuple[int, int], Track] = {}  # by run and stream
        self._ended: set[tuple[int, int]] = set()  # streams
        self._forgotten: set[int] = set()  # runs
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reported = 0.0  # when a worker last did

    # Lines

    def open(self, line: Line) -> None:
        """Take requests of one more line."""
        self._lines.append(line)
        self.ledger.add(line.meter)

    def shut(self, line: Line) -> None:
        """Nobody waits for a line any more: drop what of it is not begun."""
        line.closed = True
        self.drop(line)

    def drop(self, line: Line) -> list[Request]:
        """Take back what of a line is not begun; and nothing more of it is sent."""
        dropped = list(line)
        line.keep(())
        for post in self._posts:
            mine = [ticket for ticket in post.waiting() if post.held[ticket].line is line]
            dropped += post.take(*[ticket for ticket in mine if post.lane.withdraw(ticket)])
        if line in self._lines:
            self._lines.remove(line)
            self.ledger.close(line.meter)
        return dropped

    def configure(self, line: Line, hold: int, window: int, *, is_async: bool) -> None:
        """Learn how many of its tasks a worker holds, and how many are out at most."""
        line.configure(hold, window // (2 * max(1, len(self._posts))), is_async=is_async)
        self._look_at_all()

    def tell_meters(self, lane: Lane, death: BaseException, again: Sequence[Request]) -> None:
        """A worker's place is taken by another, and these run again."""
        for line in self._lines:
            line.meter.restart(lane.number, death, sum(one.line is line for one in again))

    def busy(self, line: Line) -> bool:
        """Whether any of its requests is unsettled."""
        return bool(line.out) or line.waits

    def at_work_for(self, line: Line) -> list[Lane]:
        """The workers that hold tasks of it."""
        return [
            post.lane
            for post in self._posts
            if any(request.line is line for request in post.held.values())
        ]

    def put(self, request: Request) -> None:
        """Queue a request on its line; `feed` sends it."""
        line = request.line
        if not (line.out or line.waits):  # what it did not ask for is not owed to it
            others = [other.spent for other in self._lines if other.waits]
            line.spent = max(line.spent, min(others, default=0.0))
        if request.stream is not None and request.stream not in self._tracks:
            start, _ = request.span
            self._tracks[request.stream] = Track(start, request.planned.resume)
        line.put(request, self._worker_of(request))

    def _worker_of(self, request: Request) -> int | None:
        """The number of the only worker that can do it, if there is one: it reads the stream."""
        stream = request.task.stream
        return None if stream == NO_STREAM else stream % len(self._posts)

    def forget(self, line: Line, run: int) -> None:
        """Drop what of a pass is not sent."""
        for key in [key for key in self._tracks if key[0] == run]:
            del self._tracks[key]
        self._ended = {key for key in self._ended if key[0] != run}
        for post in self._posts:
            post.resumed = {key for key in post.resumed if key[0] != run}
        self._forgotten.add(run)
        line.keep([request for request in line if request.task.run != run])

    def holds(self, lane: Lane, request: Request) -> bool:
        """Whether a worker still has a request."""
        post = self._posts[lane.number]
        return post.lane is lane and any(held is request for held in post.held.values())

    def cancel(self, request: Request) -> Lane | None:
        """Nobody waits for a request: gives the worker that has begun it, if one has."""
        request.cancelled = True
        if request.line.drop(request):
            return None
        for post in self._posts:
            for ticket, held in post.held.items():
                if held is request:
                    if not post.lane.withdraw(ticket):
                        post.lane.say(Cancel(ticket))
                        return post.lane
                    post.take(ticket)
                    self.feed()
                    return None
        return None

    def halt(self) -> None:
        """Send nothing more; any thread, and inside of any of these methods."""
        self._stopped = True

    def stop(self) -> None:
        """The same on the loop, and no timers."""
        self.halt()
        for line in self._lines:
            line.keep(())
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()

    # Sending

    def feed(self) -> None:
        """Send what workers have room for."""
        if self._stopped:
            return
        waiting = [line for line in self._lines if line.waits]
        # Workers that are kept for a line whose turn it is, and for which there is no room yet.
        kept: set[int] = set()
        ranks = _Ranks(self._roster.roomy)
        while waiting:
            line = min(waiting, key=lambda line: line.due) if len(waiting) > 1 else waiting[0]
            if not self._send_some(line, kept, ranks) or not line.waits:
                waiting.remove(line)
        self._consider_withdrawing()

    def _send_some(self, line: Line, kept: set[int], ranks: _Ranks) -> bool:
        """Send a message of what waits in a line, where there is room for one."""
        for worker, pinned in line.pinned.items():
            if pinned and worker not in kept:
                if self._send(self._posts[worker], line, pinned):
                    return True
                kept.add(worker)
        if not line.queue or (len(line.queue) < line.worth and not self._idle()):
            return False  # nothing, or not worth a message, and nobody waits for it
        post = self._roster.idle()
        if post is None or post.lane.number in kept:
            post = min(self._posts, key=_soonest) if line.urgent else ranks.least(line, kept)
        if post is None or post.lane.number in kept or not post.usable:
            return False
        if line.urgent and post.room(line) < 1:
            self._make_way(post)
        if self._send(post, line, line.queue):
            return True
        if post.room(line) < 1:
            self._roster.roomy.pop(post, None)
        kept.update(range(len(self._posts)))
        return False

    def _send(self, post: _Post, line: Line, queue: deque[Request]) -> bool:
        """Send a chunk of a queue; False when there is no room, or it is worth waiting for more."""
        size = min(line.chunk, post.room(line), len(queue))
        # A worker that has work waits for a chunk that is worth a message; an idle one does not.
        if not post.usable or size <= 0 or (post.held and size < line.worth):
            return False
        if not post.held:
            post.last_word = self._loop.time()
        requests = [queue.popleft() for _ in range(size)]
        orders = [
            (ticket, request.task, request.payload, self._again(post, request))
            for ticket, request in zip(post.hold(line, requests), requests, strict=True)
        ]
        post.lane.give(orders)
        self._on_work(requests[-1])
        return True

    def _make_way(self, post: _Post) -> None:
        """Take back what a worker has not begun and is not urgent."""
        for ticket in reversed([*post.waiting()]):
            if not post.held[ticket].line.urgent and post.lane.withdraw(ticket):
                (request,) = post.take(ticket)
                request.line.put_back(request, None)

    def _again(self, post: _Post, request: Request) -> Again | None:
        """What a worker has to know of a task that is not new."""
        stream, resume = request.stream, None
        if stream is not None and stream not in post.resumed:
            post.resumed.add(stream)
            resume = self._tracks[stream].progress if stream in self._tracks else None
        if resume is None and not (request.lost or request.singly or request.alone):
            return None
        lost = {position: pack_error(error) for position, error in (request.lost or {}).items()}
        return Again(lost, request.singly, resume, request.alone)

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
            requests = post.take(*[ticket for ticket, _ in report.done])
        except KeyError as error:
            raise RuntimeError(
                f"{lane.who} reports task {error}, and holds {list(post.held)}"
            ) from None
        settled = [(r, outcome) for r, (_, outcome) in zip(requests, report.done, strict=True)]
        for request, outcome in settled:
            if request.task.stream != NO_STREAM:
                self.note(request, outcome)
        for ticket in report.declined:
            if ticket in post.held:  # both had claimed it, and the worker gave way
                self.put_back(post.take(ticket))
        if settled and settled[0][0].line.learn(report.seconds, len(settled)):
            self._look_at_all()
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

    # Death

    def lose(self, lane: Lane) -> dict[int, Request]:
        """A worker has died: what it held, by ticket, in the order sent."""
        post = self._posts[lane.number]
        held = dict(post.held)
        post.take(*held)
        return held

    def at_work(self) -> list[tuple[Lane, float]]:
        """The workers that hold something, and since when each has said nothing."""
        posts = [post for post in self._posts if post.held and post.usable]
        return [(post.lane, post.last_word) for post in posts]

    def held_by(self, lane: Lane, ticket: int) -> Request | None:
        """The request that a worker has under a ticket."""
        return self._posts[lane.number].held.get(ticket)

    def take_ended(self, requests: list[Request]) -> list[Request]:
        """Those of streams that have ended, of requests to run again and of what waits."""
        ended = [request for request in requests if request.stream in self._ended]
        for line in self._lines:
            over = [request for request in line if request.stream in self._ended]
            if over:
                line.keep([request for request in line if request.stream not in self._ended])
            ended += over
        return ended

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put what a dead worker held where it will be taken next."""
        for request in reversed(requests):
            unwanted = request.cancelled or request.line.closed
            if not unwanted and request.task.run not in self._forgotten:
                request.line.put_back(request, self._worker_of(request))

    def take_all(self) -> list[Request]:
        """Everything that is not settled; nothing is left here."""
        left = []
        for line in self._lines:
            left += list(line)
            line.keep(())
        for post in self._posts:
            left += post.take(*post.held)
        return left

    def replace(self, lane: Lane) -> None:
        """Another worker takes the place of a dead one."""
        post = self._posts[lane.number]
        post.lane = lane
        post.silent = False
        post.resumed = set()
        post.last_word = self._loop.time()
        self._roster.place(post)

    # Withdrawing

    def _consider_withdrawing(self) -> None:
        """With the queues empty and a worker idle: see what others have not begun."""
        if self._timer is None and self._roster.laden and self._idle():
            self._timer = self._loop.call_later(PATIENCE, self._withdraw)

    def _idle(self) -> bool:
        return self._roster.idle() is not None

    def _look_at_all(self) -> None:
        """There may be room where there was none."""
        for post in self._posts:
            self._roster.place(post)

    def _withdraw(self) -> None:
        self._timer = None
        if not self._idle() or any(line.queue for line in self._lines):
            return
        patience = self._loop.time() - PATIENCE
        for post in list(self._roster.laden):
            if post.usable and post.last_word <= patience:
                self._take_back(post)
        self.feed()

    def _take_back(self, post: _Post) -> None:
        post.silent = True
        for ticket in post.waiting():
            if post.lane.withdraw(ticket):
                (request,) = post.take(ticket)
                request.line.put(request, None)
