"""The surface: names, version, command line, what importing costs, the handle itself."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import aioprefetch
from aioprefetch import Prefetcher
from tests.datasets import Flow, Numbers, Shards, TwoShards, double, ten
from tests.helpers import collect

ROOT = Path(__file__).parents[2]


def python(*arguments: str, path: Path | None = None) -> str:
    environment = {"PYTHONPATH": str(path)} if path else {}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_all_is_sorted_and_complete() -> None:
    assert all(hasattr(aioprefetch, name) for name in dir(aioprefetch))
    public = [
        name
        for name, value in vars(aioprefetch).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    assert aioprefetch.__all__ == sorted([*public, "__version__"])


def test_public_things_say_that_they_are_of_the_package() -> None:
    things = [getattr(aioprefetch, name) for name in aioprefetch.__all__ if name != "__version__"]
    assert {thing.__module__ for thing in things} == {"aioprefetch"}


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert aioprefetch.__version__ == project["version"]
    assert python("-m", "aioprefetch", "--version") == f"aioprefetch {project['version']}"


def test_importing_it_imports_no_optional_library(tmp_path: Path) -> None:
    """Stubs stand where they would be found, installed or not."""
    optional = ["torch", "sklearn", "scipy", "tqdm", "PIL", "prometheus_client"]
    for name in optional:
        (tmp_path / f"{name}.py").touch()
    code = f"import aioprefetch, sys; print([n for n in {optional} if n in sys.modules])"
    assert python("-c", code, path=tmp_path) == "[]"


def test_what_workers_import_does_not_bring_what_starts_them() -> None:
    unwanted = ["anyio", "aioprefetch._pool"]
    code = f"import aioprefetch._serve, sys; print([n for n in {unwanted} if n in sys.modules])"
    assert python("-c", code) == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        aioprefetch.nothing  # noqa: B018


def test_errors_form_one_tree() -> None:
    parents = {
        "PrefetchError": Exception,
        "PoolBroken": aioprefetch.PrefetchError,
        "SerializationError": aioprefetch.PrefetchError,
        "SkipItem": Exception,
        "TaskError": aioprefetch.PrefetchError,
        "WorkerDied": aioprefetch.TaskError,
        "WorkerStartError": aioprefetch.PrefetchError,
    }
    assert {name: getattr(aioprefetch, name).__base__ for name in parents} == parents


async def test_it_pickles_while_it_is_not_open() -> None:
    p = Prefetcher(Numbers(7), map_fn=double, batch_size=3, num_proc=1, seed=4)
    copy = pickle.loads(pickle.dumps(p))
    assert await collect(copy) == await collect(p) == [[0, 2, 4], [6, 8, 10], [12]]
    async with p:
        with pytest.raises(TypeError, match="open"):
            pickle.dumps(p)
    assert len(pickle.loads(pickle.dumps(p))) == 3


@pytest.mark.parametrize(
    "source", [Numbers(3), Flow(3), [1, 2], ten], ids=["map", "flow", "list", "function"]
)
def test_it_has_no_shard_when_its_source_has_none(source: Any) -> None:
    p = Prefetcher(source)
    assert not hasattr(p, "shard")
    with pytest.raises(AttributeError, match="no attribute 'shard'"):
        p.shard(num_shards=2, index=0)


async def test_it_has_shard_when_its_source_has() -> None:
    p = Prefetcher(Shards(10), map_fn=double, batch_size=2, num_proc=0)
    assert hasattr(p, "shard")
    shard = p.shard(num_shards=3, index=1)
    assert isinstance(shard, Prefetcher)
    assert await collect(shard) == [[2, 4], [8, 10], [14, 16]]


async def test_it_is_a_source_through_its_shards() -> None:
    inner = Prefetcher(Shards(10), map_fn=double, num_proc=1)
    p = Prefetcher(inner, num_shards=2, num_proc=2)
    assert await collect(p) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]


async def test_it_is_a_source_in_copies() -> None:
    """Each copy has a seed of its own; otherwise all would shuffle alike."""
    inner = Prefetcher(Numbers(50), shuffle=True, num_proc=1)
    p = Prefetcher(inner, map_fn=tell_worker, split="replicate", ordered=False, num_proc=2)
    orders: dict[int, list[int]] = {0: [], 1: []}
    async with p:
        while min(map(len, orders.values())) < 50:
            for worker, item in await collect(p):
                orders[worker].append(item)
    first, second = (order[:50] for order in orders.values())
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def tell_worker(item: int) -> tuple[int, int]:
    info = aioprefetch.worker_info()
    assert info is not None
    return info.id, item


def test_no_other_attributes_are_made_up() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = Prefetcher(Numbers(3)).nothing


async def test_repr_names_the_source_and_the_state() -> None:
    p = Prefetcher(TwoShards(3), num_proc=0)
    assert repr(p) == "<Prefetcher of TwoShards, not open, epoch 0>"
    async with p:
        assert repr(p) == "<Prefetcher of TwoShards, open, epoch 0>"
        await collect(p)
    assert repr(p) == "<Prefetcher of TwoShards, not open, epoch 1>"


def test_places_have_no_meaning_here() -> None:
    assert aioprefetch.worker_info() is None
    with pytest.raises(RuntimeError, match="only inside"):
        aioprefetch.rng()
