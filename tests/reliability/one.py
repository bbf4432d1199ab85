"""``python -m tests.reliability.one FAULT CONTENDER FOLDER``: one fault, one contender.

What was seen goes into a file line by line, since this process may not live to the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks import drive
from tests.benchmarks.contenders import CONTENDERS, CannotRun, Job
from tests.processes import descendants
from tests.reliability.data import LENGTH, Fragile

AFTER = 100  # items, after which what is done from outside is done
TIMEOUT = 5.0  # seconds an item may take, where a loader can be told


class Consumer:
    """Takes items, does the fault, and notes what came and when."""

    def __init__(self, fault: str, folder: Path) -> None:
        self._fault = fault
        self._file = folder / "seen.json"
        self.items: list[int] = []
        self.hurt_at: float | None = None
        self.error = ""
        self.ended_at: float | None = None

    def __call__(self, item: Any) -> bool:
        self.items.append(int(item))
        if len(self.items) == AFTER:
            self.hurt_at = time.monotonic()
            self._hurt()
        elif len(self.items) % 20 == 0:
            self.note()
        return False

    def note(self) -> None:
        since = None
        if self.hurt_at is not None and self.ended_at is not None:
            since = self.ended_at - self.hurt_at
        record = {
            "delivered": len(self.items),
            "lost": LENGTH - len(set(self.items)),
            "repeated": len(self.items) - len(set(self.items)),
            "error": self.error,
            "ended": self.ended_at is not None,
            "seconds": since,
        }
        self._file.write_text(json.dumps(record))

    def _hurt(self) -> None:
        if self._fault == "parent killed":
            self.note()
            os.kill(os.getpid(), signal.SIGKILL)
        workers = sorted(descendants(), key=lambda process: process.create_time())
        working = [process for process in workers if _works(process)]
        if self._fault in ("killed", "stopped"):
            harm = signal.SIGKILL if self._fault == "killed" else signal.SIGSTOP
            working[-1].send_signal(harm)
        elif self._fault == "all killed":
            for process in working:
                process.kill()


def _works(process: psutil.Process) -> bool:
    """Whether it is a worker: not one that cleans up after them."""
    return "resource_tracker" not in " ".join(process.cmdline())


def main(fault: str, name: str, folder: Path) -> None:
    consumer = Consumer(fault, folder)
    dataset = Fragile(fault, str(folder / "flag"))
    job = Job(dataset, None, ours={"task_timeout": TIMEOUT}, window=8)
    try:
        drive.consume(CONTENDERS[name], job, consumer)
    except CannotRun as reason:
        (folder / "seen.json").write_text(json.dumps({"cannot": str(reason)}))
        return
    except BaseException as error:
        text = str(error).strip().splitlines()
        consumer.error = f"{type(error).__name__}: {text[0] if text else ''}"
    consumer.ended_at = time.monotonic()
    consumer.hurt_at = consumer.hurt_at or consumer.ended_at
    consumer.note()
    # Whatever keeps this process from ending is seen from outside.
    threading.Thread(target=_give_up, daemon=True).start()


def _give_up() -> None:
    time.sleep(5)
    os._exit(9)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
