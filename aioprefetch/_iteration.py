"""One iteration, over one epoch or several: what an iterator does, without the handle.

With `_cursor` and `_session` the core of the public handles.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Protocol

import anyio

from ._cursor import Cursor
from ._errors import PoolBroken, TaskError, describe_error
from ._messages import Failed, Made
from ._meter import Meter
from ._record import Record
from ._request import Request
from ._window import Window

_BREATH = 0.001  # seconds of ready batches after which other tasks are let run


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait for ``future`` through every cancellation, then let the cancellation through.

    For waits that end by themselves within a deadline.
    """
    cancelled: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    future.result()


class Workers(Protocol):
    """What a pass needs of the session that it is part of."""

    loop: asyncio.AbstractEventLoop
    meter: Meter

    async def start(self) -> None:
        """Wait for the workers."""

    def begin(self, iteration: Iteration, record: Record) -> Window:
        """The window of an iteration that begins now."""

    def turned(self, run: int) -> None:
        """The iteration goes on to the next epoch."""

    def end_pass(self, iteration: Iteration, window: Window) -> None:
        """An iteration is over, read to its end or left."""

    def close(self) -> asyncio.Future[None]:
        """Begin to close."""

    def kill(self) -> None:
        """End the workers now; any thread."""

    def abandon(self) -> None:
        """As a finalizer may: nobody will close this."""


Reason = Literal["done", "aclosed", "superseded", "closed", "killed", "abandoned"]

_STOPPED: dict[Reason, str] = {
    "superseded": "another iteration of this Prefetcher has begun, and it has one at a time: for "
    "two passes at once make two Prefetchers",
    "closed": "the Prefetcher was closed while it was being iterated",
    "killed": "the Prefetcher was killed while it was being iterated",
    "abandoned": "the Prefetcher was dropped while it was being iterated",
}


