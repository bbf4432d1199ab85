"""The head of a worker's memory: what it is at work on, and which waiting tasks are whose."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from typing import NamedTuple

_RECORD = struct.Struct("<QdQ")
_TICKET = struct.Struct("<Q")
_TICKET_AT = _RECORD.size - _TICKET.size

_NO_RECORD = -1

# Positions of what is not an item: a call for a whole batch, one that fetches a whole batch,
# and, added to its ordinal, the reading of an item from a stream.
BATCH = 2**64 - 1
GROUP = 2**64 - 2
READING = 2**63

CLAIMS = 4096  # more tickets than a worker can have waiting


class InHand(NamedTuple):
    """An item that a worker is at work on."""

    position: int  # of the item in its plan or stream, or one of the above
    since: float  # time.monotonic() of the worker, the machine's own
    ticket: int  # of its task


class Page:
    """What a worker has in hand, and which of the tasks that wait it may still begin.

    The worker alone writes the records, one for each item it may run at once; the parent
    reads them, and believes them once the worker is dead. A ticket is written last and
    cleared first, so that no record is half of another.

    A waiting task is claimed by whoever writes its byte first: each side writes its own and
    then reads the other's. Both may see both, and then the worker gives way and says so; never
    does neither see the other.
    """

    def __init__(self, memory: mmap.mmap, records: int) -> None:
        self._memory = memory
        self._records = records
        self._free = list(range(records))
        self._begun = records * _RECORD.size
        self._withdrawn = self._begun + CLAIMS
        self._shut = self._withdrawn + CLAIMS
        self._fence = threading.Lock()

    @staticmethod
    def nbytes(records: int) -> int:
        size = records * _RECORD.size + 2 * CLAIMS + 1
        return size + -size % mmap.PAGESIZE

    def begin(self, ticket: int, position: int) -> int:
        """Note an item before it is started; gives the record to ``end``."""
        if not self._free:
            return _NO_RECORD
        record = self._free.pop()
        _RECORD.pack_into(
            self._memory, record * _RECORD.size, position, time.monotonic(), ticket
        )  # field by field, in their order
        return record

    def end(self, record: int) -> None:
        if record != _NO_RECORD:
            _TICKET.pack_into(self._memory, record * _RECORD.size + _TICKET_AT, 0)
            self._free.append(record)

    def read(self) -> list[InHand]:
        """The items in hand."""
        records = _RECORD.iter_unpack(self._memory[: self._records * _RECORD.size])
        return [hand for hand in map(InHand._make, records) if hand.ticket]

    def shut(self) -> None:
        """In the parent: the worker is to finish the item in hand and begin no other."""
        self._memory[self._shut] = 1

    def is_shut(self) -> bool:
        return bool(self._memory[self._shut])

    # Claims

    def offer(self, ticket: int) -> None:
        """In the parent, before a task is sent: nobody has claimed it."""
        slot = ticket % CLAIMS
        self._memory[self._begun + slot] = 0
        self._memory[self._withdrawn + slot] = 0

    def claim(self, ticket: int) -> bool:
        """In the worker, before a task is begun: False when it has been withdrawn."""
        slot = ticket % CLAIMS
        self._memory[self._begun + slot] = 1
        self._order()
        return not self._memory[self._withdrawn + slot]

    def withdraw(self, ticket: int) -> bool:
        """In the parent: take a task back; False when the worker has begun, or will decline it."""
        slot = ticket % CLAIMS
        self._memory[self._withdrawn + slot] = 1
        self._order()
        return not self._memory[self._begun + slot]

    def begun(self) -> bytes:
        """In the parent, of a dead worker: a byte for each ticket that it had claimed."""
        return self._memory[self._begun : self._begun + CLAIMS]

    def _order(self) -> None:
        # The store before must be seen by others before the load after: taking a lock is an
        # atomic exchange, which orders them.
        with self._fence:
            pass
