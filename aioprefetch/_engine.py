"""What the rest needs of workers, whoever runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from ._errors import PoolBroken
from ._payload import Payload
from ._request import Request
from ._source import Facts, Split
from ._threads import Helper


class Pool(Protocol):
    """What a window needs of workers; every engine offers it."""

    @property
    def first_run(self) -> int:
        """The number of the first pass; later ones follow."""

    @property
    def memory(self) -> int:
        """Bytes of memory that this process may have, known once it is started."""

    @property
    def broken(self) -> PoolBroken | None:
        """Set for good once workers that die are not replaced any more."""

    async def start(self) -> Facts | None:
        """Bring the workers up; gives the facts of a source that a function made there."""

    @property
    def worth(self) -> int:
        """Requests that make a message worth sending."""

    @property
    def busy(self) -> bool:
        """Whether a request is unsettled."""

    def settle(
        self, split: Split | None, num_streams: int, hold: int, window: int, *, is_async: bool
    ) -> None:
        """Tell the workers how the source is read.

        Each holds ``hold`` tasks at most, or chunks of them, and ``window`` are out at most;
        they overlap in a worker where any function is async.
        """

    def pack(self, values: Sequence[Any]) -> Payload:
        """Keys or items as they travel; any thread."""

    def store(self, payload: Payload) -> Payload:
        """Items where all workers find them; any thread, which may take its time."""

    def submit(self, request: Request) -> None:
        """Queue a request; it is settled, whatever happens, unless the pool is closed."""

    def feed(self) -> None:
        """Requests have been queued: send what there is room for."""

    def forget(self, run: int) -> None:
        """A pass is over: drop what of it is not started, close its streams."""

    def helper(self) -> Helper:
        """The thread that reads synchronous samplers and sources in this process."""

    def close(self) -> asyncio.Future[None]:
        """End the workers; done within the shutdown time-out."""

    def release(self) -> None:
        """Closed, and nothing will be read in its helper any more: let its threads go."""

    def kill(self) -> None:
        """End the workers now; any thread."""

    def abandon(self) -> None:
        """As a finalizer may: nobody waits, any thread, any lock."""
