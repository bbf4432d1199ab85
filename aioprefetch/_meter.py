"""Counting what happens, and adding up: a Prefetcher has a meter, a pool sums those of its users.

It is told by message, by refill and by batch, never several times an item. All of it is called
on the loop, but for `stats`, which may be read in any thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ._stats import Busy, Setting, Stats

if TYPE_CHECKING:
    from ._messages import Report
    from ._trace import Trace

_GROWTH = 1.1  # from one class of durations to the next: an error of 5 % at most
_LEAST = 1e-7  # seconds
_CLASSES = 260  # the last begins after 1.6 hours


_FEW = 17  # timing each quick batch would cost as much as what is timed
_WORTH_TIMING = 4096  # bytes of a batch


class Durations:
    """How long things took: counts in classes of geometric growth, never more of them."""

    def __init__(self) -> None:
        self.counts = [0] * _CLASSES
        self.total = 0

    def add(self, seconds: float, times: int = 1) -> None:
        """So many took that long."""
        place = int(math.log(max(seconds, _LEAST) / _LEAST) / _LOG_GROWTH)
        self.counts[min(place, _CLASSES - 1)] += times
        self.total += times

    def quantile(self, share: float) -> float:
        """Seconds that this share of them did not exceed, within 5 %; 0 when there are none."""
        left = share * self.total
        for place, count in enumerate(self.counts):
            left -= count
            if count and left <= 0:
                middle: float = _LEAST * _GROWTH ** (place + 0.5)
                return middle
        return 0.0

    def merge(self, other: Durations) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


_LOG_GROWTH = math.log(_GROWTH)


class Levels(Protocol):
    """Where to see what is on its way; a window."""

    @property
    def in_flight(self) -> int:
        """Requested and not delivered."""

    @property
    def ready(self) -> int:
        """Made and not delivered."""


class Meter:
    """What one user's tasks and batches came to.

    Attributes
    ----------
    own, decoded
        Seconds that handing over the batches that were timed took, without the waits for them,
        and of these to rebuild them.
    stride
        One batch in so many is timed when it is handed over.
    trace
        Where to draw all this, if anybody wants to see it.
    """

    def __init__(self) -> None:
        self.setting = Setting()
        self.levels: Levels | None = None
        self.trace: Trace | None = None
        self.stride = _FEW
        self.delivered = self.timed = self.bytes = self.skipped = 0
        self.restarts = self.retries = 0
        self.own = self.decoded = self.transferred = self.read = self.waited = 0.0
        self.worked = 0.0  # by workers
        self.pending = 0.0  # seconds from request to outcome, summed
        self.tasks = Durations()
        self._asked = 0  # tasks that are
        self._counted = 0.0  # until when they are summed
        self._capacity = 1.0  # tasks that can be worked on at once
        self._waits_since: float | None = None
        self._waited_until = 0.0
        self._since: float | None = None  # iterated, without an end yet
        self._elapsed = 0.0  # in the passes before
        self._available = 0.0  # of workers' time, in what was merged

    def learn(self, setting: Setting, hold: int) -> None:
        """How the work is done; a worker holds so many tasks, which overlap if any is async."""
        self.setting = setting
        tasks = max(1, setting.num_proc) * (hold if setting.is_async else 1)
        self._capacity = min(tasks, setting.num_prefetch)

    def draw(self, trace: Trace) -> None:
        """Draw a timeline; then every batch is timed."""
        self.trace, self.stride = trace, 1

    # The pass

    def begin(self, levels: Levels) -> None:
        """An iteration can begin to deliver."""
        self.levels = levels
        self._since = time.monotonic()

    def end(self) -> None:
        """It is over."""
        self.levels = None
        self._asked = 0
        if self._since is not None:
            self._elapsed += time.monotonic() - self._since
            self._since = None

    @property
    def elapsed(self) -> float:
        """Seconds of passes, up to now."""
        since = self._since
        return self._elapsed + (0.0 if since is None else time.monotonic() - since)

    @property
    def available(self) -> float:
        """Seconds that workers could have worked for it, all together."""
        return self._available + self._capacity * self.elapsed

    # The consumer

    def begin_wait(self, now: float) -> None:
        """The consumer begins to wait."""
        if self._waits_since is None:
            self._waits_since = now

    def end_wait(self, began: float) -> float:
        """It has waited; of tasks that wait at once, the time counts once. Gives the time."""
        now = time.monotonic()
        self._waits_since = None
        began = max(began, self._waited_until)
        self.waited += now - began
        self._waited_until = now
        if self.trace is not None:
            self.trace.waited(began, now)
        return now

    def see(self, nbytes: int) -> None:
        """No batch was larger before."""
        if nbytes > _WORTH_TIMING:
            self.stride = 1

    def hand_over(self, asked: float, came: float) -> float:
        """A batch was taken and rebuilt; it stands for others that are not timed. Gives now."""
        now = time.monotonic()
        self.timed += 1
        self.own += now - asked
        self.decoded += now - came
        return now

    def transfer(self, began: float) -> None:
        """The same with what is done to it on a thread of its own, which alone calls this."""
        self.transferred += time.monotonic() - began

    # The source

    def reading(self, began: float, ended: float) -> None:
        """What is read in this process was being read."""
        self.read += ended - began
        if self.trace is not None:
            self.trace.read(began, ended)

    # The work

    def report(self, worker: int, report: Report) -> None:
        """A worker has said what became of tasks, which are about to be settled."""
        self.work(report.seconds, len(report.done))
        if self.trace is not None and report.spans is not None:
            self.trace.worked(worker, report.spans)

    def work(self, seconds: float, tasks: int) -> None:
        """So many were done in that time."""
        self.worked += seconds
        self.tasks.add(seconds / tasks, tasks)
        self._sum_up(time.monotonic())
        self._asked = max(0, self._asked - tasks)

    def ask(self, tasks: int, now: float) -> None:
        """So many more are requested."""
        self._sum_up(now)
        self._asked += tasks

    def _sum_up(self, now: float) -> None:
        self.pending += self._asked * (now - self._counted)
        self._counted = now

    def restart(self, worker: int, death: BaseException, again: int) -> None:
        """A worker's place is taken by another, and so many tasks run again."""
        self.restarts += 1
        self.retries += again
        if self.trace is not None:
            self.trace.restarted(worker, str(death))

    # What came of it

    def merge(self, other: Meter) -> None:
        """Add what another has counted up to now."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.timed:  # some stand for all
            self.own += other.own * other.delivered / other.timed
            self.decoded += other.decoded * other.delivered / other.timed
            self.timed += other.delivered
        self.tasks.merge(other.tasks)
        self._elapsed += other.elapsed
        self._available += other.available
        self._capacity = 0.0
        self.setting = other.setting
        if other._waits_since is not None:
            self.waited += time.monotonic() - other._waits_since

    def stats(self, available: float, levels: Sequence[Levels]) -> Stats:
        """All of it, as a value."""
        elapsed, tasks = self.elapsed, self.tasks
        return Stats(
            delivered=self.delivered,
            in_flight=sum(level.in_flight for level in levels),
            ready=sum(level.ready for level in levels),
            bytes=self.bytes,
            elapsed=elapsed,
            wait=self.waited,
            task_p50=tasks.quantile(0.5),
            task_p90=tasks.quantile(0.9),
            task_p99=tasks.quantile(0.99),
            queue_wait=max(0.0, self.pending - self.worked) / max(1, tasks.total),
            decode=self.decoded + self.transferred,
            restarts=self.restarts,
            retries=self.retries,
            skipped=self.skipped,
            busy=Busy(
                workers=_share(self.worked, available),
                consumer=_share(elapsed - self.waited - self.own, elapsed),
                source=_share(self.read, elapsed),
                transport=_share(max(self.decoded, self.transferred), elapsed),
            ),
            setting=self.setting,
        )


_SUMS = (
    "delivered", "bytes", "skipped", "restarts", "retries", "transferred",
    "read", "waited", "worked", "pending",
)  # fmt: skip


def _share(part: float, whole: float) -> float:
    return max(0.0, min(1.0, part / whole)) if whole else 0.0


class Ledger:
    """The meters that belong together: of a Prefetcher's starts, or of a pool's users."""

    def __init__(self) -> None:
        self._past = Meter()
        self._live: list[Meter] = []

    def add(self, meter: Meter) -> None:
        """Another begins to count."""
        self._live.append(meter)

    def close(self, meter: Meter) -> None:
        """It counts no more, and what it has counted stays."""
        if meter in self._live:
            self._past.merge(meter)
            self._live.remove(meter)

    def stats(self, available: float | None = None) -> Stats:
        """All that they have counted; any thread.

        Parameters
        ----------
        available
            Seconds that the workers could have worked, where the meters share them.
        """
        together, live = Meter(), list(self._live)
        for meter in (self._past, *live):
            together.merge(meter)
        levels = [meter.levels for meter in live if meter.levels is not None]
        return together.stats(together.available if available is None else available, levels)
