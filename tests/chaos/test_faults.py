"""Every fault, on the usual way to start workers and, marked ``chaos``, on all of them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.chaos.scenes import SCENES
from tests.processes import ROOT, Script

USUAL = ("forkserver", "asyncio")
MATRIX = [
    (method, loop) for method in ("forkserver", "spawn", "fork") for loop in ("asyncio", "uvloop")
]


# The limit on processes does not bind root, nor who may exceed it.
UNPRIVILEGED = ["--ruid=65534", "--bounding-set=-sys_resource,-sys_admin"]
BOUND = f"import os, sys; os.execvp('setpriv', ['setpriv', *{UNPRIVILEGED}, *sys.argv[1:]])"


def play(name: str, method: str, loop: str) -> None:
    command = ["-m", "tests.chaos.stage", name, method, loop]
    if name.startswith("23") and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("the limit on processes does not bind root, and there is no setpriv")
        command = ["-c", BOUND, sys.executable, *command]
    for _ in range(3):  # on a busy machine any loop is held now and then
        ended = Script(*command).end()
        if "the loop was held" not in ended.err:
            break
    assert ended.out.splitlines()[-1:] == ["survived"], ended.out + ended.err
    assert ended.code == 0


@pytest.mark.parametrize("name", SCENES)
def test_fault(name: str) -> None:
    play(name, *USUAL)


@pytest.mark.chaos
@pytest.mark.parametrize(("method", "loop"), [cell for cell in MATRIX if cell != USUAL])
@pytest.mark.parametrize("name", SCENES)
def test_fault_everywhere(name: str, method: str, loop: str) -> None:
    if name.startswith("23") and method == "fork":
        pytest.skip("multiprocessing leaves four descriptors open for each fork that fails")
    play(name, method, loop)


# Faults whose tests stand with what they are about.
ELSEWHERE = {
    15: "unit/test_start_methods.py::test_worker_init_fn_that_raises",
    16: "unit/test_errors.py::test_what_cannot_be_shipped_is_named",
    17: "unit/test_errors.py::test_an_unpicklable_result_is_named",
    18: "unit/test_errors.py::test_odd_errors_while_a_result_is_rebuilt",
    19: "unit/test_errors.py::test_odd_errors",
    21: "unit/test_codec.py::test_arrays",
    24: "unit/test_end.py::test_cancelled_at_every_await_of_anext",
    25: "unit/test_end.py::test_nothing_is_left_of_what_is_dropped",
    28: "unit/test_end.py::test_the_loop_is_closed_under_it",
    30: "unit/test_end.py::test_nothing_outlives_the_process",
    31: "unit/test_end.py::test_nothing_outlives_the_process",
    32: "unit/test_end.py::test_nothing_outlives_the_process",
    34: "unit/test_start_methods.py::test_nested_processes_go_down_with_their_parent",
    39: "unit/test_end.py::test_a_stream_that_is_left_is_closed",
    41: "unit/test_start_methods.py::test_a_main_without_guard_is_told",
}
# That all of this runs on every Python.
NOT_HERE = {43}


def test_every_fault_has_a_test() -> None:
    played = {int(name[:2]) for name in SCENES}
    assert played | set(ELSEWHERE) | NOT_HERE == set(range(1, 44))
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in Path(ROOT, "tests", file).read_text()
