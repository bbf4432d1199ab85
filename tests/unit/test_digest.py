"""What a stream's digest tells apart, and what it does not depend on."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioprefetch._digest import Digest
from tests.processes import ROOT


@dataclass(slots=True)
class Slotted:
    value: int


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


class Rude:
    def __reduce_ex__(self, _: Any) -> Any:
        raise RuntimeError("not by anyone")


def digest(*items: Any) -> bytes:
    found = Digest()
    for item in items:
        found.add(item)
    return found.value()


OTHERS: dict[str, tuple[Any, Any]] = {
    "int": (1, 2),
    "huge": (10**5000, 10**5000 + 1),
    "text": ("a" * 1000, "a" * 999 + "b"),
    "bytes": (b"ab", b"ba"),
    "memoryview": (memoryview(b"ab"), memoryview(b"ac")),
    "array": (np.arange(10**5), np.arange(10**5) + 1),
    "dtype": (np.zeros(3, "f4"), np.zeros(3, "f8")),
    "objects": (np.array(["a", None]), np.array(["b", None])),
    "dict": ({"a": [1, 2]}, {"a": [1, 3]}),
    "nested": ((1, (2, [3])), (1, (2, [4]))),
    "set": ({"a", "b"}, {"a", "c"}),
    "date": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    "decimal": (decimal.Decimal("1.1"), decimal.Decimal("1.2")),
    "path": (Path("a"), Path("b")),
    "range": (range(3), range(4)),
    "slots": (Slotted(1), Slotted(2)),
    "attributes": (Plain(1), Plain(2)),
    "type": ([1], (1,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_items_are_told_apart(name: str) -> None:
    one, other = OTHERS[name]
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_the_order_of_items_is_told() -> None:
    assert digest(1, 2) != digest(2, 1)


def test_what_resists_is_as_good_as_its_type() -> None:
    assert digest(Rude(), 1) == digest(Rude(), 1) != digest(Rude(), 2)


@given(st.recursive(st.none() | st.booleans() | st.text() | st.floats(), st.lists))
def test_any_item_has_the_same_digest_again(item: Any) -> None:
    assert digest(item) == digest(item)


def test_it_does_not_depend_on_the_process() -> None:
    code = "from tests.unit.test_digest import *; print(digest({'a', 'b', 'c', 1}).hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ROOT, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
