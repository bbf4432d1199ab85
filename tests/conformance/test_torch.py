"""Tensors over the memory that batches come in; torch's own view of its workers and seeds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make conformance")

from torch.utils.data import get_worker_info  # noqa: E402

from aioprefetch import Prefetcher  # noqa: E402
from aioprefetch._collate import allocate, default_collate  # noqa: E402
from aioprefetch.torch import collate, to  # noqa: E402
from tests.conformance.torch_sources import (  # noqa: E402
    Drawing,
    Pairs,
    Telling,
    TellingMap,
)

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

TENSORS: dict[str, Any] = {
    "float": torch.rand(300, 4),
    "small": torch.rand(3),
    "bfloat16": torch.rand(2000).to(torch.bfloat16),
    "float8": torch.rand(64).to(torch.float8_e4m3fn),
    "half": torch.rand(9).half(),
    "bool": torch.tensor([True, False]),
    "complex": torch.rand(5, dtype=torch.complex64),
    "conjugate": torch.rand(5, dtype=torch.complex64).conj(),
    "of no dimension": torch.tensor(4.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.rand(40, 50).T,
    "every other": torch.rand(400)[::2],
    "expanded": torch.ones(1).expand(300),
    "leaf": torch.rand(200).requires_grad_(),
    "sparse": torch.eye(4).to_sparse(),
}


@one_loop
@pytest.mark.parametrize("num_proc", [0, 1])
async def test_tensors_come_as_they_are(num_proc: int) -> None:
    p = Prefetcher(Given([[t, "more"] for t in TENSORS.values()]), num_proc=num_proc)
    got = [item async for item in p]
    for (name, expected), (tensor, _) in zip(TENSORS.items(), got, strict=True):
        assert tensor.dtype == expected.dtype, name
        assert tensor.layout == expected.layout, name
        assert tensor.requires_grad == expected.requires_grad, name
        assert torch.equal(values_of(tensor), values_of(expected)), name


def values_of(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor.to_dense()


class Given:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Computed:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3).requires_grad_() * 2


@one_loop
async def test_what_was_computed_comes_as_its_values() -> None:
    (tensor,) = [item async for item in Prefetcher(Computed(), num_proc=1)]
    assert not tensor.requires_grad


def root_of(array: Any) -> Any:
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


@one_loop
@pytest.mark.parametrize("how", [{}, {"collate_fn": collate}, {"collate_fn": torch.stack}])
async def test_a_batch_lies_in_the_memory_that_the_worker_wrote(how: dict[str, Any]) -> None:
    p = Prefetcher(Given([torch.full((64, 64), float(n)) for n in range(8)]), batch_size=4, **how)
    async with p:
        held = []
        async for batch in p:
            assert not isinstance(root_of(batch.numpy()), np.ndarray)  # a mapping
            batch.add_(1)
            held.append(batch)
    assert [float(batch[n, 0, 0]) for batch in held for n in range(4)] == list(range(1, 9))


@pytest.mark.parametrize("function", [default_collate, collate])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_stacked_in_place(function: Any, dtype: Any) -> None:
    """One copy in all: into the array that the worker's memory gave."""
    given: list[np.ndarray] = []

    def empty(*args: Any) -> Any:
        given.append(np.empty(*args))
        return given[-1]

    token = allocate.set(empty)
    try:
        batch = function([{"x": torch.ones(5, dtype=dtype)} for _ in range(3)])
    finally:
        allocate.reset(token)
    (array,) = given
    assert batch["x"].data_ptr() == array.ctypes.data
    assert torch.equal(batch["x"], torch.ones(3, 5, dtype=dtype))


def test_parameters_are_stacked_without_their_graph() -> None:
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    assert torch.equal(default_collate(weights), torch.ones(2, 3))
    assert not default_collate(weights).requires_grad


# Workers and seeds


@one_loop
@pytest.mark.parametrize("num_proc", [1, 2])
async def test_torch_knows_its_workers(num_proc: int) -> None:
    told = [item async for item in Prefetcher(Telling(), num_proc=num_proc)]
    assert told == [(n, num_proc, True, True) for n in range(num_proc)]
    told = [item async for item in Prefetcher(TellingMap(4), num_proc=num_proc)]
    assert {(workers, own) for _, workers, own in told} == {(num_proc, True)}
    assert {number for number, _, _ in told} <= set(range(num_proc))
    assert get_worker_info() is None


@one_loop
async def test_a_stream_is_torch_s_worker_on_any_worker() -> None:
    """Three streams that go on, on two workers, of which one has two of them."""
    three = Prefetcher(Telling(), split="worker", num_proc=3)
    p = Prefetcher(Telling(), split="worker", num_proc=2)
    p.load_state_dict(three.state_dict())
    assert [item async for item in p] == [(n, 3, True, True) for n in range(3)]


@one_loop
async def test_a_thread_is_not_torch_s_worker() -> None:
    told = [item async for item in Prefetcher(TellingMap(2), num_proc=0)]
    assert told == [None, None]


@one_loop
async def test_torch_is_seeded_by_item() -> None:
    runs = [[x async for x in Prefetcher(Drawing(6), num_proc=num_proc)] for num_proc in (1, 2)]
    assert all(map(torch.equal, *runs))
    assert len({float(x[0]) for x in runs[0]}) == 6


# Transfer


class Wrapped(NamedTuple):
    tensor: Any
    name: str


class Movable:
    """Not a tensor, but knows where it is."""

    device = "nowhere"

    def to(self, device: Any, non_blocking: bool) -> Movable:
        moved = Movable()
        moved.device = str(device)
        return moved


def test_to_finds_tensors_wherever_they_are() -> None:
    tensor, movable = torch.ones(2), Movable()
    batch = {"a": tensor, "b": [tensor, (tensor, "text")], "c": Wrapped(tensor, "d"), "e": movable}
    moved = to("meta")(batch)
    assert moved["a"].device.type == moved["b"][0].device.type == "meta"
    assert moved["b"][1] == (moved["b"][1][0], "text")
    assert moved["c"].tensor.device.type == "meta"
    assert moved["c"].name == "d"
    assert moved["e"].device == "meta"
    assert tensor.device.type == "cpu"
    assert to("cpu")(batch)["a"].data_ptr() == tensor.data_ptr()
    assert to(None, pin_memory=True)(tensor).tolist() == [1.0, 1.0]


@one_loop
async def test_to_is_a_transfer() -> None:
    async with Prefetcher(Pairs(), batch_size=4, num_proc=1, transfer=to("meta")) as p:
        async for batch in p:
            assert batch["image"].device.type == "meta"
            assert batch["text"][0].startswith("item")


@one_loop
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("pin_memory", [False, True])
async def test_batches_arrive_on_the_gpu(pin_memory: bool) -> None:
    transfer = to("cuda", pin_memory=pin_memory)
    source = Given([torch.full((256, 256), float(n)) for n in range(64)])
    async with Prefetcher(source, batch_size=8, num_proc=2, transfer=transfer) as p:
        sums = [batch.sum(dim=(1, 2)) async for batch in p]
    assert torch.cat(sums).tolist() == [n * 65536.0 for n in range(64)]
