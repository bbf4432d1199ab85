"""Log records on their way from workers to the handlers of the process that started them.

In a worker the root logger has one handler, which puts records in a queue: a task never waits
for them. A thread sends them on the worker's channel, each as a message of its own, so that
they come while a task is being done. Here they are handled as if they had been logged here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ._messages import Logged

Send = Callable[[Logged], object]

_MANY = 10_000  # records that wait to be sent; more are dropped, and counted
_PATIENCE = 1.0  # seconds that the end of a worker waits for the last of them
_FORMATTER = logging.Formatter()
_PLAIN = (str, int, float, bool, type(None))


def wanted_level() -> int:
    """From which level on this process wants the records of its workers."""
    return logging.getLogger().level


def replay(logged: Logged) -> None:
    """Handle a worker's record in this process."""
    record = logging.makeLogRecord(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class Forwarder(logging.Handler):
    """The handler of a worker.

    Parameters
    ----------
    worker
        Its number, which records have as their attribute ``worker``.
    send
        Sends a record; called on a thread of its own.
    """

    def __init__(self, worker: int, send: Send) -> None:
        super().__init__()
        self._worker = worker
        self._send = send
        self._pid = os.getpid()
        self._records: SimpleQueue[Logged | threading.Event] = SimpleQueue()
        self._dropped = 0
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def install(self, level: int) -> None:
        """Become the root logger's only handler: those of the parent are in the parent."""
        root = logging.getLogger()
        root.handlers[:] = [self]
        root.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._pid:  # in a child of the user's, which has no channel
            if logging.lastResort is not None:
                logging.lastResort.handle(record)
            return
        if self._records.qsize() >= _MANY:
            self._dropped += 1
            return
        try:
            self._put(self._portable(record))
        except Exception:  # of an argument's __str__, say
            self.handleError(record)

    def _put(self, entry: Logged | threading.Event) -> None:
        self._records.put(entry)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._forward, name="aioprefetch-logs", daemon=True
            )
            self._thread.start()

    def _portable(self, record: logging.LogRecord) -> Logged:
        """A record without what may not travel: it is formatted here."""
        values: dict[str, Any] = dict(record.__dict__)
        values["msg"], values["args"] = record.getMessage(), None
        if record.exc_info and not record.exc_text:
            values["exc_text"] = _FORMATTER.formatException(record.exc_info)
        values["exc_info"] = None
        plain = {
            name: value if isinstance(value, _PLAIN) else str(value)
            for name, value in values.items()
        }
        return Logged({**plain, "worker": self._worker})

    def send_by(self, send: Send) -> None:
        """Send records in another way from now on."""
        with self._sending:
            self._send = send

    def drain(self) -> None:
        """Wait for what has been logged to be sent, for a while."""
        if self._thread is not None:
            sent = threading.Event()
            self._records.put(sent)
            sent.wait(_PATIENCE)

    def _forward(self) -> None:
        with suppress(OSError, RuntimeError):  # the parent is gone, or the loop: nobody listens
            while True:
                entry = self._records.get()
                with self._sending:
                    if isinstance(entry, threading.Event):
                        entry.set()
                        continue
                    self._send(entry)
                    if self._dropped:
                        self._send(self._apology())

    def _apology(self) -> Logged:
        dropped, self._dropped = self._dropped, 0
        text = f"{dropped} log records of worker {self._worker} were dropped: too many at once"
        record = logging.LogRecord("aioprefetch", logging.WARNING, __file__, 0, text, None, None)
        return self._portable(record)
