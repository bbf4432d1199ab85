"""The table is whole, its tests are there, and the page is what it says."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.conformance.behaviours import BEHAVIOURS, Behaviour
from tests.conformance.page import page
from tests.processes import ROOT

# How many there are to each, so that none is dropped unseen.
ROWS = {
    ("torch", "arguments"): 8,
    ("torch", "map-style"): 9,
    ("torch", "order"): 5,
    ("torch", "iterables"): 5,
    ("torch", "seeds"): 8,
    ("torch", "failures"): 10,
    ("torch", "collate"): 12,
    ("torch", "torch's own"): 8,
    ("torchdata", "state"): 17,
    ("tensorpack", "cases"): 20,
}


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse(Path(ROOT, "tests", file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def test_no_row_is_missing() -> None:
    assert Counter((row.peer, row.group) for row in BEHAVIOURS) == ROWS


@pytest.mark.parametrize("row", BEHAVIOURS, ids=lambda row: row.theirs)
def test_its_tests_are_there(row: Behaviour) -> None:
    assert bool(row.ours) != (row.verdict == "N")
    assert row.note or row.verdict == "K"
    for test in row.ours:
        file, _, name = test.partition("::")
        assert name in names_in(file), test


def test_the_page_is_made_of_it() -> None:
    assert Path(ROOT, "docs", "conformance.md").read_text() == page(), "python -m tests.conformance"