class Iteration:
    """One iteration.

    Parameters
    ----------
    epochs
        How many epochs it runs over; None for ever.
    make_session
        Starts workers for this iteration alone, when it is first advanced; None when the
        Prefetcher is open and ``session`` is its.
    """

    def __init__(
        self,
        cursor: Cursor,
        epochs: int | None,
        session: Workers | None,
        make_session: Callable[[], Workers] | None,
    ) -> None:
        self.quota: int | None = None  # batches an epoch, where nothing else ends it
        self._cursor = cursor
        self._record = cursor.begin()
        self._drawn = self._record.epoch  # the last epoch whose plan has been begun
        self._until = None
        if epochs is not None:
            self._until = max(cursor.first_epoch + epochs, self._record.epoch + 1)
        self._before = 0  # batches of the epochs before, in this iteration
        self._session = session
        self._make_session = make_session
        self._pid = os.getpid()
        self._window: Window | None = None
        self._meter = Meter()
        self._over: Reason | None = None
        self._suspended = 0.0  # time.monotonic() when the consumer last was
        self._asked = 0.0  # when the consumer last did, by the same clock
        self._left = 0.0  # when it last was handed a batch that is timed
        self._out_of_breath = False  # whether letting others run was cut short
        if session is not None:
            try:
                self._begin(session)
            except BaseException:  # a state that does not fit
                cursor.undo(self._record)
                raise

    def _begin(self, session: Workers) -> Window:
        self._meter = session.meter
        window = self._window = session.begin(self, self._record)
        self._left = time.monotonic()
        return window

    def next_record(self) -> Record | None:
        """Of the epoch after those whose plans have been begun; None when there is none."""
        epoch = self._drawn + 1
        if self._until is not None and epoch >= self._until:
            return None
        self._drawn = epoch
        return self._cursor.record_of(epoch)

    def quota_left(self, record: Record) -> int | None:
        """Batches that are still to come where each epoch has a quota."""
        if self.quota is None or self._until is None:
            return None
        return max(0, self.quota * (self._until - record.epoch) - record.settled)

    async def next(self) -> Any:
        """The next batch.

        Cancelling it loses nothing: a batch leaves the window after the last await.
        """
        request = await self._advance()
        is_timed = request.task.seq % self._meter.stride == 0
        return self._timed(request) if is_timed else _opened(request)

    async def next_numbered(self) -> tuple[int, Any]:
        """The next batch, with its number."""
        request = await self._advance(keeps=True)
        return self._number(request), self._timed(request)

    def _timed(self, request: Request) -> Any:
        """The batch of a request; the meter is told what that took."""
        came = time.monotonic()
        batch = _opened(request)
        self._left = self._meter.hand_over(self._asked, came)
        return batch

    async def _advance(self, *, keeps: bool = False) -> Request:
        """The next request that a batch was made of, as it leaves the window."""
        window = self._window or await self._open()
        meter = self._meter
        while True:
            now = self._asked = time.monotonic()
            if meter.trace is not None:
                meter.trace.consumed(self._left, now)
                self._left = now
            if self._out_of_breath or now - self._suspended > _BREATH:
                await self._breathe()
            self._check()
            request = window.pop()
            if request is not None:
                try:
                    if self._counts(request, keeps):
                        meter.delivered += 1
                        return request
                finally:
                    del request
            elif window.broken is not None:
                raise PoolBroken(str(window.broken)) from window.broken.__cause__
            elif not window.finished:
                meter.begin_wait(now)
                try:
                    await window.changed()
                finally:
                    self._suspended = self._left = meter.end_wait(now)
            elif self._until is None and not self._record.told:
                await self._finish()
                raise RuntimeError(
                    f"epoch {self._record.epoch} gave no batch, and with epochs=None the "
                    "iteration would never end"
                )
            elif not self._turn(window):
                await self._finish()
                raise StopAsyncIteration

    def _turn(self, window: Window) -> bool:
        """This epoch is delivered: go on to the next, if there is one."""
        finished = window.plan
        if not window.turn():
            return False
        assert self._session is not None
        self._session.turned(finished.run)
        self._before += finished.seq
        self._go_on(window.plan.record)
        return True

    def _go_on(self, record: Record) -> None:
        self._record = record
        self._cursor.turn(record)

    def _number(self, request: Request) -> int:
        return self._before + request.task.seq

    async def _open(self) -> Window:
        self._check()
        if self._session is None:
            assert self._make_session is not None
            self._session = self._make_session()
        self._check_loop(self._session)
        try:
            await self._session.start()
            self._check()
            window = self._window or self._begin(self._session)
        except asyncio.CancelledError:
            raise
        except BaseException:
            if self._over is None:
                self._cursor.undo(self._record)
                self._over = "done"
                await self._end_session()
            raise
        return window

    async def _breathe(self) -> None:
        # Never twice in a row without having got through: a time-out that is always shorter
        # than a turn of the loop must not keep the consumer from what is ready.
        if self._out_of_breath:
            self._out_of_breath = False
            return
        self._out_of_breath = True
        await asyncio.sleep(0)
        self._out_of_breath = False
        self._suspended = time.monotonic()
        self._asked = self._suspended  # others had the loop

    def _check(self) -> None:
        if self._over in ("done", "aclosed"):
            raise StopAsyncIteration
        if self._over is not None:
            raise RuntimeError(_STOPPED[self._over])
        if self._session is not None:
            self._check_loop(self._session)

    def _check_loop(self, session: Workers) -> None:
        if session.loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "a Prefetcher belongs to the event loop that started it until it is closed"
            )

    def _counts(self, request: Request, keeps: bool) -> bool:
        """Take an outcome to account; whether there is a batch in it. Raises its error."""
        outcome, record = request.outcome, self._record
        if self.quota is not None and record.settled >= self.quota:
            record = self._begin_quota(record)
        made = type(outcome) is Made
        if keeps and made:
            self._cursor.hand(self._number(request), record.handed(request.planned))
        assert outcome is not None
        record.settle(request.planned, outcome)
        if type(outcome) is Failed:
            try:
                raise outcome.error
            finally:  # an error knows this frame: it must not lead from there to itself
                del request, outcome
        return made

    def _begin_quota(self, record: Record) -> Record:
        """Replicas run on, and an epoch of them is a number of batches."""
        record = self._cursor.record_of(record.epoch + 1)
        record.exact = False
        self._go_on(record)
        return record

    async def _finish(self) -> None:
        self.stop("done")
        await self._end_session()

    async def _end_session(self) -> None:
        if self._session is not None and self._make_session is not None:
            closing = self._session.close()
            self._session = None
            await outlast(closing)

    def stop(self, reason: Reason) -> None:
        """No more batches; whoever waits is told why."""
        if self._over is None:
            self._over = reason
            self._cursor.leave(self._record, finished=reason == "done")
            window, self._window = self._window, None
            if self._session is not None and window is not None:
                self._session.end_pass(self, window)
            if self._make_session is None:
                self._session = None  # it is the Prefetcher's, and may be closed and dropped

    def supersede(self) -> None:
        """Another pass begins; the workers of this one alone are ended with it."""
        self.stop("superseded")
        if self._session is not None and self._make_session is not None:
            self._session.close()

    async def aclose(self) -> None:
        """The iterator's own end."""
        self.stop("aclosed")
        await self._end_session()

    async def close_from_outside(self) -> None:
        """The Prefetcher is closed under a pass that has workers of its own."""
        self.stop("closed")
        await self._end_session()

    def kill(self) -> None:
        """The same, at once; any thread."""
        if self._session is not None:
            self._session.kill()

    @property
    def over(self) -> bool:
        return self._over is not None

    def abandon(self) -> None:
        """As a finalizer may: the iterator was dropped."""
        session = self._session
        if self._over is not None or session is None or os.getpid() != self._pid:
            return
        if self._make_session is not None:
            session.abandon()
        with suppress(RuntimeError):
            session.loop.call_soon_threadsafe(self.stop, "abandoned")


def _opened(request: Request) -> Any:
    """The batch of a request, decoded, or transferred where that is done with it."""
    outcome = request.outcome
    assert type(outcome) is Made
    try:
        return outcome.payload.open() if request.ready is None else request.ready.result()
    except BaseException as error:  # a __setstate__ of the user's, or transfer
        task, transferred = request.task, request.ready is not None
        request.ready = None  # which has the error, and the error this frame
        what = "transfer failed" if transferred else "it could not be rebuilt"
        raise TaskError(
            f"the batch came but {what}: {describe_error(error)} "
            f"(batch {task.seq}, epoch {task.epoch})",
            indices=request.item_keys(),
            seq=task.seq,
            epoch=task.epoch,
            stage="transfer" if transferred else "result",
        ) from error
