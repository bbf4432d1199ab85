"""Tar files read with webdataset, one stream a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioprefetch import Prefetcher
from tests.edge.run import in_turns, load_example, run_example
from tests.helpers import collect

example = load_example("webdataset_tars", "webdataset")
# webdataset leaves it to Python to close its files.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@pytest.fixture
def tars(tmp_path: Path) -> Any:
    return example.Tars(example.write_tars(tmp_path, 5, 12))


def keys(items: list[Any]) -> list[str]:
    return [key for key, _, _ in items]


def test_the_example_runs() -> None:
    out = run_example("webdataset_tars")
    assert "200 samples of 5 tar files, each once, by 2 workers" in out
    assert "begin with ['0000', '0040', '0080', '0120', '0160']" in out


@one_loop
@pytest.mark.parametrize("num_proc", [0, 1, 2, 3])
async def test_files_take_turns(tars: Any, num_proc: int) -> None:
    items = await collect(Prefetcher(tars, num_shards=5, num_proc=num_proc))
    parts = [example.Tars([file]) for file in tars.files]
    assert keys(items) == keys(in_turns(parts))
    assert sorted(keys(items)) == keys(list(tars))


@one_loop
async def test_unordered_each_sample_comes_once(tars: Any) -> None:
    items = await collect(Prefetcher(tars, num_shards=5, num_proc=2, ordered=False))
    assert sorted(keys(items)) == keys(list(tars))
