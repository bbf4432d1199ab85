"""The same dataset through torch's DataLoader and through a Prefetcher: the same batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make conformance")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from aioprefetch import Prefetcher  # noqa: E402
from aioprefetch.torch import collate, from_dataloader  # noqa: E402
from tests.conformance.torch_sources import (  # noqa: E402
    Dividing,
    Grouped,
    Pairs,
    Plain,
    Points,
    Repeated,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


def same(ours: Any, theirs: Any) -> bool:
    """Whether they are equal to the bit, in type, dtype and shape."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return bool(ours.dtype == theirs.dtype and torch.equal(ours, theirs))
    if isinstance(ours, np.ndarray):
        return bool(ours.dtype == theirs.dtype and np.array_equal(ours, theirs))
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


async def check(make_loader: Callable[[], DataLoader[Any]], epochs: int = 1, **others: Any) -> None:
    theirs, ours = make_loader(), from_dataloader(make_loader(), **others)
    for _ in range(epochs):
        expected = list(theirs)
        got = [batch async for batch in ours]
        assert len(got) == len(expected)
        assert all(map(same, got, expected))


MAPS: dict[str, dict[str, Any]] = {
    "one by one": {"batch_size": 1},
    "batches": {"batch_size": 4},
    "drop_last": {"batch_size": 4, "drop_last": True},
    "without batches": {"batch_size": None},
    "a sampler": {"batch_size": 3, "sampler": [5, 3, 1, 1, 0, 12]},
    "a batch sampler": {"batch_sampler": [[1, 2], [0], [5, 5, 5]]},
    "keys of a batch": {"batch_size": None, "sampler": SequentialSampler(range(13))},
}


@one_loop
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", MAPS)
async def test_map_style(how: str, num_workers: int) -> None:
    await check(lambda: DataLoader(Pairs(), num_workers=num_workers, **MAPS[how]))


@pytest.mark.parametrize(
    "dataset",
    [
        Grouped(),
        Subset(Pairs(), [7, 3, 3, 9]),
        ConcatDataset([Pairs(3), Plain(3)]),
        TensorDataset(torch.arange(20).reshape(10, 2), torch.rand(10)),
        [torch.tensor(n) for n in range(7)],
    ],
    ids=["getitems", "subset", "concat", "tensors", "a list"],
)
@one_loop
async def test_datasets(dataset: Any) -> None:
    size = 1 if isinstance(dataset, ConcatDataset) else 3
    await check(lambda: DataLoader(dataset, batch_size=size, num_workers=1))


def seeded() -> Any:
    return torch.Generator().manual_seed(7)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(range(13), generator=seeded()),
    "with replacement": lambda: RandomSampler(
        range(13), replacement=True, num_samples=30, generator=seeded()
    ),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 0.0, 5.0], 20, generator=seeded()),
    "subset": lambda: SubsetRandomSampler([4, 2, 9, 11], generator=seeded()),
}


@one_loop
def distributed() -> Any:
    return DistributedSampler(range(13), num_replicas=3, rank=1, seed=5)


@pytest.mark.parametrize("how", SAMPLERS)
async def test_samplers(how: str) -> None:
    await check(lambda: DataLoader(Plain(), batch_size=4, sampler=SAMPLERS[how]()), epochs=2)


@one_loop
async def test_batch_samplers_of_torch() -> None:
    await check(
        lambda: DataLoader(
            Plain(), batch_sampler=BatchSampler(SAMPLERS["random"](), 4, drop_last=True)
        ),
        epochs=2,
    )


@one_loop
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_shuffle_with_a_generator(num_workers: int) -> None:
    await check(
        lambda: DataLoader(
            Plain(), batch_size=4, shuffle=True, num_workers=num_workers, generator=seeded()
        ),
        epochs=2,
    )


