"""A server in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from tests.processes import ROOT


class Server(NamedTuple):
    process: subprocess.Popen[str]
    port: int

    def workers(self) -> list[psutil.Process]:
        """Its worker processes: the children of what it starts them with."""
        own = psutil.Process(self.process.pid)
        return [worker for child in own.children() for worker in child.children()]

    def cpu(self) -> dict[str, float]:
        """Processor seconds that it has used, and its workers."""
        own = psutil.Process(self.process.pid)
        return {
            "server": sum(own.cpu_times()[:2]),
            "workers": sum(sum(each.cpu_times()[:2]) for each in own.children(recursive=True)),
        }

    def stop(self) -> None:
        """Ask it to end, as whoever deploys a new version does."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def server(*command: str) -> Iterator[Server]:
    """Start one by a command for Python that prints its address first; killed in the end."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield Server(process, int(process.stdout.readline().rpartition(":")[2]))
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
