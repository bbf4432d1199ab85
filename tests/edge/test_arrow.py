"""Rows of a pyarrow Table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.edge.run import load_example, run_example

example = load_example("arrow", "pyarrow")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
both = pytest.mark.parametrize("num_proc", [0, 2])


def test_the_example_runs() -> None:
    out = run_example("arrow", "--rows", "3000")
    assert "as tables: 6 batches, 3000 rows, each once" in out
    assert "as arrays: Bergen" in out


@one_loop
@both
async def test_batches_are_rows_of_the_table(num_proc: int) -> None:
    table = example.make_table(1000)
    p = example.rows_of(table, example.take, batch_size=300, num_proc=num_proc)
    batches = [batch async for batch in p]
    assert [len(batch) for batch in batches] == [300, 300, 300, 100]
    for start, batch in zip(range(0, 1000, 300), batches, strict=True):
        assert batch.equals(table.slice(start, 300))


@one_loop
@both
async def test_batches_are_arrays(num_proc: int) -> None:
    table = example.make_table(1000)
    p = example.rows_of(table, example.take_arrays, batch_size=400, shuffle=True, num_proc=num_proc)
    rows = table.to_pylist()
    async for batch in p:
        for number, city, degrees in zip(*batch.values(), strict=True):
            expected = rows[number]["degrees"]
            assert city == rows[number]["city"]
            assert degrees == expected or (degrees != degrees and expected is None)


@one_loop
async def test_columns_come_without_a_copy() -> None:
    table = example.make_table(20_000)
    async for batch in example.rows_of(table, example.take, batch_size=20_000, num_proc=1):
        buffers = [buffer for buffer in batch["degrees"].chunk(0).buffers() if buffer is not None]
        assert any(is_shared(buffer) for buffer in buffers)
        break


def is_shared(buffer: Any) -> bool:
    """Whether it lies in memory that is mapped from an anonymous file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        if start <= buffer.address < end:
            return "memfd:" in line
    return False