@one_loop
async def test_shuffle_by_the_global_seed() -> None:
    loader = DataLoader(Plain(), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    expected = list(loader)
    torch.manual_seed(3)
    got = [batch async for batch in from_dataloader(loader)]
    assert all(map(same, got, expected))


@one_loop
async def test_distributed_epochs() -> None:
    theirs, ours = distributed(), distributed()
    loader = DataLoader(Plain(), batch_size=2, sampler=theirs)
    p = from_dataloader(DataLoader(Plain(), batch_size=2, sampler=ours))
    for epoch in range(3):
        theirs.set_epoch(epoch)  # which a Prefetcher does by itself
        assert all(map(same, [batch async for batch in p], list(loader)))


@one_loop
@pytest.mark.parametrize("dataset", [Dividing(), Repeated(9), Dividing(2)])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
async def test_iterables_that_divide_themselves(dataset: Any, num_workers: int) -> None:
    await check(lambda: DataLoader(dataset, batch_size=3, num_workers=num_workers))


@one_loop
@pytest.mark.parametrize("how", [{"batch_size": 4, "drop_last": True}, {"batch_size": None}])
async def test_iterables_in_other_ways(how: dict[str, Any]) -> None:
    await check(lambda: DataLoader(Dividing(), num_workers=2, **how), epochs=2)
    await check(lambda: DataLoader(Dividing(), num_workers=0, **how))


@one_loop
async def test_a_network_sees_the_same_data() -> None:
    """Trained through either it ends with the same weights."""
    theirs, ours = Training(), Training()
    for batch in DataLoader(Points(), batch_size=16, num_workers=2):
        theirs.step(*batch)
    async for batch in Prefetcher(Points(), batch_size=16, num_proc=2, collate_fn=collate):
        ours.step(*batch)
    assert theirs.losses[-1] < theirs.losses[0]
    assert ours.losses == theirs.losses
    assert all(map(torch.equal, ours.net.parameters(), theirs.net.parameters()))


class Training:
    """A small network, and how it learns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.losses: list[float] = []

    def step(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.net(x)[:, 0], y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def test_the_default_collate_of_torch() -> None:
    cases: list[list[Any]] = [
        [torch.rand(3), torch.rand(3)],
        [torch.rand(3, 2).T, torch.rand(2, 3)],
        [torch.tensor(1), torch.tensor(2)],
        [torch.empty(0, 3)] * 2,
        [torch.ones(2, dtype=torch.bfloat16)] * 3,
        [torch.ones(2), torch.ones(2, dtype=torch.float64)],
        [np.arange(3), np.arange(3)],
        [np.float32(1), np.float32(2)],
        [1, 2],
        [1.5, 2.5],
        [True, False],
        ["a", "b"],
        [b"a", b"b"],
        [{"a": 1, "b": [1.0, 2]}, {"a": 2, "b": [3.0, 4]}],
        [(1, 2.0), (3, 4.0)],
        [[torch.ones(2), "x"], [torch.zeros(2), "y"]],
        [range(2), range(2)],
        [Pairs()[0], Pairs()[1]],
    ]
    for items in cases:
        assert same(collate(items), torch.utils.data.default_collate(items)), items
    for wrong in (
        [torch.ones(2), torch.ones(3)],
        [[1, 2], [1]],
        [np.array(["a"])] * 2,
        [None, None],
        [object(), object()],
        [torch.eye(2).to_sparse()] * 2,
    ):
        with pytest.raises((TypeError, RuntimeError)) as theirs:
            torch.utils.data.default_collate(wrong)
        with pytest.raises(type(theirs.value)):
            collate(wrong)


@one_loop
async def test_what_a_loader_has_that_is_not_carried_over_is_said() -> None:
    with pytest.warns(UserWarning, match="timeout=5 is not carried over"):
        from_dataloader(DataLoader(Plain(), num_workers=1, timeout=5))


@one_loop
async def test_a_loader_s_arguments_arrive() -> None:
    loader = DataLoader(
        Plain(),
        batch_size=2,
        num_workers=2,
        prefetch_factor=3,
        in_order=False,
        multiprocessing_context="spawn",
        worker_init_fn=print,
        collate_fn=list,
        generator=seeded(),
    )
    config = from_dataloader(loader, num_proc=1, retries=0)._config
    asked = {
        "num_proc": 1,
        "retries": 0,
        "num_prefetch": 6,
        "ordered": False,
        "worker_init_fn": print,
        "collate_fn": list,
        "seed": 7,
        "batch_size": 2,
    }
    got = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    assert {name: got[name] for name in asked} == asked
    assert got["mp_context"].get_start_method() == "spawn"


@one_loop
async def test_overrides_win() -> None:
    loader = DataLoader(Plain(), batch_size=4, shuffle=True, num_workers=1)
    p = from_dataloader(loader, sampler=None, shuffle=True, num_proc=0)
    q = Prefetcher(Plain(), batch_size=4, shuffle=True, num_proc=0, collate_fn=collate)
    assert all(map(same, [b async for b in p], [b async for b in q]))
