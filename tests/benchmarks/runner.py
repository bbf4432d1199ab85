"""Interleaves the contenders: A B C A B C …, each in a fresh process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .contenders import CONTENDERS
from .workloads import Workload

LIMIT = 120.0  # seconds that one repeat may take


@dataclass
class Outcome:
    """What came of one workload."""

    results: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def run(workload: Workload, contenders: list[str], repeats: int, quick: bool) -> Outcome:
    outcome = Outcome(left_out=dict(workload.left_out))
    start = time.perf_counter()
    for _ in range(repeats):
        for name in contenders:
            if name not in outcome.left_out:
                _repeat(workload, name, quick, outcome)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _repeat(workload: Workload, name: str, quick: bool, outcome: Outcome) -> None:
    answer = _in_process(workload.name, name, "quick" if quick else "full")
    if "cannot" in answer:
        outcome.left_out[name] = answer["cannot"]
        outcome.results.pop(name, None)
        print(f"  {CONTENDERS[name].title}: left out: {answer['cannot']}", flush=True)
        return
    outcome.results.setdefault(name, []).append(answer)
    figures = ", ".join(f"{key} {value:.4g}" for key, value in answer.items())
    print(f"  {CONTENDERS[name].title}: {figures}", flush=True)


def _in_process(workload: str, contender: str, size: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="aioprefetch-bench-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.one"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, workload, contender, size, str(answer)],
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=folder_of_project(),
            )
            ended = _wait(process, answer)
        if answer.exists():
            loaded: dict[str, Any] = json.loads(answer.read_text())
            return loaded
        return {"cannot": _reason(ended, log)}


def _wait(process: subprocess.Popen[bytes], answer: Path) -> bool:
    """Until it has ended by itself; what does not is killed, with what it started."""
    try:
        process.wait(LIMIT)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        _sweep(process.pid)
        process.wait()


def _sweep(group: int) -> None:
    """Kill what a contender has left behind, after a moment to clean up after itself."""
    for _ in range(20):
        if not _members(group):
            return
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """Those that live; an ended one may wait long for whoever takes in orphans."""
    return [pid for pid in _pids() if _group_of(pid) == group]


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _group_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[2])


def _reason(ended: bool, log: Path) -> str:
    if not ended:
        return f"did not end within {LIMIT:g} s"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"failed: {lines[-1] if lines else 'no output'}"


def folder_of_project() -> Path:
    return Path(__file__).resolve().parents[2]
