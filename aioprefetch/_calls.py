"""Calls of functions on a shared pool: each is a task of its own, ahead of all prefetching.

It is dispatched, timed, run again after a death, and answered as a batch is.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from ._codec import encode
from ._dispatch import Dispatcher
from ._errors import SkipItem, TaskError, TaskTimeout, WorkerDied, describe_error
from ._invoke import CONCURRENCY, CallOf, name_of
from ._lane import Hang, Lane
from ._line import Line, Rules
from ._messages import SYNC_CALLS, Failed, Made, Task, first_run
from ._payload import Live, Payload, encode_value
from ._plan import Planned
from ._request import Request
from ._source import is_async_function
from ._threads import Helper

_PATIENCE = 1.0  # seconds that a call nobody waits for may go on before it costs its worker
_LARGE = 64 * 1024  # bytes that are copied off the loop
_ASYNC_SLACK = 1.0  # seconds after which a worker that should have cancelled a call is blocked


class Call(Request):
    """The future of one call."""

    __slots__ = ("name",)

    def __init__(
        self, run: int, number: int, payload: Payload, name: str, settled: Callable[[Request], None]
    ) -> None:
        super().__init__(Planned(Task(run, 0, number, number, 1), payload), settled)
        self.name = name

    def item_keys(self) -> Sequence[object]:
        return ()

    def key_at(self, position: int) -> object:
        return None

    def complaint(self, index: object, stage: str, what: str) -> str:
        return f"{self.name} failed: {what}"


class Calls:
    """The calls that a pool is asked for.

    Parameters
    ----------
    end
        Kills a worker whose work nobody waits for.
    """

    def __init__(
        self,
        dispatch: Dispatcher,
        keeper: Helper,
        store: Callable[[Payload], Payload],
        end: Callable[[Lane, Hang], None],
        retries: int,
        *,
        in_process: bool,
        frees: bool,
    ) -> None:
        self._frees = frees
        self._in_process = in_process
        rules = Rules("raise", retries, limit="timeout")
        self._lines = Line(rules, urgent=True), Line(rules, urgent=True)
        self._dispatch = dispatch
        self._keeper = keeper
        self._store = store
        self._end = end
        self._numbers = itertools.count()
        self._pickles: WeakKeyDictionary[Callable[..., Any], bytes] = WeakKeyDictionary()
        self._waiting: dict[asyncio.Future[None], Call] = {}  # of those who called
        for is_async, line in enumerate(self._lines):
            hold = CONCURRENCY + 1 if is_async else 2
            dispatch.open(line)
            dispatch.configure(line, hold, 1, is_async=bool(is_async))

    async def run(
        self, function: Callable[..., Any], args: Sequence[Any], timeout: float | None
    ) -> Any:
        """Call a function in a worker, and give what it returns."""
        loop = asyncio.get_running_loop()
        is_async = is_async_function(function)
        run = 0 if is_async else first_run(SYNC_CALLS)
        payload = self._pack(CallOf(function, args, timeout if is_async else None))
        if payload.nbytes > _LARGE:
            payload = await self._keeper.call(self._store, payload)
        done: asyncio.Future[None] = loop.create_future()
        call = Call(run, next(self._numbers), payload, name_of(function), partial(_settled, done))
        call.line = self._lines[is_async]
        if timeout is not None:
            call.timeout = timeout + _ASYNC_SLACK if is_async else timeout
        self._waiting[done] = call
        call.line.meter.ask(1, time.monotonic())
        try:
            self._dispatch.put(call)
            self._dispatch.feed()
            await done
        except asyncio.CancelledError:
            self._cancel(call, loop)
            raise
        finally:
            del self._waiting[done]
        call.line.meter.delivered += 1
        return _result(call)

    def _pack(self, call: CallOf) -> Payload:
        if self._in_process:
            return Live([call])
        known = self._pickled(call.function)
        return encode_value(call._replace(function=known) if known else call, known)

    def _pickled(self, function: Callable[..., Any]) -> bytes:
        """A plain function's pickle, made once; nothing for anything else, which may change."""
        if type(function) is not FunctionType or function.__closure__ is not None:
            return b""
        pickled = self._pickles.get(function)
        if pickled is None:
            (pickled,) = map(bytes, encode(function))
            self._pickles[function] = pickled
        return pickled

    def _cancel(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        lane = self._dispatch.cancel(call)
        if lane is not None and self._frees:
            loop.call_later(_PATIENCE, self._free, call, lane)

    def _free(self, call: Call, lane: Lane) -> None:
        """A call that nobody waits for has had its time to end by itself."""
        if self._dispatch.holds(lane, call):
            self._end(lane, Hang(None, f"was at {call.name}, which was cancelled", wanted=True))

    async def drain(self, timeout: float) -> None:
        """Wait for the calls that have been made."""
        if self._waiting:
            await asyncio.wait(list(self._waiting), timeout=timeout)

    def fail(self, why: str) -> None:
        """Nothing more will be done for those who wait."""
        for done, call in self._waiting.items():
            self._dispatch.cancel(call)
            if call.outcome is None:
                call.outcome = Failed(RuntimeError(f"{call.name} was not done: {why}"))
            _settled(done, call)


def _settled(done: asyncio.Future[None], call: Request) -> None:
    if not done.done():
        done.set_result(None)


def _result(call: Call) -> Any:
    """What the function returned, or raise what it raised."""
    outcome = call.outcome
    if type(outcome) is Made:
        return outcome.payload.open()
    if type(outcome) is not Failed:
        raise SkipItem(f"raised by {call.name}")
    try:
        raise _as_raised(outcome.error, call)
    finally:  # the error knows this frame: it must not lead from there to itself
        call.outcome = None
        del call, outcome


def _as_raised(error: BaseException, call: Call) -> BaseException:
    """The function's own exception where there is one that may be raised here."""
    if not isinstance(error, TaskError) or isinstance(error, (WorkerDied, TaskTimeout)):
        return error
    cause = error.__cause__
    if isinstance(cause, Exception):
        return cause
    what = "it ended" if cause is None else describe_error(cause)  # SystemExit, say
    other = TaskError(f"{call.name} failed: {what}", worker=error.worker, stage=error.stage)
    other.__cause__ = cause
    return other
