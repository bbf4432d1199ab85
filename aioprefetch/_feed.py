"""A plan that is read in the parent: a sampler's keys, or the items of a source.

It is read as far as the window has room and no further: a synchronous iterable in the helper
thread, an asynchronous one on the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Values
from contextlib import suppress
from typing import Any, NamedTuple

from ._errors import TaskError, describe_error
from ._messages import NO_STREAM, Progress, Task
from ._meter import Meter
from ._payload import Payload
from ._plan import Pass, Planned
from ._program import call_async, call_sync, drive
from ._reading import Call, End, Sequence
from ._record import Record
from ._source import is_async_iterable, start_epoch
from ._threads import Helper

Pack = Callable[[Values[Any]], Payload]
Store = Callable[[Payload], Payload]

_MUCH = 1 << 18  # bytes whose copying is not for the loop


class Feed:
    """Tasks from an iterable of this process.

    Parameters
    ----------
    iterable
        A source, a sampler or a batch sampler.
    batch_size
        Values a task; None for a task of one, whatever it is.
    grouped
        Whether each value is the list of keys of a whole batch.
    fetches
        Whether the values are keys, that workers fetch, or items.
    pack
        Makes the payload of a task, in the thread that reads.
    store
        Puts the items in it where workers find them.

    Attributes
    ----------
    notify
        Called on the loop when tasks have come, or the end.
    """

    def __init__(
        self,
        pass_: Pass,
        record: Record,
        iterable: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        grouped: bool,
        fetches: bool,
        pack: Pack,
        store: Store,
        helper: Helper,
        meter: Meter,
    ) -> None:
        self.record = record
        self.seq = record.settled
        self._pass = pass_
        self._iterable = iterable
        self._size = batch_size or 1
        self._drop_last = drop_last
        self._grouped = grouped
        self._fetches = fetches
        self._pack = pack
        self._store = store
        self._helper = helper
        self._meter = meter
        self._spells: deque[tuple[float, float]] = deque()  # of reading, not told to the meter
        self.notify: Callable[[], None] = lambda: None
        self._is_async = is_async_iterable(iterable)
        self._values = _OwnValues(self._begin, _name(iterable), record, grouped=grouped)
        self._ordinal = record.whole.delivered.begun
        self._tasks: deque[Planned] = deque()
        self._room = 0
        self._ended = False
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[Planned | None] = deque()
        self._announced = False
        self._reader: asyncio.Task[None] | None = None

    @property
    def run(self) -> int:
        return self._pass.run

    @property
    def exhausted(self) -> bool:
        return self._ended and not self._tasks

    def take(self) -> Planned | None:
        return self._tasks.popleft() if self._tasks else None

    def want(self, room: int) -> None:
        self._room = room
        if self._reader is None and not self._ended:
            self._reader = self._loop.create_task(self._read())

    def left(self, task: Task) -> None:
        """Nothing depends on it."""

    def ended(self, stream: int) -> None:
        raise RuntimeError(f"a plan without streams was told that stream {stream} ended")

    def cancel(self) -> None:
        """Read no more; on the loop."""
        self._cancelled = self._ended = True
        self._tasks.clear()
        if self._reader is not None:
            self._reader.cancel()

    async def close(self) -> None:
        """Read no more, and close what was read."""
        self.cancel()
        if self._reader is not None:
            await asyncio.wait([self._reader])
        if self._is_async:
            await self._values.close(call_async)
        else:
            await self._helper.call(lambda: drive(self._values.close(call_sync)))

    async def _read(self) -> None:
        try:
            while self._room > 0 and not self._ended:
                await self._read_slice(self._room)
                self._arrive()
        finally:
            self._reader = None

    def _tell_time(self) -> None:
        """Tell the meter how long has been read."""
        while self._spells:
            self._meter.reading(*self._spells.popleft())

    async def _read_slice(self, room: int) -> None:
        if self._is_async:
            await self._batches(room, call_async)
        else:
            await self._helper.call(lambda: drive(self._batches(room, call_sync)))

    def _begin(self) -> Any:
        start_epoch(self._iterable, self._pass.epoch)
        return self._iterable

    async def _batches(self, room: int, call: Call) -> None:
        """Read up to ``room`` tasks, each handed over before the next is read."""
        while room > 0 and not self._cancelled:
            began = time.monotonic()
            values, end = await self._batch(call)
            planned = None
            if values and (end is None or not self._drop_last or self._grouped):
                planned = await self._planned(values, call)
            self._spells.append((began, time.monotonic()))
            if planned is not None:
                self._hand_over(planned)
                room -= 1
            if end is not None:
                if end.error is not None:
                    self._hand_over(self._failed(end.error))
                self._hand_over(None)
                return

    def _hand_over(self, planned: Planned | None) -> None:
        """A task, or None for the end, for the loop; from the thread that reads."""
        self._arrived.append(planned)
        if not self._announced:
            self._announced = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._arrive)

    def _arrive(self) -> None:
        # The end comes by the way of the tasks: seen before the last of them it would lose them.
        self._announced = False
        self._tell_time()
        while self._arrived and not self._ended:
            planned = self._arrived.popleft()
            if planned is None:
                self._ended = True
            else:
                self._tasks.append(planned)
                self._room -= 1
        self.notify()  # which takes them, and may want more

    async def _batch(self, call: Call) -> tuple[list[_Value], End | None]:
        """The values of the next task; fewer, and why, at the end."""
        values: list[_Value] = []
        while len(values) < self._size:
            value = await self._values.take(call)
            if value is None:
                return values, self._values.end
            values.append(value)
        return values, None

    async def _planned(self, taken: list[_Value], call: Call) -> Planned:
        first, last = taken[0], taken[-1]
        values: Values[Any] = [value.value for value in taken]
        places = [value.position for value in taken]
        size = len(values)
        if self._grouped:
            try:
                values = list(first.value)
            except BaseException as error:
                return self._failed(error)
            size = len(values)
        elif places[-1] - places[0] < size:
            places = []
        run, epoch, _ = self._pass
        apart = tuple(places) if places and not self._grouped else None
        task = Task(run, epoch, self.seq, first.position, size, NO_STREAM, self._fetches, apart)
        span = self._ordinal, last.ordinal + 1
        self.seq, self._ordinal = self.seq + 1, span[1]
        progress = await self._values.progress(call)
        payload = self._pack(values)
        if not self._fetches:
            if self._is_async and payload.nbytes >= _MUCH:
                payload = await self._helper.call(self._store, payload)
            else:
                payload = self._store(payload)
        return Planned(task, payload, span=span, progress=progress)

    def _failed(self, cause: BaseException) -> Planned:
        run, epoch, _ = self._pass
        position = self._values.position
        task = Task(run, epoch, self.seq, position, 0, NO_STREAM, self._fetches)
        error = TaskError(
            f"reading {_name(self._iterable)} failed at item {position}: {describe_error(cause)} "
            f"(batch {task.seq}, epoch {task.epoch}, this process)",
            index=position,
            seq=task.seq,
            epoch=task.epoch,
            stage="iterate",
        )
        error.__cause__ = cause
        self.seq += 1
        return Planned(task, error=error)


def _name(iterable: Any) -> str:
    name: str = getattr(iterable, "__qualname__", type(iterable).__qualname__)
    return name


class _Value(NamedTuple):
    """What was read, and its place."""

    value: Any
    ordinal: int  # among this host's
    position: int  # of its first item in the plan


class _OwnValues:
    """This host's share of what is read, but for what has been delivered of it."""

    def __init__(
        self, begin: Callable[[], Any], name: str, record: Record, *, grouped: bool
    ) -> None:
        resume = record.whole.progress
        self._share = record.share
        pads = self._share.tail == "pad"
        self._sequence = Sequence(begin, name, resume=resume, rereads=pads)
        self._delivered = record.whole.delivered
        self._grouped = grouped
        by_state = resume is not None and resume.state is not None and not pads
        self._items = (resume.items or 0) if by_state and resume is not None else 0
        self._head: list[Any] = []  # of all values, to fill the last round with
        self._padded = False

    @property
    def end(self) -> End | None:
        return self._sequence.end

    @property
    def position(self) -> int:
        """Of the next item of all."""
        return self._items if self._grouped else self._sequence.given

    async def take(self, call: Call) -> _Value | None:
        """The next of this host's; None at the end."""
        rank, world_size, tail = self._share
        while True:
            position = self.position
            taken = await self._sequence.take(call)
            if taken is None:
                return self._padding()
            ordinal, owner = divmod(self._sequence.given - 1, world_size)
            if self._grouped:
                self._items += _length(taken[0])
            if tail == "pad" and len(self._head) < world_size:
                self._head.append(taken[0])
            if owner != rank or self._delivered.was_loaded(ordinal):
                continue
            if tail == "drop" and not await self._round_is_whole(call):
                return None
            return _Value(taken[0], ordinal, position)

    async def progress(self, call: Call) -> Progress | None:
        """How far all that was taken has been read."""
        progress = await self._sequence.progress(call)
        if progress is None or not self._grouped:
            return progress
        return progress._replace(items=self._items)

    async def close(self, call: Call) -> None:
        await self._sequence.close(call)

    async def _round_is_whole(self, call: Call) -> bool:
        """Read on to the end of the round, each host having its value of it."""
        while self._sequence.given % self._share.world_size:
            taken = await self._sequence.take(call)
            if taken is None:
                return False
            if self._grouped:
                self._items += _length(taken[0])
        return True

    def _padding(self) -> _Value | None:
        """At the end: the first values again, to fill the round."""
        rank, world_size, tail = self._share
        given, end = self._sequence.given, self._sequence.end
        ordinal, filled = divmod(given, world_size)
        if tail != "pad" or self._padded or not 0 < filled <= rank or end != End():
            return None
        self._padded = True
        if self._delivered.was_loaded(ordinal):
            return None
        value = self._head[(ordinal * world_size + rank) % given]
        position = self._items if self._grouped else ordinal * world_size + rank
        return _Value(value, ordinal, position)


def _length(keys: Any) -> int:
    try:
        return len(keys)
    except TypeError:  # it is found out to be no list where it is used
        return 0
