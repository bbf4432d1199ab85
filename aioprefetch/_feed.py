"""A plan that is read in the parent: a sampler's keys, or the items of a source.

It is read as far as the window has room and no further: a synchronous iterable in the helper
thread, an asynchronous one on the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ._errors import TaskError, describe_error
from ._messages import NO_STREAM, Task
from ._payload import Payload
from ._plan import Pass, Planned
from ._source import is_async_iterable, start_epoch, was_cancelled
from ._streams import Call, End, Reading
from ._threads import Helper
from ._worker import call_async, call_sync, drive

Pack = Callable[[Sequence[Any]], Payload]
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
        iterable: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        grouped: bool,
        fetches: bool,
        pack: Pack,
        store: Store,
        helper: Helper,
    ) -> None:
        self._pass = pass_
        self._iterable = iterable
        self._size = batch_size or 1
        self._drop_last = drop_last
        self._grouped = grouped
        self._fetches = fetches
        self._pack = pack
        self._store = store
        self._helper = helper
        self.notify: Callable[[], None] = lambda: None
        self._is_async = is_async_iterable(iterable)
        self._reading: Reading | None = None
        self._tasks: deque[Planned] = deque()
        self._room = 0
        self._seq = 0
        self._position = 0
        self._ended = False
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[Planned | None] = deque()
        self._announced = False
        self._reader: asyncio.Task[None] | None = None

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
            await self._close(call_async)
        else:
            await self._helper.call(lambda: drive(self._close(call_sync)))

    async def _close(self, call: Call) -> None:
        if self._reading is not None:
            await self._reading.close(call)

    async def _read(self) -> None:
        try:
            while self._room > 0 and not self._ended:
                await self._read_slice(self._room)
                self._arrive()
        finally:
            self._reader = None

    async def _read_slice(self, room: int) -> None:
        if self._is_async:
            await self._batches(room, call_async)
        else:
            await self._helper.call(lambda: drive(self._batches(room, call_sync)))

    async def _batches(self, room: int, call: Call) -> None:
        """Read up to ``room`` tasks, each handed over before the next is read."""
        while room > 0 and not self._cancelled:
            values, end = await self._batch(call)
            if values and (end is None or not self._drop_last or self._grouped):
                self._hand_over(await self._planned(values))
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
        while self._arrived and not self._ended:
            planned = self._arrived.popleft()
            if planned is None:
                self._ended = True
            else:
                self._tasks.append(planned)
                self._room -= 1
        self.notify()  # which takes them, and may want more

    async def _batch(self, call: Call) -> tuple[Sequence[Any], End | None]:
        """The values of the next task; fewer, and why, at the end."""
        values: list[Any] = []
        try:
            reading = self._reading or await self._open(call)
            while len(values) < self._size:
                taken = await reading.take(call)
                if taken is None:
                    return values, reading.end
                if self._grouped:
                    return list(taken[0]), None
                values.append(taken[0])
        except BaseException as error:  # of set_epoch(), iter(), or of a batch that is no list
            if was_cancelled(error):
                raise
            return values, End(error)
        return values, None

    async def _open(self, call: Call) -> Reading:
        await call(start_epoch, self._iterable, self._pass.epoch)
        self._reading = Reading(self._iterable)
        return self._reading

    async def _planned(self, values: Sequence[Any]) -> Planned:
        task = self._task(len(values))
        self._seq += 1
        self._position += len(values)
        payload = self._pack(values)
        if self._fetches:
            return Planned(task, payload)
        if self._is_async and payload.nbytes >= _MUCH:
            return Planned(task, await self._helper.call(self._store, payload))
        return Planned(task, self._store(payload))

    def _task(self, size: int) -> Task:
        run, epoch, _ = self._pass
        return Task(run, epoch, self._seq, self._position, size, NO_STREAM, self._fetches)

    def _failed(self, cause: BaseException) -> Planned:
        task = self._task(0)
        name = getattr(self._iterable, "__qualname__", type(self._iterable).__qualname__)
        error = TaskError(
            f"reading {name} failed at item {self._position}: {describe_error(cause)} "
            f"(batch {task.seq}, epoch {task.epoch}, this process)",
            index=self._position,
            seq=task.seq,
            epoch=task.epoch,
            stage="iterate",
        )
        error.__cause__ = cause
        self._seq += 1
        return Planned(task, error=error)
