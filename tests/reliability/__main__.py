"""``python -m tests.reliability``: docs/reliability.md, made anew."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import machine
from tests.benchmarks.contenders import CONTENDERS
from tests.benchmarks.runner import folder_of_project

from .page import page

LIMIT = 20.0  # seconds until a loader is said to hang

FAULTS = {
    "killed": "SIGKILL to one of two workers",
    "all killed": "SIGKILL to both workers",
    "exits": "`os._exit(0)` in an item, once",
    "crashes": "a segmentation fault in an item, once",
    "hangs": "an item that never comes back, once",
    "stopped": "SIGSTOP to one worker",
    "parent killed": "SIGKILL to the process that consumes",
}
LOADERS = ("ours", "torch", "nodes", "grain", "spdl-pool", "executor", "loky")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/reliability.md"))
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--loader", nargs="+", choices=list(CONTENDERS), default=list(LOADERS))
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for fault in options.only:
        for name in options.loader:
            results.setdefault(fault, {})[name] = seen = watch(fault, name)
            print(f"{fault}, {CONTENDERS[name].title}: {seen}", flush=True)
    told = {name: CONTENDERS[name].title for name in options.loader}
    faults = {fault: FAULTS[fault] for fault in options.only}
    options.out.write_text(page(results, faults, told, machine.versions()))
    print(f"written: {options.out}")


def watch(fault: str, name: str) -> dict[str, Any]:
    """What one loader made of one fault, in a session of its own."""
    with tempfile.TemporaryDirectory(prefix="aioprefetch-reliability-") as folder:
        shared = set(os.listdir("/dev/shm"))
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.reliability.one", fault, name, folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder_of_project(),
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        file = Path(folder, "seen.json")
        seen: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        time.sleep(2.0)  # for what cleans up after the dead
        left = _of_session(process.pid)
        seen["processes"] = len(left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        names = set(os.listdir("/dev/shm")) - shared
        seen["shared"] = len(names)
        for left_name in names:
            if not left_name.startswith("sem."):  # which may be another process's
                Path("/dev/shm", left_name).unlink(missing_ok=True)
        return seen


def _of_session(session: int) -> list[int]:
    """The processes of a session that are alive."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[3]) == session]


def _stat(pid: int) -> list[str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


if __name__ == "__main__":
    main()
