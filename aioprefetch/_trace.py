"""The timeline of a run, as a file of trace events that Perfetto and chrome://tracing open.

The loop appends events to a list; a thread of its own turns lists into JSON and writes them.
Workers send what they did with their reports. All times are of `time.monotonic`, which is one
clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from typing import Any, Protocol, TextIO

from ._spans import Span
from ._threads import Helper

_LEAST = 2e-6  # seconds
_MANY = 1000  # events that are written together

CONSUMER, SOURCE = 1, 2  # rows of this process
_FIRST_WORKER = 10  # rows of the workers, which are shown as processes of their own


class Levels(Protocol):
    """What is on its way."""

    @property
    def in_flight(self) -> int: ...
    @property
    def ready(self) -> int: ...


class Trace:
    """The timeline of one start of a Prefetcher; on the loop, but for `finish`.

    Parameters
    ----------
    path
        The file; one that is there is replaced.

    Attributes
    ----------
    overlap
        Whether what a worker does may overlap, as awaited items do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.overlap = False
        self._file: TextIO | None = None
        self._began = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._ids = itertools.count(1)
        self._workers: set[int] = set()
        self._separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'
        self._thread = Helper("aioprefetch-trace")
        self._thread.post(self._open, path)
        self._name("process", 0, 0, "this process")
        self._name("thread", 0, CONSUMER, "consumer")
        self._name("thread", 0, SOURCE, "source")

    # What there is to see

    def waited(self, began: float, ended: float) -> None:
        """The consumer waited for a batch."""
        self._span(0, CONSUMER, "wait", began, ended)

    def consumed(self, began: float, ended: float) -> None:
        """The consumer worked, or others on the loop did."""
        if ended - began > _LEAST:
            self._span(0, CONSUMER, "consume", began, ended)

    def read(self, began: float, ended: float) -> None:
        """A source or sampler was read in this process."""
        self._span(0, SOURCE, "read", began, ended)

    def depth(self, now: float, levels: Levels) -> None:
        """What is in the window."""
        ready = levels.ready
        values = {"ready": ready, "requested": levels.in_flight - ready}
        self._add({"ph": "C", "name": "window", "ts": self._micros(now), "args": values})

    def restarted(self, worker: int, death: str) -> None:
        """A worker has died, and another takes its place."""
        now = self._micros(time.monotonic())
        place = {"pid": self._process(worker), "tid": 0, "s": "p"}
        self._add({"ph": "i", "name": "restart", "ts": now, **place, "args": {"why": death}})

    def worked(self, worker: int, spans: list[Span]) -> None:
        """What a worker did."""
        process = self._process(worker)
        for name, began, ended, batch in spans:
            about = {"batch": batch} if batch >= 0 else {}
            if self.overlap:
                self._overlapping(process, name, began, ended, about)
            else:
                self._span(process, 0, name, began, ended, about)

    # Writing

    def _process(self, worker: int) -> int:
        process = _FIRST_WORKER + worker
        if worker not in self._workers:
            self._workers.add(worker)
            self._name("process", process, 0, f"worker {worker}")
        return process

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        about = {"name": f"{what}_name", "args": {"name": name}}
        self._add({"ph": "M", "pid": pid, "tid": tid, **about})

    def _span(
        self, pid: int, tid: int, name: str, began: float, ended: float, about: Any = None
    ) -> None:
        start = self._micros(began)
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start}
        self._add({**event, "dur": self._micros(ended) - start, "args": about or {}})

    def _overlapping(self, pid: int, name: str, began: float, ended: float, about: Any) -> None:
        event = {"cat": "worker", "id": next(self._ids), "name": name, "pid": pid, "tid": 0}
        self._add({"ph": "b", **event, "ts": self._micros(began), "args": about})
        self._add({"ph": "e", **event, "ts": self._micros(ended)})

    def _micros(self, moment: float) -> float:
        return round((moment - self._began) * 1e6, 3)

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append({"pid": 0, "tid": 0, **event})
        if len(self._events) >= _MANY:
            self._flush()

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._thread.post(self._write, events)

    def _open(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def _write(self, events: list[dict[str, Any]]) -> None:
        if not events or self._file is None:
            return
        self._file.write(self._separator + ",\n".join(map(json.dumps, events)))
        self._separator = ",\n"

    # The end

    def finish(self) -> None:
        """Complete the file, soon; any thread, and inside any lock."""
        self._flush()
        self._thread.post(self._complete)
        self._thread.stop()

    async def finished(self, timeout: float) -> None:
        """Complete the file, and wait for that."""
        self._flush()
        await asyncio.wait([self._thread.call(self._complete)], timeout=timeout)
        self._thread.stop()

    def _complete(self) -> None:
        if self._file is not None:
            with self._file as file:
                file.write("\n]}\n")
            self._file = None
