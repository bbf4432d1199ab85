"""What a worker did when, for the timeline: spans around the steps of its work.

Where nobody asked for a timeline none of this is there: the worker's functions are the user's
own. Where somebody did they are wrapped, and what they took travels with the next report.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ._source import is_async_function

Span = tuple[str, float, float, int]  # what, from when until when, and the number of the batch

_batch: contextvars.ContextVar[int] = contextvars.ContextVar("batch", default=-1)
_LEAST_WAIT = 20e-6  # seconds between two tasks of one message are no wait


class Spans:
    """The spans of one worker since its last report.

    Parameters
    ----------
    overlap
        Whether tasks may overlap, so that there is no time between two of them.
    """

    def __init__(self) -> None:
        self.overlap = False
        self._spans: deque[Span] = deque()
        self._ended = time.monotonic()

    def take(self) -> list[Span]:
        """What has come since; any thread, while more comes."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def begin(self, batch: int) -> float:
        """A task begins, and what the worker did before it was to wait."""
        _batch.set(batch)
        now = time.monotonic()
        if not self.overlap and now - self._ended > _LEAST_WAIT:
            self._spans.append(("wait", self._ended, now, -1))
        return now

    def end(self, began: float) -> None:
        """The task has ended."""
        self._ended = time.monotonic()
        self._spans.append(("task", began, self._ended, _batch.get()))

    def _add(self, name: str, began: float) -> None:
        self._spans.append((name, began, time.monotonic(), _batch.get()))

    def around(self, name: str, function: Any) -> Any:
        """The same function, which leaves a span."""
        return (
            self._awaited(name, function)
            if is_async_function(function)
            else self._called(name, function)
        )

    def _called(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def spanned(*args: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*args)
            finally:
                self._add(name, began)

        return spanned

    def _awaited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        async def spanned(*args: Any) -> Any:
            began = time.monotonic()
            try:
                return await function(*args)
            finally:
                self._add(name, began)

        return spanned
