"""What a process has left lying about, and scripts in processes of their own."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

WATCHDOG = 20.0  # seconds that a script may run
ROOT = str(Path(__file__).parent.parent)

# One line before a script's own: what it hangs in is printed before it is killed.
_PRELUDE = f"import faulthandler; faulthandler.dump_traceback_later({WATCHDOG - 1})\n"


class Leftovers(NamedTuple):
    """What a process holds that somebody has to give back."""

    children: frozenset[str]
    fds: frozenset[str]
    threads: frozenset[str]
    shm: frozenset[str]

    def beyond(self, before: Leftovers) -> dict[str, list[str]]:
        """What is there and was not before."""
        found = zip(self._fields, self, before, strict=True)
        return {name: sorted(now - then) for name, now, then in found if now - then}


def leftovers() -> Leftovers:
    """Children (their children too), descriptors, threads and shared memory of now.

    The stdlib's forkserver and resource tracker are left out; their descriptors are there
    from the moment they are started, so warm both first.
    """
    gc.collect()
    return Leftovers(
        frozenset(_describe(child) for child in descendants()),
        frozenset(_descriptors()),
        frozenset(f"{t.name} {t.ident}" for t in threading.enumerate()),
        frozenset(_shared_memory()),
    )


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """The processes below one, but for this process's forkserver and resource tracker."""
    tracker: Any = multiprocessing.resource_tracker
    server: Any = multiprocessing.forkserver
    own = {tracker._resource_tracker._pid, server._forkserver._forkserver_pid}
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if process.pid not in own]


def workers() -> list[psutil.Process]:
    """The workers that are up, in the order of their start."""
    up: list[tuple[float, int, psutil.Process]] = []
    for process in descendants():
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                up.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(up, key=lambda found: found[:2])]


def send(worker: psutil.Process, number: int = signal.SIGKILL) -> None:
    """Send a signal to it, unless it has died meanwhile."""
    with suppress(psutil.NoSuchProcess):
        worker.send_signal(number)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline()[-1:])}"
    except psutil.Error:
        return f"{process.pid} gone"


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            yield f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}"
        except OSError:  # the one that listed them
            continue


# What other processes of the machine make and drop meanwhile.
_OTHERS = ("sem.", "psm_", "torch_")


def _shared_memory() -> Iterator[str]:
    yield from (name for name in os.listdir("/dev/shm") if not name.startswith(_OTHERS))
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/" in line:
            yield line.split(maxsplit=5)[5]


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie that nobody has collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _tries(condition: Callable[[], Any], within: float) -> Iterator[None]:
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        yield


def wait_for(condition: Callable[[], Any], within: float) -> bool:
    """Poll until ``condition`` holds, or time is up; whether it holds."""
    for _ in _tries(condition, within):
        time.sleep(0.01)
    return bool(condition())


async def eventually(condition: Callable[[], Any], within: float) -> bool:
    """The same on an event loop."""
    for _ in _tries(condition, within):
        await asyncio.sleep(0.01)
    return bool(condition())


class Ended(NamedTuple):
    """How a script ended."""

    code: int
    out: str
    err: str
    took: float


def _heed_interrupts() -> None:
    # Tests that run in the background are started with SIGINT ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Script:
    """A Python process with a session of its own, killed with it at the watchdog."""

    def __init__(self, *command: str, stdin: str | None = None, cwd: Path | None = None) -> None:
        self._began = time.monotonic()
        self._stdin = stdin
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": ROOT},
            start_new_session=True,
            preexec_fn=_heed_interrupts,  # noqa: PLW1509 - one call, then exec
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line that it prints; the watchdog of pytest is that of this."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Give it the line that it waits for."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> Ended:
        """Wait for its end."""
        try:
            out, err = self.process.communicate(self._stdin, timeout=WATCHDOG)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            out, err = self.process.communicate()
            raise AssertionError(f"the script hung:\n{out}\n{err}") from None
        return Ended(self.process.returncode, out, err, time.monotonic() - self._began)


def start_script(folder: Path, text: str, *args: str) -> Script:
    """Start a script from a file in ``folder``."""
    file = folder / "script.py"
    file.write_text(_PRELUDE + text)
    return Script(str(file), *args)


def run_script(folder: Path, text: str, *args: str) -> Ended:
    """Run a script to its end."""
    return start_script(folder, text, *args).end()
