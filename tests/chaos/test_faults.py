"""Every fault, on the usual way to start workers and, marked ``chaos``, on all of them."""

from __future__ import annotations

import pytest

from tests.chaos.scenes import SCENES
from tests.processes import Script

USUAL = ("forkserver", "asyncio")
MATRIX = [
    (method, loop) for method in ("forkserver", "spawn", "fork") for loop in ("asyncio", "uvloop")
]


def play(name: str, method: str, loop: str) -> None:
    ended = Script("-m", "tests.chaos.stage", name, method, loop).end()
    assert ended.out.splitlines()[-1:] == ["survived"], ended.out + ended.err
    assert ended.code == 0


@pytest.mark.parametrize("name", SCENES)
def test_fault(name: str) -> None:
    play(name, *USUAL)


@pytest.mark.chaos
@pytest.mark.parametrize(("method", "loop"), [cell for cell in MATRIX if cell != USUAL])
@pytest.mark.parametrize("name", SCENES)
def test_fault_everywhere(name: str, method: str, loop: str) -> None:
    play(name, method, loop)
