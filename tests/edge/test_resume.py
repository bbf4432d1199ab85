"""Others' datasets, left in the middle of an epoch and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioprefetch import Prefetcher
from tests.edge.run import load_example

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


async def whole_and_in_two(source: Any, cut: int, **arguments: Any) -> tuple[list[Any], list[Any]]:
    """All batches, and those of a run that goes on elsewhere after some of them."""
    whole = [batch async for batch in Prefetcher(source, num_proc=2, **arguments)]
    p = Prefetcher(source, num_proc=2, **arguments)
    iterator = aiter(p)
    first = [await anext(iterator) for _ in range(cut)]
    state = json.loads(json.dumps(p.state_dict()))
    await iterator.aclose()
    q = Prefetcher(source, num_proc=1, **arguments)
    q.load_state_dict(state)
    return whole, first + [batch async for batch in q]


def plain(batches: list[Any]) -> str:
    return json.dumps(batches, default=lambda array: array.tolist())


@one_loop
@pytest.mark.parametrize("shuffled", [False, True])
async def test_a_stream_of_hugging_face_goes_on_by_its_own_state(shuffled: bool) -> None:
    example = load_example("huggingface", "datasets")
    source = example.make_stream(40, 4)
    if shuffled:
        source = source.shuffle(seed=1, buffer_size=1)  # its state leaves the buffer out
    whole, in_two = await whole_and_in_two(source, 5, num_shards=4, batch_size=2)
    assert plain(in_two) == plain(whole)
    p = Prefetcher(source, num_shards=4, num_proc=0)
    iterator = aiter(p)
    for _ in range(6):
        await anext(iterator)
    assert all("state" in stream for stream in p.state_dict()["streams"])
    await iterator.aclose()


@one_loop
async def test_a_dataset_of_hugging_face_goes_on_by_position() -> None:
    example = load_example("huggingface", "datasets")
    source = example.make_dataset(40)
    whole, in_two = await whole_and_in_two(source, 3, batch_size=4, shuffle=True)
    assert plain(in_two) == plain(whole)


@one_loop
async def test_tar_files_are_read_again(tmp_path: Path) -> None:
    example = load_example("webdataset_tars", "webdataset")
    tars = example.Tars(example.write_tars(tmp_path, 5, 12))
    whole, in_two = await whole_and_in_two(tars, 7, num_shards=5, batch_size=3)
    assert plain(in_two) == plain(whole)
