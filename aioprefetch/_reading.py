"""One pass over an iterable of the user's, from its start or from where another has been.

It goes on by its own state, where it has `state_dict` and `load_state_dict`, or by being read
again: then it has to repeat itself, which is checked.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from ._codec import plain_dumps
from ._digest import Digest
from ._errors import shorten
from ._messages import Progress
from ._source import is_async_iterable, is_generator_function, log, was_cancelled

Call = Callable[..., Awaitable[Any]]  # calls a function of the user's where it belongs


class End(NamedTuple):
    """Why a reading stopped: the data ended, or ``error`` was raised."""

    error: BaseException | None = None


class Reading:
    """One pass over an iterable, sync or async, that ends once.

    An iterator made here is closed here, and a generator always; any other iterator that the
    user made stays as it is.
    """

    def __init__(self, iterable: Any, state: Any = None) -> None:
        if is_generator_function(iterable):
            iterable = iterable()
        self.is_async = is_async_iterable(iterable)
        if state is not None and _keeps_state(iterable):
            iterable.load_state_dict(state)
        self._iterator = aiter(iterable) if self.is_async else iter(iterable)
        is_generator = inspect.isgenerator(self._iterator) or inspect.isasyncgen(self._iterator)
        self._ours = is_generator or self._iterator is not iterable
        self._keeper = next(filter(_keeps_state, (iterable, self._iterator)), None)
        if state is not None and self._keeper is not None and self._keeper is not iterable:
            self._keeper.load_state_dict(state)
        self.given = 0
        self.end: End | None = None

    @property
    def has_state(self) -> bool:
        """Whether the iterable, or its iterator, says where it is and can be put there again."""
        return self._keeper is not None

    def state(self) -> Any:
        assert self._keeper is not None
        return self._keeper.state_dict()

    async def take(self, call: Call) -> tuple[Any] | None:
        """The next item in a tuple, or None at the end; ``call`` runs a synchronous step."""
        if self.end is not None:
            return None
        taken = await (self._take_async() if self.is_async else call(self.take_sync))
        return taken

    def take_sync(self) -> tuple[Any] | None:
        if self.end is None:
            try:
                item = next(self._iterator)
            except StopIteration:
                self.end = End()
            except BaseException as error:
                self.end = End(error)
            else:
                self.given += 1
                return (item,)
        return None

    async def _take_async(self) -> tuple[Any] | None:
        try:
            item = await anext(self._iterator)
        except StopAsyncIteration:
            self.end = End()
        except BaseException as error:
            if was_cancelled(error):
                raise
            self.end = End(error)
        else:
            self.given += 1
            return (item,)
        return None

    async def close(self, call: Call) -> None:
        """Close the iterator, unless it has ended; what it raises then is logged."""
        if self.end is not None:
            return
        self.end = End()
        if self._ours:
            try:
                if self.is_async:
                    await (_call_if_there(self._iterator, "aclose") or _nothing())
                else:
                    await call(self.close_sync)
            except BaseException as error:
                if was_cancelled(error):
                    raise
                log.warning("closing %s raised", shorten(self._iterator), exc_info=True)

    def close_sync(self) -> None:
        self.end = End()
        _call_if_there(self._iterator, "close")


async def _nothing() -> None:
    """Stands in for an aclose() that is not there."""


def _call_if_there(thing: Any, method: str) -> Awaitable[None] | None:
    call = getattr(thing, method, None)
    return call() if callable(call) else None


def _keeps_state(thing: Any) -> bool:
    """Whether it has both of torchdata's methods."""
    methods = (getattr(thing, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods))


class Sequence:
    """A reading that says how far it is, and can begin where another was.

    Parameters
    ----------
    make
        Gives the iterable; may be the user's function.
    name
        For errors.
    resume
        How far it has been read before.
    rereads
        Whether to read it from its start in any case.
    tells
        Whether to keep account of how far it is.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        *,
        resume: Progress | None = None,
        rereads: bool = False,
        tells: bool = True,
    ) -> None:
        self.end: End | None = None
        self._make = make
        self._name = name
        self._rereads = rereads
        self._reading: Reading | None = None
        self._goal = goal = resume if resume is not None and resume.position else None
        by_state = goal is not None and goal.state is not None
        self.given = goal.position if goal is not None and by_state else 0  # values before it
        self._digest = Digest() if tells else None

    async def take(self, call: Call) -> tuple[Any] | None:
        """The next value in a tuple, or None at the end; ``call`` runs a synchronous step."""
        if self.end is not None:
            return None
        try:
            reading = self._reading or await self._open(call)
            taken = await reading.take(call)
        except BaseException as error:  # of shard(), set_epoch(), load_state_dict() or iter()
            if was_cancelled(error):
                raise
            self.end = End(error)
            return None
        if taken is None:
            self.end = reading.end
        else:
            self.given += 1
            if self._digest is not None:
                self._digest.add(taken[0])
        if self._goal is not None:
            self._check(self._goal)
        return taken if self.end is None else None

    async def progress(self, call: Call) -> Progress | None:
        """How far it is; None when it has not been begun, or its own state fails, which ends it."""
        reading = self._reading
        if reading is None:
            return None
        if not reading.has_state or self._rereads:
            return None if self._digest is None else Progress(self.given, self._digest.value())
        self._digest = None
        try:
            return Progress(self.given, state=plain_dumps(await call(reading.state)))
        except BaseException as error:
            if was_cancelled(error):
                raise
            self.end = self.end or End(error)
            return None

    async def close(self, call: Call) -> None:
        self.end = self.end or End()
        if self._reading is not None:
            await self._reading.close(call)

    async def _open(self, call: Call) -> Reading:
        made, goal = await call(self._make), self._goal
        state = None if goal is None or self._rereads else goal.state
        self._reading = Reading(made, None if state is None else pickle.loads(state))
        if goal is not None and goal.state is not None:
            self._goal = None
            if state is None or not self._reading.has_state:
                raise RuntimeError(
                    f"{self._name} was left with a state of its own, by which it cannot go on "
                    "here: it needs state_dict() and load_state_dict(), and a tail that is not "
                    "'pad'"
                )
        return self._reading

    def _check(self, goal: Progress) -> None:
        """Once it is where it was: have the same values come?"""
        assert self._digest is not None
        if self.given == goal.position and self._digest.value() == goal.digest:
            self._goal = None
        elif self.given >= goal.position or self.end is not None:
            self._goal = None
            self.end = End(
                RuntimeError(
                    f"{self._name} was read again, and its first {goal.position} items were "
                    "others than before: it has to repeat itself, or have state_dict() and "
                    "load_state_dict()"
                )
            )
