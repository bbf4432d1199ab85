"""Where a worker is stuck, or crashed: its Python stacks, written into memory that outlives it.

`faulthandler` writes them from a signal handler, so that it works while C code holds the
interpreter; the parent reads what it has mapped.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from ._arena import Space

# A signal that nobody else is likely to use; where there are none of that kind, none is sent.
DUMP_SIGNAL: int | None = int(signal.SIGRTMIN) + 7 if hasattr(signal, "SIGRTMIN") else None

_PATIENCE = 0.3  # seconds for a worker to write its stacks
_QUIET = 0.01  # seconds without more of them
_SHOWN = 20_000  # characters


def write_stacks_into(space: Space) -> None:
    """In a worker: have crashes, and `DUMP_SIGNAL`, write the stacks of all threads."""
    with suppress(OSError):  # no /proc: then there are no stacks to read
        # A description of its own, whose place is where the next stack goes.
        file = os.open(f"/proc/self/fd/{space.fd}", os.O_RDWR)
        os.lseek(file, space.stacks, os.SEEK_SET)
        faulthandler.enable(file, all_threads=True)
        if DUMP_SIGNAL is not None:
            faulthandler.register(DUMP_SIGNAL, file, all_threads=True)


def read_stacks(space: Space, start: int = 0) -> str:
    """What a worker has written from ``start`` on."""
    begin = space.stacks + start
    text = bytes(space.memory[begin : begin + 4 * _SHOWN])
    return text.split(b"\0", 1)[0].decode(errors="replace")[:_SHOWN]


def ask_for_stacks(space: Space, send_signal: object) -> str:
    """Have a worker write its stacks and wait for them, not for long; off the loop."""
    assert callable(send_signal)
    start = len(read_stacks(space))
    with suppress(OSError):
        send_signal(DUMP_SIGNAL)
    deadline = time.monotonic() + _PATIENCE
    text = ""
    while time.monotonic() < deadline:
        time.sleep(_QUIET)  # it says nothing when it is done
        more = read_stacks(space, start)
        if more and more == text:
            break
        text = more
    return text


def is_stopped(pid: int | None) -> bool:
    """Whether a process has been stopped, by SIGSTOP or a debugger."""
    with suppress(OSError, IndexError):
        # The name, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
