"""The public handle of a pool that a whole program shares, whatever its workers are."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, overload

from ._config import Staff, check_number, check_seconds
from ._guests import Guest
from ._iteration import outlast
from ._lane import Kind
from ._line import Rules
from ._meter import Meter
from ._program import Program, Terms
from ._service import Service
from ._stats import Stats

T = TypeVar("T")


class SharedPool:
    """What every pool has that calls and any number of Prefetchers share."""

    def __init__(self, staff: Staff, retries: int, shutdown_timeout: float) -> None:
        check_number("retries", retries, 0)
        check_seconds("shutdown_timeout", shutdown_timeout)
        self._staff = staff
        self._retries = retries
        self._shutdown_timeout = shutdown_timeout
        self._core: Service | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def _kind(self, loop: asyncio.AbstractEventLoop) -> Kind:
        """Where its workers come from."""
        raise NotImplementedError

    _in_process = False  # whether they are in this process
    _ends_calls = True  # whether one that takes too long can be ended
    _reads_streams = True  # whether each is the same worker from one task to the next

    @property
    def num_proc(self) -> int:
        """Worker processes."""
        return self._staff.num_proc

    # Opening and closing

    async def start(self) -> None:
        """Start the workers; does nothing when they are up.

        Raises
        ------
        WorkerStartError
            A worker did not come up.
        SerializationError
            ``worker_init_fn`` cannot be pickled.
        """
        if self._core is None:
            kind = self._kind(asyncio.get_running_loop())
            core = self._core = Service(self._staff, kind, self._retries, self._shutdown_timeout)
            self._finalizer = weakref.finalize(self, core.abandon)
            self._finalizer.atexit = False
        core = self._core
        core.check_loop()
        try:
            await core.start()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._forget(core)
            raise

    async def aclose(self) -> None:
        """Wait for the calls that have been made, then end the workers.

        What Prefetchers have not done is dropped. It ends within ``shutdown_timeout``, and can be
        opened again.
        """
        core = self._core
        if core is not None:
            core.check_loop()
            try:
                await outlast(core.close())
            finally:
                self._forget(core)

    def kill(self) -> None:
        """End the workers now; any thread. Calls that wait raise RuntimeError."""
        core = self._core
        if core is not None:
            core.kill()
            self._forget(core)

    def _forget(self, core: Service) -> None:
        if self._core is core:
            self._core = None
            if self._finalizer is not None:
                self._finalizer.detach()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to the process that opened it and cannot be sent "
            "to another: open one there"
        )

    # Work

    @overload
    async def run(
        self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any, timeout: float | None = None
    ) -> T: ...
    @overload
    async def run(self, fn: Callable[..., T], *args: Any, timeout: float | None = None) -> T: ...
    async def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """Call ``fn(*args)`` in a worker and give what it returns.

        Cancelling it frees the worker: a call that has not begun is dropped, an async function
        is cancelled there, and one that goes on for a second more is ended with its worker.

        Parameters
        ----------
        fn
            A function, sync or async, that can be pickled (cloudpickle's rules). Keyword
            arguments go with `functools.partial`.
        args
            Its arguments; large arrays travel through shared memory.
        timeout
            Seconds that it may run, from when it begins in the worker.

        Raises
        ------
        Exception
            Whatever ``fn`` raised, of its own type, with the remote traceback as its cause.
        SerializationError
            The function, an argument or the result cannot be pickled.
        WorkerDied
            The worker ended during the call, once more than ``retries``.
        TaskTimeout
            It took longer than ``timeout``; the worker is freed.
        PoolBroken
            Workers do not come up any more.
        RuntimeError
            The pool is not open, or was closed meanwhile.
        """
        if not callable(fn):
            raise TypeError(f"fn must be a function, not {fn!r}")
        if timeout is not None:
            check_seconds("timeout", timeout, positive=True)
            if not self._ends_calls:
                raise ValueError(
                    f"a {type(self).__name__} cannot end a call, so it has no timeout: put "
                    "asyncio.timeout() around the call"
                )
        return await self._opened().calls.run(fn, args, timeout)

    def stats(self) -> Stats:
        """What its calls and Prefetchers came to since it was opened; any thread.

        Consumers are those of Prefetchers, and their times are added up.
        """
        core = self._core
        return Stats() if core is None else core.stats()

    def _admit(
        self, program: Program, terms: Terms, rules: Rules, shutdown_timeout: float, meter: Meter
    ) -> Guest:
        """A place for a Prefetcher."""
        return self._opened().supervisor.admit(program, terms, rules, shutdown_timeout, meter)

    def _opened(self) -> Service:
        core = self._core
        if core is None or not core.up:
            raise RuntimeError(
                "the pool is not open: use `async with pool:`, or await its start(), before work "
                "is given to it"
            )
        core.check_open()
        return core
