"""What crosses between parent and worker: one record for each thing that is said."""

from __future__ import annotations

from typing import Any, NamedTuple

NO_STREAM = -1

# A pass has a number; its upper half is the number of the tenant whose pass it is: 0 is the
# program that the workers were started with, others have joined a pool that is shared.
_RUNS = 32  # bits
SYNC_CALLS = 1  # the tenant of a shared pool whose tasks are calls of synchronous functions
FIRST_GUEST = 2


def first_run(tenant: int) -> int:
    """The number of a tenant's first pass."""
    return tenant << _RUNS


def tenant_of(run: int) -> int:
    """The tenant whose pass it is."""
    return run >> _RUNS


class Task(NamedTuple):
    """The work for one ``seq``: one batch, or one item when items are not batched.

    Its keys or items travel beside it, as the payload of the message.
    """

    run: int  # the pass; a stream belongs to one
    epoch: int
    seq: int  # place in the order of delivery
    position: int  # of its first item in the plan; in a stream, its ordinal there
    size: int  # items planned
    stream: int = NO_STREAM
    fetches: bool = False  # the payload holds keys to be fetched, not items
    places: tuple[int, ...] | None = None  # of its items, where they do not follow each other

    def place(self, offset: int) -> int:
        """The position of the item at ``offset``."""
        return self.position + offset if self.places is None else self.places[offset]


class Progress(NamedTuple):
    """How far a sequence has been read, and what it takes to get there again."""

    position: int  # ordinal of the next value
    digest: bytes = b""  # of the items before it; empty when they were not digested
    state: Any = None  # the sequence's own, pickled
    items: int | None = None  # that the values before it hold, where they are lists of keys


class Again(NamedTuple):
    """What a worker is told of a task that another has had."""

    lost: dict[int, Any]  # the errors, packed, of items that are given up, by position
    singly: bool  # whether to fetch its items one by one, to find the one at fault
    resume: Progress | None  # where its stream goes on
    alone: bool = False  # whether it may have been what ended that one, with others beside it


# A ticket, a task as a plain tuple, and its keys or items: as a list, where they are plain
# numbers, else as a Parcel whose buffers are the segments that follow the message; then an
# Again, when another worker has had it. Plain tuples, since a message may carry hundreds and
# named ones take three times as long.
Order = tuple[int, tuple[Any, ...], Any] | tuple[int, tuple[Any, ...], Any, Again]


class Do(NamedTuple):
    """Parent to worker: run these, one after another, unless they are withdrawn before."""

    orders: list[Order]


class Settle(NamedTuple):
    """Parent to worker, after its Hello: how the source is read."""

    split: Any
    num_streams: int
    tenant: int = 0


class Join(NamedTuple):
    """Parent to worker: here is the program of one more tenant.

    Its segments follow the message, unless the worker can open them.
    """

    tenant: int
    terms: Any
    shipped: Any  # where they are, or None


class Leave(NamedTuple):
    """Parent to worker: a tenant is gone, and no task of it is held."""

    tenant: int


class Release(NamedTuple):
    """Parent to worker: this pass is over; close its streams."""

    run: int


class Cancel(NamedTuple):
    """Parent to worker: nobody waits for this task; it ends if it can be cancelled."""

    ticket: int


class Trim(NamedTuple):
    """Parent to worker, which has long been idle: give unused memory back."""


class Goodbye(NamedTuple):
    """Parent to worker: finish what is in hand, then end."""


class Hello(NamedTuple):
    """Worker to parent: ready, and what the source turned out to be."""

    facts: Any


class Joined(NamedTuple):
    """Worker to parent: the tenant's program is ready, and what its source turned out to be."""

    tenant: int
    facts: Any


class Refused(NamedTuple):
    """Worker to parent: it cannot start, or a tenant cannot."""

    error: Any  # as `_codec.pack_error` gives it
    doing: str
    tenant: int = 0


# A ticket and what became of its task: an Outcome, or bytes for the commonest of them, the
# pickle of a batch that left nothing out and has no buffers.
Done = tuple[int, Any]


class Report(NamedTuple):
    """Worker to parent: what became of tasks, and which it found withdrawn.

    The segments that follow the message are of the last result.
    """

    done: list[Done]
    declined: list[int]
    seconds: float  # that running them took
    spans: Any = None  # what the worker did when, where that is wanted


class Logged(NamedTuple):
    """Worker to parent: something was logged; the attributes of the record."""

    record: dict[str, Any]


class Made(NamedTuple):
    """A batch was made."""

    skipped: int  # items left out by on_error
    payload: Any = None
    progress: Progress | None = None  # of its stream


class Nothing(NamedTuple):
    """Every item was left out: there is nothing to deliver."""

    skipped: int
    progress: Progress | None = None


class Ended(NamedTuple):
    """The stream had no more to give."""

    stream: int


class Failed(NamedTuple):
    """The task failed; ``ends`` when its stream ended with it."""

    error: Any  # a TaskError, packed while it travels
    ends: bool = False
    skipped: int = 0
    progress: Progress | None = None


class Lost(NamedTuple):
    """Stands in a payload for a key or item that could not be handed over."""

    error: BaseException
    key: Any


Outcome = Made | Nothing | Ended | Failed
