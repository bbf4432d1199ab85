"""Training that is killed and goes on; hosts that become more."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT

EXAMPLE = f"{ROOT}/examples/resume.py"


def train(checkpoint: Path, num_proc: int) -> subprocess.Popen[str]:
    options = ["--epochs", "2", "--every", "3", "--num-proc", str(num_proc)]
    return subprocess.Popen(
        [sys.executable, EXAMPLE, "--checkpoint", str(checkpoint), *options],
        stdout=subprocess.PIPE,
        text=True,
    )


def last_line(training: subprocess.Popen[str]) -> str:
    output, _ = training.communicate(timeout=50)
    assert training.returncode == 0, output
    return output.splitlines()[-1]


def kill_after(training: subprocess.Popen[str], lines: int) -> None:
    assert training.stdout is not None
    for _ in range(lines):
        assert training.stdout.readline()
    training.send_signal(signal.SIGKILL)
    training.stdout.close()
    training.wait(10)


def test_training_that_is_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    weights = last_line(train(tmp_path / "whole.npz", 2))
    assert weights.startswith("weights ")
    dice = random.Random()
    checkpoint = tmp_path / "killed.npz"
    kill_after(train(checkpoint, 2), dice.randrange(2, 13))
    assert last_line(train(checkpoint, 3)) == weights


def run_hosts(world_size: int, batches: int | None, states: Path) -> list[int]:
    """Each host in a process; what all of them got, in any order."""
    command = [sys.executable, "-m", "tests.resume.host", str(states), str(world_size)]
    hosts = [
        subprocess.Popen(
            [*command, str(rank), str(-1 if batches is None else batches + rank)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world_size)
    ]
    found: list[int] = []
    after = []
    for host in hosts:
        output, _ = host.communicate(timeout=50)
        assert host.returncode == 0
        told = json.loads(output)
        found += told["indices"]
        after.append(told["state"])
    states.write_text(json.dumps(after))
    return found


def test_from_two_hosts_to_three(tmp_path: Path) -> None:
    states = tmp_path / "states.json"
    first = run_hosts(2, 5, states)
    assert len(first) == (5 + 6) * 16
    rest = run_hosts(3, None, states)
    assert sorted(first + rest) == list(range(1437))
