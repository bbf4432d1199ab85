"""A task while it is being done: where each call of the user's stands, and errors that say so."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from . import _seeds
from ._errors import Stage, TaskError, describe_error, shorten
from ._exceptions import unpack_error
from ._messages import NO_STREAM, Again, Lost, Progress, Task
from ._page import BATCH, GROUP, READING, Page
from ._place import Place, WorkerInfo, current


@dataclass(frozen=True)
class Desk:
    """What one worker's tasks have in common."""

    info: WorkerInfo
    worker: int
    seeds_globals: bool
    replicates: bool
    page: Page | None
    incarnation: int = 0  # how many workers of its number there were before
    origin: tuple[int, ...] = ()  # where the run went on
    stream: int = NO_STREAM  # among those of all hosts

    @property
    def replica(self) -> tuple[int, ...]:
        """A name for the copy that a replica reads, no other's before it."""
        return *self.origin, self.stream + (self.incarnation << 32)


class Job:
    """A task, its keys or items, and the places of its calls."""

    __slots__ = ("again", "desk", "fetches", "planned", "progress", "task", "ticket", "values")

    def __init__(
        self,
        desk: Desk,
        ticket: int,
        task: Task,
        values: Sequence[Any],
        again: Again | None = None,
    ) -> None:
        self.desk = desk
        self.planned = task.position  # by which the parent knows its items
        self.again = again
        self.progress: Progress | None = None  # of the stream that it was read from
        self.ticket = ticket
        self.task = task
        self.values = values
        self.fetches = task.fetches  # until __getitems__ has fetched them all

    def item(self, offset: int) -> _Around:
        """Around the fetch and map of the item at ``offset``."""
        position = self.task.place(offset)
        return _Around(self, position, self._item_key(position), self.planned + offset)

    def reading(self, ordinal: int) -> _Around:
        """Around the reading of a stream's item."""
        desk = self.desk
        place = (
            (*desk.replica, ordinal) if desk.replicates else (self.task.epoch, desk.stream, ordinal)
        )
        key = _seeds.key_of(desk.info.seed, "reading", *place)
        return _Around(self, ordinal, key, READING + ordinal)

    def batch(self, domain: Literal["group", "batch"]) -> _Around:
        """Around a call for the whole batch: ``__getitems__`` or ``collate_fn``."""
        task = self.task
        place = (task.epoch, task.position, self.desk.stream + 1)
        key = _seeds.key_of(self.desk.info.seed, domain, *place)
        return _Around(self, task.position, key, GROUP if domain == "group" else BATCH)

    def _item_key(self, position: int) -> int:
        desk, epoch = self.desk, self.task.epoch
        if desk.stream == NO_STREAM:
            return _seeds.key_of(desk.info.seed, "item", epoch, position)
        if desk.replicates:
            return _seeds.key_of(desk.info.seed, "replica", *desk.replica, position)
        return _seeds.key_of(desk.info.seed, "stream", epoch, desk.stream, position)

    def without_lost(self, values: Sequence[Any]) -> Sequence[Any]:
        """The keys or items, those that are given up replaced by a `Lost`."""
        if self.again is None or not self.again.lost:
            return values
        kept = list(values)
        for position, error in self.again.lost.items():
            offset = position - self.planned
            if offset < len(kept):  # a stream's last batch may be shorter this time
                kept[offset] = Lost(unpack_error(error), self.key(offset))
        return kept

    def key(self, offset: int) -> Any:
        """What names the item at ``offset``: its key, or its ordinal when it has none."""
        if not self.task.fetches:
            return self.task.place(offset)
        return _as_key(self.values[offset])

    def error(self, stage: Stage, cause: BaseException, index: Any = None) -> TaskError:
        """A TaskError from ``cause``: of the item with key ``index``, or of the batch."""
        cause = _unwrapped(cause)
        task, worker = self.task, self.desk.worker
        which = "the batch" if index is None else f"item {shorten(index)}"
        error = TaskError(
            f"{which} failed in {stage}: {describe_error(cause)} "
            f"(batch {task.seq}, epoch {task.epoch}, worker {worker})",
            index=index,
            indices=self._keys(),
            seq=task.seq,
            epoch=task.epoch,
            worker=worker,
            stage=stage,
        )
        error.__cause__ = cause
        return error

    def _keys(self) -> Sequence[Any]:
        if self.task.fetches:
            return [_as_key(value) for value in self.values]
        size = len(self.values) or self.task.size
        return [self.task.place(offset) for offset in range(size)]


def _as_key(value: Any) -> Any:
    return value.key if isinstance(value, Lost) else value


class _Around(Place):
    """A place while calls of the user's stand there: the seeds, and the item in hand."""

    __slots__ = ("_item", "_page", "_record", "_seeds_globals", "_ticket", "_token")

    def __init__(self, job: Job, position: int, key: int, item: int) -> None:
        desk = job.desk
        Place.__init__(self, desk.info, job.task.epoch, position, key)
        self._page = desk.page
        self._seeds_globals = desk.seeds_globals
        self._ticket = job.ticket
        self._item = item

    def __enter__(self) -> None:
        if self._page is not None:
            self._record = self._page.begin(self._ticket, self._item)
        self._token: Token[Place] = current.set(self)
        if self._seeds_globals:
            _seeds.seed_globals(self._key)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        current.reset(self._token)
        if self._page is not None:
            self._page.end(self._record)


def _unwrapped(error: BaseException) -> BaseException:
    # A coroutine that StopIteration leaves raises RuntimeError from it (PEP 479).
    cause = error.__cause__
    if isinstance(error, RuntimeError) and isinstance(cause, StopIteration):
        return cause
    return error
