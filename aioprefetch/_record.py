"""What has been delivered of one pass, and how to read on from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ._delivered import Delivered, Run, Share
from ._messages import NO_STREAM, Ended, Failed, Made, Nothing, Outcome, Progress, Task
from ._state import Part, Passed, least_read

Told = Made | Nothing | Failed


class Planned(Protocol):
    """What a record needs to know of a task."""

    @property
    def task(self) -> Task: ...

    @property
    def span(self) -> tuple[int, int] | None:
        """What of its sequence is delivered with it."""

    @property
    def progress(self) -> Progress | None:
        """How far its sequence was read for it, in this process."""


class Sequel:
    """What has been delivered of one sequence of a pass, and how to read on from there."""

    def __init__(self, part: Part, share: Share | None) -> None:
        runs: Iterable[Run | None] = part.runs if share is None else map(share.own, part.runs)
        self.delivered = Delivered(run for run in runs if run is not None)
        self.progress = part.progress
        self.ended = part.ended
        self._later: dict[int, Progress] = {}  # by the end of their span

    def settle(self, span: tuple[int, int], progress: Progress | None) -> None:
        """A span has been delivered, after which the sequence had been read so far."""
        self.delivered.add(*span)
        if progress is not None:
            self._later[span[1]] = progress
        through = self.delivered.through
        reached = max((at for at in self._later if at <= through), default=None)
        if reached is not None:
            self.progress = self._later[reached]
            self._later = {at: told for at, told in self._later.items() if at > through}

    def part(self, share: Share | None, pending: Sequence[Handed]) -> Part:
        """All this as a value, but for what is pending."""
        delivered, progress = self.delivered, self.progress
        if pending:
            delivered = delivered.without(handed.span for handed in pending)
            progress = least_read(handed.before for handed in pending)
        runs = delivered.runs()
        if share is not None:
            runs = map(share.whole, runs)
        return Part(tuple(runs), progress, self.ended and not pending)


@dataclass(frozen=True)
class Handed:
    """A batch that was handed over: what it was of."""

    record: Record
    stream: int | None
    span: tuple[int, int]
    before: Progress | None  # how far its sequence had been delivered before it


class Record:
    """What has been delivered of the pass that is open, or was left.

    Attributes
    ----------
    settled
        Batches that were delivered, failed or left empty.
    told
        Whether any was delivered or failed.
    exact
        Whether places are kept: those of replicas are not.
    """

    def __init__(self, passed: Passed, share: Share) -> None:
        self.epoch = passed.epoch
        self.share = share
        self.settled = passed.settled
        self.batches = passed.batches
        self.skipped = passed.skipped
        self.told = passed.batches > 0
        self.exact = True
        self.whole = Sequel(passed.whole, share)
        self._streams = {
            (number - share.rank) // share.world_size: Sequel(part, None)
            for number, part in passed.streams.items()
            if number % share.world_size == share.rank
        }

    def stream(self, number: int) -> Sequel:
        """The sequel of a stream, by its number among this host's."""
        sequel = self._streams.get(number)
        if sequel is None:
            sequel = self._streams[number] = Sequel(Part(), None)
        return sequel

    def settle(self, planned: Planned, outcome: Outcome) -> None:
        """A batch leaves the window: delivered, failed, or left empty."""
        if isinstance(outcome, Ended):
            self.stream(outcome.stream).ended = True
            return
        self.settled += 1
        self.told = self.told or type(outcome) is not Nothing
        self.batches += type(outcome) is Made
        self.skipped += outcome.skipped
        if planned.span is None or not self.exact:
            return
        if planned.task.stream == NO_STREAM:
            self.whole.settle(planned.span, planned.progress)
        else:
            self._settle_stream(planned.task, planned.span, outcome)

    def _settle_stream(self, task: Task, span: tuple[int, int], outcome: Told) -> None:
        sequel, progress = self.stream(task.stream), outcome.progress
        start, stop = span
        if progress is not None and progress.position < task.position + task.size:
            stop = max(start, progress.position)  # it had no more
        sequel.settle((start, stop), progress)
        if type(outcome) is Failed and outcome.ends:
            sequel.ended = True

    def handed(self, planned: Planned) -> Handed:
        """What is to be remembered of a batch that may be pending for a while."""
        number = planned.task.stream
        stream = None if number == NO_STREAM else number
        sequel = self.whole if stream is None else self.stream(stream)
        return Handed(self, stream, planned.span or (0, 0), sequel.progress)

    def passed(self, pending: Sequence[Handed] = ()) -> Passed:
        """All this as a value, but for batches that are pending."""
        rank, world_size, _ = self.share
        streams = {
            rank + world_size * number: sequel.part(None, _of(number, pending))
            for number, sequel in sorted(self._streams.items())
        }
        return Passed(
            self.epoch,
            self.settled - len(pending),
            self.batches - len(pending),
            self.skipped,
            self.whole.part(self.share, _of(None, pending)),
            streams,
        )


def _of(stream: int | None, pending: Sequence[Handed]) -> list[Handed]:
    return [handed for handed in pending if handed.stream == stream]
