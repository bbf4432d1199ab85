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
    """The epoch of the open or next pass, and what has been delivered of it.

    Attributes
    ----------
    epoch
        Of the pass that is open or was left, else of the next one.
    record
        Of the pass that is open, or of the last one.
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
        self.epoch = 0
        self.record = Record(Passed(0), share)
        self.seed: int | None = None
        self.layout = Layout()
        self.num_streams: int | None = None
        self.origin: tuple[int, ...] = ()
        self.reset = False
        self.spent = False
        self._share = share
        self._begun = False  # whether the epoch's pass has begun
        self._chosen: int | None = None  # the epoch that set_epoch asked for
        self._first: int | None = None  # epoch of the iteration that goes on
        self._loaded: dict[int, Passed] = {}
        self._handed: dict[int, Handed] = {}

    # Passes

    @property
    def chosen(self) -> int | None:
        """The epoch that was asked for and is not begun."""
        return self._chosen

    def choose(self, epoch: int) -> None:
        """Begin with an epoch; where it was left, if a state that was loaded says so."""
        self._chosen = epoch
        if epoch not in self._loaded:
            self._loaded.clear()
            self._first = None

    def begin(self) -> Record:
        """The record of a pass that begins now."""
        if self._chosen is not None:
            self.epoch, self._chosen = self._chosen, None
        elif self._begun:
            self.epoch += 1
        self._begun = True
        self._handed.clear()
        if not self._loaded:
            self._first = None
        self._first = self.epoch if self._first is None else self._first
        self.record = self.record_of(self.epoch)
        return self.record

    @property
    def first_epoch(self) -> int:
        """Of the iteration that is open, begun before a state of it was loaded."""
        return self.epoch if self._first is None else self._first

    def record_of(self, epoch: int) -> Record:
        """A new record, which goes on where a state was that has been loaded."""
        return Record(self._loaded.pop(epoch, Passed(epoch)), self._share)

    def turn(self, record: Record) -> None:
        """The iteration goes on to another epoch."""
        self.epoch, self.record = record.epoch, record

    def finish(self) -> None:
        """The iteration has come to its end."""
        self.epoch += 1
        self._begun = False
        self._first = None

    # State

    def hand(self, number: int, handed: Handed) -> None:
        """Remember a batch that is handed over, and may be said to be pending."""
        self._handed[number] = handed
        if len(self._handed) > _REMEMBERED:
            del self._handed[next(iter(self._handed))]

    def state(self, seed: int, layout: Layout, pending: Iterable[int] | None) -> dict[str, Any]:
        state = State(
            seed,
            layout,
            self._share,
            self._first_to_go_on(),
            self._passes(self._pending(pending)),
        )
        return to_json(state)

    def _first_to_go_on(self) -> int:
        if self._chosen is not None and not self._loaded:
            return self._chosen
        return self.first_epoch

    def _passes(self, pending: Sequence[Handed]) -> tuple[Passed, ...]:
        if self._chosen is not None or not self._begun:
            epoch = self.epoch if self._chosen is None else self._chosen
            rest = [self._own(self._loaded[e]) for e in sorted(self._loaded) if e >= epoch]
            return tuple(rest) or (Passed(epoch),)
        records = {handed.record.epoch: handed.record for handed in pending}
        records[self.record.epoch] = self.record
        return tuple(
            records[epoch].passed([h for h in pending if h.record.epoch == epoch])
            for epoch in sorted(records)
        )

    def _own(self, passed: Passed) -> Passed:
        return Record(passed, self._share).passed()

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
        self.record = Record(first, self._share)
        self._loaded = {passed.epoch: passed for passed in state.passes}
        self._chosen = first.epoch
        self._first = state.first_epoch
        self._handed.clear()

    def draw_seed(self) -> int:
        """The seed of a run that was given none."""
        if self.seed is None:
            self.seed = _seeds.draw_seed()
        return self.seed
