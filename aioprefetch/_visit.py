"""A worker in whatever process, or thread, somebody's executor makes our calls.

It is there from one call to the next, found by its key. Where a call does not find it, it says
so, and is made again with what it takes to set it up.
"""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._plain import PlainKit, PlainWorker
from ._wire import LARGE, Frame, Segment

_RESIDENTS = 8  # workers that a thread remembers


class Parcelled:
    """Frames that travel by pickle, their large segments beside it where protocol 5 is spoken."""

    def __init__(self, frames: Sequence[Sequence[Segment]]) -> None:
        self.frames = [list(frame) for frame in frames]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        pack = _travelling if protocol >= 5 else bytes
        return _parcelled, tuple([pack(segment) for segment in frame] for frame in self.frames)


def _parcelled(*frames: Frame) -> Parcelled:
    return Parcelled(frames)


def _travelling(segment: Segment) -> Any:
    view = memoryview(segment)
    return pickle.PickleBuffer(view) if view.nbytes >= LARGE else bytes(view)


class Setup(NamedTuple):
    """What it takes to make a worker as it is by now."""

    post: Any
    program: Parcelled
    entries: Sequence[tuple[int, Parcelled]]  # what all workers have been told, by its number


class Ask(NamedTuple):
    """One visit.

    A worker that knows all up to ``since`` learns ``entries``. It is asked again how what is
    numbered by ``questions`` came in, 0 for itself.
    """

    key: str
    since: int
    entries: Sequence[tuple[int, Parcelled]]
    questions: Sequence[int]
    messages: Parcelled


class _Resident:
    """A worker, and how it answered what it is asked again by others."""

    def __init__(self, setup: Setup) -> None:
        (segments,) = setup.program.frames
        self._worker = PlainWorker(PlainKit(setup.post, segments), owns_process=False)
        self.version = 0
        self.answers: dict[int, list[Frame]] = {0: [self._worker.open()]}

    def catch_up(self, entries: Sequence[tuple[int, Parcelled]]) -> None:
        for number, entry in entries:
            if number > self.version:
                (frame,) = entry.frames
                said = self._worker.answer(frame)
                if said:
                    self.answers[number] = said
                self.version = number

    def answer(self, frame: Frame) -> list[Frame] | None:
        return self._worker.answer(frame)


_here = threading.local()  # an executor's workers may be threads


def _residents() -> OrderedDict[str, _Resident]:
    if not hasattr(_here, "residents"):
        _here.residents = OrderedDict()
    residents: OrderedDict[str, _Resident] = _here.residents
    return residents


def visit(ask: Ask, setup: Setup | None = None) -> Parcelled | None:
    """Say something to the worker; gives its answers, or None where it has to be set up."""
    residents = _residents()
    resident = residents.get(ask.key)
    if setup is None and (resident is None or resident.version < ask.since):
        return None
    if resident is None:
        assert setup is not None
        resident = residents[ask.key] = _Resident(setup)
        if len(residents) > _RESIDENTS:
            residents.popitem(last=False)
    resident.catch_up(ask.entries if setup is None else setup.entries)
    answers = [frame for number in ask.questions for frame in resident.answers.get(number, ())]
    for frame in ask.messages.frames:
        said = resident.answer(frame)
        if said is None:  # that was Goodbye
            del residents[ask.key]
            break
        answers += said
    return Parcelled(answers)
