"""The place where a Prefetcher stands between its passes, and its state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from . import _seeds
from ._delivered import Share
from ._record import Handed, Record
from ._state import Layout, Passed, State, from_json, joined, to_json

_REMEMBERED = 1 << 16  # batches handed over with a number, the last of them


class Cursor:
    """Where a Prefetcher stands.

    Attributes
    ----------
    record
        Of the pass that is open, or of the last one; after a state was loaded, what that says.
    seed
        Of the run, where it was drawn or loaded.
    layout
        That a state was loaded with: it has to be that of the source.
    num_streams
        That a state was loaded with.
    origin
        Epoch and number of batches that a state was loaded with: replicas draw anew after it.
    reset
        Whether a source that is read here was told that it is in its place.
    spent
        Whether a source that can be read once has been.
    """

    def __init__(self, share: Share) -> None:
        self.record = Record(Passed(0), share)
        self.seed: int | None = None
        self.layout = Layout()
        self.num_streams: int | None = None
        self.origin: tuple[int, ...] = ()
        self.reset = False
        self.spent = False
        self._share = share
        self._next = 0  # epoch of the next iteration
        self._open = False  # whether the pass of the record is being iterated
        self._left = False  # whether it was left before its end, and nothing else was chosen
        self.first_epoch = 0  # of the iteration that is open or was left
        self._first: int | None = None  # epoch of the iteration that a state was taken in
        self._loaded: dict[int, Passed] = {}
        self._handed: dict[int, Handed] = {}

    # Passes

    @property
    def epoch(self) -> int:
        """The epoch that is open or was left unfinished, else the next one."""
        return self.record.epoch if self._open or self._left else self._next

    def choose(self, epoch: int) -> None:
        """Begin with an epoch; where it was left, if a state that was loaded says so."""
        self._next, self._left = epoch, False
        if epoch not in self._loaded:
            self._loaded.clear()

    def begin(self) -> Record:
        """The record of an iteration that begins now."""
        self.first_epoch = self._next
        if self._next in self._loaded and self._first is not None:
            self.first_epoch = self._first
        self._handed.clear()
        self.turn(self.record_of(self._next))
        self._open, self._left = True, False
        return self.record

    def record_of(self, epoch: int) -> Record:
        """A new record, which goes on where a state was that has been loaded."""
        return Record(self._loaded.pop(epoch, Passed(epoch)), self._share)

    def turn(self, record: Record) -> None:
        """The iteration goes on to another epoch."""
        self.record = record
        self._next = record.epoch + 1

    def undo(self, record: Record) -> None:
        """The iteration could not begin: what it would have begun is next again."""
        if self._open and record is self.record:
            self._open = False
            self._next, self._first = record.epoch, self.first_epoch
            self._loaded[record.epoch] = record.passed()

    def leave(self, record: Record, *, finished: bool) -> None:
        """The iteration is over."""
        if self._open and record is self.record:
            self._open = False
            self._left = not finished and self._next == record.epoch + 1

    # State

    def hand(self, number: int, handed: Handed) -> None:
        """Remember a batch that is handed over, and may be said to be pending."""
        self._handed[number] = handed
        if len(self._handed) > _REMEMBERED:
            del self._handed[next(iter(self._handed))]

    def state(self, seed: int, layout: Layout, pending: Iterable[int] | None) -> dict[str, Any]:
        """All this, but for batches that are pending."""
        passes = self._passes(self._pending(pending))
        return to_json(State(seed, layout, self._share, self._first_of(passes[0]), passes))

    def _first_of(self, passed: Passed) -> int:
        """The first epoch of the iteration that a pass belongs to."""
        if self._open or self._left:
            return self.first_epoch
        return passed.epoch if self._first is None or not self._loaded else self._first

    def _passes(self, pending: Sequence[Handed]) -> tuple[Passed, ...]:
        if not (self._open or self._left):
            waiting = [self._loaded[epoch] for epoch in sorted(self._loaded)]
            own = [Record(passed, self._share).passed() for passed in waiting]
            return tuple(own) or (Passed(self._next),)
        records = {handed.record.epoch: handed.record for handed in pending}
        records[self.record.epoch] = self.record
        return tuple(
            records[epoch].passed([h for h in pending if h.record.epoch == epoch])
            for epoch in sorted(records)
        )

    def _pending(self, numbers: Iterable[int] | None) -> list[Handed]:
        if numbers is None:
            return []
        wanted = set(numbers)
        unknown = sorted(wanted - self._handed.keys())
        if unknown:
            raise ValueError(
                f"batches {unknown[:5]} are not among those that numbered() has handed over in "
                f"this pass, or were not pending before (the last {_REMEMBERED} are remembered)"
            )
        self._handed = {number: self._handed[number] for number in sorted(wanted)}
        return list(self._handed.values())

    def load(self, documents: Any, seed: int | None, layout: Layout) -> None:
        """Go on where a state is; begins with the next pass.

        Raises
        ------
        TypeError, ValueError
            It is no state, or does not fit.
        """
        several = isinstance(documents, Sequence) and not isinstance(documents, (str, bytes))
        states = [from_json(document) for document in (documents if several else [documents])]
        if not states:
            raise ValueError("an empty list of states says nothing: give one for each rank")
        state = joined(states, self._share)
        if seed is not None and seed != state.seed:
            raise ValueError(
                f"the state has seed {state.seed}, and this Prefetcher was given seed={seed}: "
                f"give seed={state.seed}, or None to take the state's"
            )
        state.layout.check(layout)
        self.seed = state.seed
        self.layout = replace(state.layout, num_streams=None)
        self.num_streams = state.layout.num_streams
        first = state.passes[0]
        self.origin = (first.epoch, first.settled)
        self._loaded = {passed.epoch: passed for passed in state.passes}
        self._first = state.first_epoch
        self._next, self._left = first.epoch, False
        if not self._open:
            self.record = Record(first, self._share)

    def draw_seed(self) -> int:
        """The seed of a run that was given none."""
        if self.seed is None:
            self.seed = _seeds.draw_seed()
        return self.seed
