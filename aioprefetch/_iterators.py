"""The public handles of an iteration."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic

from ._iteration import Iteration

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch = TypeVar("Batch", default=Any)
else:
    from typing import TypeVar

    Batch = TypeVar("Batch")


class PrefetchIterator(Generic[Batch]):
    """One epoch of a Prefetcher; made by iterating it.

    Several tasks may share one: each batch goes to exactly one of them.
    """

    def __init__(self, prefetcher: object, iteration: Iteration) -> None:
        self._prefetcher = prefetcher  # alive as long as it is iterated
        self._iteration = iteration
        finalizer = weakref.finalize(self, iteration.abandon)
        finalizer.atexit = False

    def __aiter__(self) -> PrefetchIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        """The next batch. Cancelling it, by a time-out too, loses nothing.

        Raises
        ------
        TaskError
            This batch failed; the next call goes on.
        PoolBroken
            No worker is left.
        RuntimeError
            The Prefetcher was closed, or another iteration of it has begun.
        SerializationError, WorkerStartError
            The workers, started by the first call where the Prefetcher is not open, did not
            come up.
        """
        batch: Batch = await self._iteration.next()
        return batch

    async def aclose(self) -> None:
        """End this iteration; from then on it has ended."""
        await self._iteration.aclose()

    async def __aenter__(self) -> PrefetchIterator[Batch]:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class NumberedIterator(PrefetchIterator[tuple[int, Batch]]):
    """The same with numbers; made by `Prefetcher.numbered`."""

    def __aiter__(self) -> NumberedIterator[Batch]:
        return self

    async def __anext__(self) -> tuple[int, Batch]:
        """The number of the next batch, and the batch; as `PrefetchIterator` gives it."""
        return await self._iteration.next_numbered()
