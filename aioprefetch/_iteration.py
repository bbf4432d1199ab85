"""One pass over the data, and the place where a Prefetcher stands between them.

These are the cores of the public handles, with `_session`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import anyio

from ._dispatch import Request
from ._errors import PoolBroken, TaskError, describe_error
from ._messages import Failed, Made, Nothing
from ._window import Window

_BREATH = 0.001  # seconds of ready batches after which other tasks are let run


@dataclass
class Cursor:
    """Where a Prefetcher stands: the epoch of the open or next pass, and its counts."""

    epoch: int = 0
    delivered: int = 0
    skipped: int = 0
    seed: int | None = None  # of the run, where it was drawn
    begun: bool = False  # whether the epoch's pass has begun
    chosen: int | None = None  # the epoch that set_epoch asked for
    reset: bool = False  # whether a source that is read here was told that it is in its place
    spent: bool = False  # whether a source that can be read once has been

    def begin(self) -> int:
        """The epoch of a pass that begins now."""
        if self.chosen is not None:
            self.epoch, self.chosen = self.chosen, None
        elif self.begun:
            self.epoch += 1
        self.begun = True
        self.delivered = self.skipped = 0
        return self.epoch

    def finish(self) -> None:
        self.epoch += 1
        self.begun = False


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

    async def start(self) -> None:
        """Wait for the workers."""

    def begin(self, iteration: Iteration, epoch: int) -> Window:
        """The window of a pass that begins now."""

    def end_pass(self, iteration: Iteration, window: Window) -> None:
        """A pass is over, read to its end or left."""

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
    """One pass: what an iterator does, without the handle.

    Parameters
    ----------
    make_session
        Starts workers for this pass alone, when it is first advanced; None when the
        Prefetcher is open and ``session`` is its.
    """

    def __init__(
        self,
        cursor: Cursor,
        session: Workers | None,
        make_session: Callable[[], Workers] | None,
    ) -> None:
        self.run = -1
        self._cursor = cursor
        self._epoch = cursor.begin()
        self._session = session
        self._make_session = make_session
        self._pid = os.getpid()
        self._window: Window | None = None
        self._over: Reason | None = None
        self._suspended = 0.0  # time.monotonic() when the consumer last was
        self._out_of_breath = False  # whether letting others run was cut short
        if session is not None:
            self._window = session.begin(self, self._epoch)

    async def next(self) -> Any:
        """The next batch.

        Cancelling it loses nothing: a batch leaves the window after the last await.
        """
        window = self._window or await self._open()
        while True:
            if self._out_of_breath or time.monotonic() - self._suspended > _BREATH:
                await self._breathe()
            self._check()
            request = window.pop()
            if request is not None:
                if self._counts(request):
                    return _opened(request)
            elif window.broken is not None:
                raise PoolBroken(str(window.broken)) from window.broken.__cause__
            elif window.finished:
                await self._finish()
                raise StopAsyncIteration
            else:
                await window.changed()
                self._suspended = time.monotonic()

    async def _open(self) -> Window:
        self._check()
        if self._session is None:
            assert self._make_session is not None
            self._session = self._make_session()
        self._check_loop(self._session)
        try:
            await self._session.start()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._over = self._over or "done"
            raise
        self._check()
        if self._window is None:
            self._window = self._session.begin(self, self._epoch)
        return self._window

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

    def _counts(self, request: Request) -> bool:
        """Take an outcome to account; whether there is a batch in it. Raises its error."""
        outcome = request.outcome
        if type(outcome) is Failed:
            self._cursor.skipped += outcome.skipped
            raise outcome.error
        if type(outcome) is Nothing:
            self._cursor.skipped += outcome.skipped
        if type(outcome) is not Made:
            return False
        self._cursor.skipped += outcome.skipped
        self._cursor.delivered += 1
        return True

    async def _finish(self) -> None:
        self._cursor.finish()
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
    """The batch of a request, decoded."""
    outcome = request.outcome
    assert type(outcome) is Made
    try:
        return outcome.payload.open()
    except BaseException as error:  # a __setstate__ of the user's
        task = request.task
        raise TaskError(
            f"the batch came but could not be rebuilt: {describe_error(error)} "
            f"(batch {task.seq}, epoch {task.epoch})",
            indices=request.item_keys(),
            seq=task.seq,
            epoch=task.epoch,
            stage="result",
        ) from error
