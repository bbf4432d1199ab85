"""A plain ``for`` over a Prefetcher, for code that has no event loop.

    your thread                        a thread for the block

    for batch in batches:              an event loop: the Prefetcher and all that it does
        next() ── anext() ───────────►   the window is filled while your code runs
               ◄────────── batch ─────

Every ``next`` is an ``anext`` on that loop; there is no more to it.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from ._iterators import PrefetchIterator
from ._prefetcher import Prefetcher


@contextmanager
def blocking(prefetcher: Prefetcher) -> Iterator[Batches]:
    """Iterate a Prefetcher with a plain ``for``, in code that has no event loop.

    ``with blocking(p) as batches:`` opens it on an event loop in a thread of its own, and closes
    both at the end of the block: its workers live until then. Each ``for batch in batches`` is
    one epoch; a ``break`` ends it as it does under ``async for``. In between, ``p.set_epoch()``
    and everything else of the Prefetcher that needs no ``await`` may be called.

    A batch costs two changes of threads more than in ``async for``, about 0.2 ms.

    Parameters
    ----------
    prefetcher
        One that is not open.

    Raises
    ------
    RuntimeError
        An event loop runs in this thread, which this would block; or the Prefetcher is open.
    SerializationError, WorkerStartError
        The workers did not come up.
    """
    _refuse_to_block_a_loop()
    if prefetcher._session is not None:
        raise RuntimeError("the Prefetcher is open already: close it first, or make another")
    uvloop = importlib.util.find_spec("uvloop") is not None
    with (
        start_blocking_portal("asyncio", {"use_uvloop": uvloop}) as portal,
        portal.wrap_async_context_manager(prefetcher),
    ):
        yield Batches(prefetcher, portal)


class Batches:
    """The batches of an open Prefetcher: each ``for`` over it is one epoch."""

    def __init__(self, prefetcher: Prefetcher, portal: BlockingPortal) -> None:
        self._prefetcher = prefetcher
        self._portal = portal

    def __iter__(self) -> Pass:
        return Pass(_call(self._portal, aiter, self._prefetcher), self._portal)

    def __len__(self) -> int:
        """Batches in an epoch. Raises TypeError when that is not known."""
        return len(self._prefetcher)


class Pass(Iterator[Any]):
    """One epoch, for one thread at a time. It ends when it is dropped."""

    def __init__(self, iterator: PrefetchIterator, portal: BlockingPortal) -> None:
        self._iterator = iterator
        self._portal = portal
        self._lock = asyncio.Lock()
        self._fetched: tuple[Any] | Exception | None = None

    def __next__(self) -> Any:
        _call(self._portal, self._fetch)
        fetched, self._fetched = self._fetched, None
        try:
            if isinstance(fetched, StopAsyncIteration):
                raise StopIteration
            if isinstance(fetched, Exception):
                raise fetched
            assert fetched is not None
            return fetched[0]
        finally:
            del fetched  # an error knows this frame, and the two would keep each other

    async def _fetch(self) -> None:
        # ^C may come at any point of the call above and leaves this behind, on its way or done:
        # what it fetches stays here, for the next call.
        async with self._lock:
            if self._fetched is None:
                try:
                    self._fetched = (await anext(self._iterator),)
                except Exception as error:
                    self._fetched = error


def _call(portal: BlockingPortal, function: Callable[..., Any], *args: Any) -> Any:
    try:
        asked = portal.start_task_soon(function, *args)
    except RuntimeError:
        raise RuntimeError(
            "the block of `with blocking(...)` has ended, and its workers with it"
        ) from None
    return asked.result()


def _refuse_to_block_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "an event loop runs in this thread, and blocking() would hold it up: use `async with` "
        "and `async for`"
    )
