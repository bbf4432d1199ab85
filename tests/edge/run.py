"""What the tests of examples share."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from typing import Any

import pytest

from tests.processes import ROOT, Script


def load_example(name: str, *needed: str) -> Any:
    """An example as a module; its tests are skipped where a library is missing."""
    for library in needed:
        pytest.importorskip(library, reason=f"{library} is not installed; `make edge` installs it")
    return importlib.import_module(f"examples.{name}")


def run_example(name: str, *arguments: str) -> str:
    """Run an example to its end; what it prints."""
    with warnings.catch_warnings():
        # Once it is imported, JAX warns of every fork, that of a subprocess too.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ended = Script(f"{ROOT}/examples/{name}.py", *arguments).end()
    assert ended.code == 0, ended.err
    return ended.out


def in_turns(streams: Iterable[Iterable[Any]]) -> list[Any]:
    """The next item of each stream that has one, round after round."""
    rest = [list(stream) for stream in streams]
    items = []
    while any(rest):
        items += [stream.pop(0) for stream in rest if stream]
    return items
