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

from tests.processes import ROOT, alive


class Server(NamedTuple):
    process: subprocess.Popen[str]
    port: int

    def workers(self) -> list[psutil.Process]:
        """Its worker processes, the eldest first."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        # The fork server's children; what starts them has the server itself for its parent.
        found = [child for child in below if child.ppid() != self.process.pid]
        return sorted(found, key=psutil.Process.create_time)

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
