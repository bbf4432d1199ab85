"""Datasets of other libraries through torch's DataLoader and through a Prefetcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make conformance")

from torch.utils.data import DataLoader

from aioprefetch.torch import from_dataloader
from tests.edge.run import load_example

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


def plain(batches: list[Any]) -> str:
    return json.dumps(batches, default=lambda tensor: tensor.tolist())


@one_loop
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
async def test_a_stream_of_hugging_face(num_workers: int) -> None:
    example = load_example("huggingface", "datasets")

    def loader() -> DataLoader[Any]:
        return DataLoader(example.make_stream(41, 4), batch_size=3, num_workers=num_workers)

    assert plain([b async for b in from_dataloader(loader())]) == plain(list(loader()))


@one_loop
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
async def test_five_tar_files(num_workers: int, tmp_path: Path) -> None:
    example = load_example("webdataset_tars", "webdataset")
    import webdataset

    files = example.write_tars(tmp_path, 5, 7)

    def loader() -> DataLoader[Any]:
        source = webdataset.WebDataset(files, shardshuffle=False)
        samples = source.decode().to_tuple("__key__", "npy", "cls")
        return DataLoader(samples, batch_size=3, num_workers=num_workers)

    assert plain([b async for b in from_dataloader(loader())]) == plain(list(loader()))
