"""The same dataset through torch's DataLoader and through a Prefetcher: the same batches."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import OrderedDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import default_collate_fn_map  # noqa: E402

from aioprefetch import Prefetcher  # noqa: E402
from aioprefetch.torch import collate, from_dataloader  # noqa: E402
from tests.conformance.torch_sources import (  # noqa: E402
    Dividing,
    Eager,
    Endless,
    Given,
    Grouped,
    Marked,
    Pairs,
    Plain,
    Points,
    Repeated,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

# torch takes seconds to import: once here, not in every worker.
multiprocessing.set_forkserver_preload(["aioprefetch._serve", "torch"])


def same(ours: Any, theirs: Any) -> bool:
    """Whether they are equal to the bit, in type, dtype and shape."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return bool(ours.dtype == theirs.dtype and torch.equal(ours, theirs))
    if isinstance(ours, np.ndarray):
        return bool(ours.dtype == theirs.dtype and np.array_equal(ours, theirs))
    if isinstance(ours, (dict, MappingProxyType)):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple, deque, UserList)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


async def read(p: Prefetcher) -> list[Any]:
    return [batch async for batch in p]


async def check(make_loader: Callable[[], DataLoader[Any]], epochs: int = 1) -> None:
    """A loader, and a Prefetcher made of another like it, give the same."""
    theirs, ours = make_loader(), from_dataloader(make_loader())
    for _ in range(epochs):
        expected = list(theirs)
        assert len(expected) > 0
        assert same(await read(ours), expected)


# Map-style

MAPS: dict[str, dict[str, Any]] = {
    "one by one": {"batch_size": 1},
    "batches": {"batch_size": 4},
    "drop_last": {"batch_size": 4, "drop_last": True},
    "without batches": {"batch_size": None},
    "a sampler": {"batch_size": 3, "sampler": [5, 3, 1, 1, 0, 12]},
    "a tensor of keys": {"batch_size": 3, "sampler": torch.tensor([5, 3, 1])},
    "a batch sampler": {"batch_sampler": [[1, 2], [0], [5, 5, 5]]},
    "some in their order": {"batch_size": 2, "sampler": SequentialSampler(range(5))},
    "a list of items": {"batch_size": 3, "collate_fn": list},
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
        Subset(Grouped(), [7, 3, 3, 9]),
        ConcatDataset([Plain(3), Plain(4)]),
        TensorDataset(torch.arange(20).reshape(10, 2), torch.rand(10)),
        [torch.tensor(n) for n in range(7)],
    ],
    ids=["getitems", "subset", "subset of getitems", "concat", "tensors", "a list"],
)
@one_loop
async def test_datasets(dataset: Any) -> None:
    await check(lambda: DataLoader(dataset, batch_size=3, num_workers=1))


@one_loop
async def test_a_dataset_without_a_length() -> None:
    await check(lambda: DataLoader(Endless(), batch_size=2, sampler=[3, 5, 10**9], num_workers=1))
    await check(lambda: DataLoader(Endless(), batch_sampler=[[3, 5], [7]]))
    with pytest.raises(TypeError, match=r"Endless has no len\(\): give a sampler"):
        Prefetcher(Endless())


# Samplers


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
@pytest.mark.parametrize(
    "how",
    [
        {"shuffle": True},
        {"sampler": WeightedRandomSampler([1.0] * 13, 20)},
        {"sampler": SubsetRandomSampler(range(13))},
        {"sampler": Eager()},
        {"batch_size": None, "sampler": Eager()},
        {"batch_size": 1, "batch_sampler": BatchSampler(Eager(), 3, drop_last=False)},
    ],
    ids=["shuffle", "weighted", "subset", "draws at once", "not in batches", "in a batch sampler"],
)
async def test_orders_by_the_global_seed(how: dict[str, Any]) -> None:
    loader = DataLoader(Plain(), **{"batch_size": 4, **how})
    torch.manual_seed(3)
    expected = [list(loader) for _ in range(2)]
    torch.manual_seed(3)
    p = from_dataloader(loader)
    assert same([await read(p) for _ in range(2)], expected)
    assert not same(*expected)


def distributed(rank: int) -> Any:
    return DistributedSampler(range(13), num_replicas=3, rank=rank, seed=5)


@one_loop
@pytest.mark.parametrize("rank", range(3))
async def test_distributed_epochs(rank: int) -> None:
    theirs = distributed(rank)
    loader = DataLoader(Plain(), batch_size=2, sampler=theirs)
    p = from_dataloader(DataLoader(Plain(), batch_size=2, sampler=distributed(rank)))
    epochs = []
    for epoch in range(3):
        theirs.set_epoch(epoch)  # which a Prefetcher does by itself
        epochs.append(list(loader))
        assert same(await read(p), epochs[-1])
    assert not same(epochs[0], epochs[1])


# Iterables


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
async def test_datapipes_are_refused() -> None:
    datapipes = pytest.importorskip("torch.utils.data.datapipes.iter")
    loader = DataLoader(datapipes.IterableWrapper(range(9)).sharding_filter(), num_workers=2)
    with pytest.raises(ValueError, match=r"IterDataPipe.*split='parent'"):
        from_dataloader(loader)
    p = Prefetcher(loader.dataset, split="parent", num_proc=2)
    assert await read(p) == list(range(9))


# Training


@one_loop
async def test_a_network_sees_the_same_data() -> None:
    """Trained through either it ends with the same weights."""
    theirs, ours = Training(), Training()
    for batch in DataLoader(Points(), batch_size=16, num_workers=2):
        theirs.step(*batch)
    async for batch in Prefetcher(Points(), batch_size=16, num_proc=2, collate_fn=collate):
        ours.step(*batch)
    assert len(theirs.losses) == 16
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


# Collate

Pair = namedtuple("Pair", ["x", "y"])


def leaves() -> st.SearchStrategy[Callable[[int], Any]]:
    """What makes the n-th item of a batch, in a way of its own for each kind of item."""
    dtypes = st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    )
    shapes = st.lists(st.integers(0, 3), max_size=3)
    tensors = st.builds(lambda t, s: lambda n: torch.full(s, n).to(t), dtypes, shapes)
    arrays = st.builds(
        lambda t, s: lambda n: np.full(s, n, t), st.sampled_from(["f4", "f8", "i2", "?"]), shapes
    )
    others: list[Callable[[int], Any]] = [
        int, float, bool, str, complex, np.float32, np.int16, np.bool_, np.str_,
        lambda n: str(n).encode(),
        lambda n: torch.full((2, 3), n).T,
        lambda n: torch.full((3,), n, dtype=torch.float32).as_subclass(Marked),
        lambda n: torch.full((1,), n).expand(4),
        lambda n: np.full((2, 3), n).T,
        lambda n: np.full(3, "a"),
        lambda n: bytearray(b"ab"),
        lambda n: range(n, n + 2),
        lambda n: [n] * n,
        lambda n: torch.full((n,), n),
        lambda n: torch.tensor(n, dtype=torch.float64 if n else torch.float32),
        lambda n: None,
        lambda n: {n},
        lambda n: n if n else float(n),
        lambda n: {"a": n} if n else {"a": n, "b": n},
    ]  # fmt: skip
    return tensors | arrays | st.sampled_from(others)


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    kinds: list[Callable[[Sequence[Any]], Any]] = [
        list, tuple, deque, UserList,
        lambda made: dict(enumerate(made)),
        lambda made: OrderedDict(enumerate(made)),
        lambda made: defaultdict(list, enumerate(made)),
        lambda made: MappingProxyType(dict(enumerate(made))),
        lambda made: Pair(made[0], made[-1]),
    ]  # fmt: skip
    return st.builds(
        lambda kind, parts: lambda n: kind([part(n) for part in parts]),
        st.sampled_from(kinds),
        st.lists(parts, min_size=1, max_size=3),
    )


@given(st.recursive(leaves(), containers, max_leaves=4), st.integers(1, 3))
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_the_default_collate_of_torch(make: Callable[[int], Any], size: int) -> None:
    items = [make(n) for n in range(size)]
    assert same(outcome(collate, items), outcome(default_collate, items))


def outcome(function: Callable[[Any], Any], items: list[Any]) -> Any:
    """What it gives, or what it raises."""
    try:
        return function(items)
    except Exception as error:
        return [type(error), str(error)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_sparse_and_nested_tensors_are_refused_as_torch_does() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)])):
        refusal = outcome(collate, [tensor] * 2)
        assert refusal[0] is RuntimeError
        assert refusal == outcome(default_collate, [tensor] * 2)


def test_rules_that_users_of_torch_have_added() -> None:
    def count(batch: Any, *, collate_fn_map: Any = None) -> int:
        return len(batch)

    default_collate_fn_map[Points] = count
    try:
        assert collate([[Points(), torch.ones(2)]] * 3)[0] == 3
    finally:
        del default_collate_fn_map[Points]


# What becomes of a loader


@one_loop
async def test_what_a_loader_has_that_is_not_carried_over_is_said() -> None:
    with pytest.warns(UserWarning, match="timeout=5 is not carried over") as told:
        from_dataloader(DataLoader(Plain(), num_workers=1, timeout=5))
    assert told[0].filename == __file__


def arguments(loader: DataLoader[Any], **overrides: Any) -> dict[str, Any]:
    config = from_dataloader(loader, **overrides)._config
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def test_a_loader_s_arguments_arrive() -> None:
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
        persistent_workers=True,
        pin_memory=True,
    )
    got = arguments(loader, retries=0)
    asked = {
        "source": loader.dataset,
        "num_proc": 2,
        "retries": 0,
        "num_prefetch": 6,
        "ordered": False,
        "worker_init_fn": print,
        "collate_fn": list,
        "seed": 7,
        "batch_size": 2,
        "sampler": None,
    }
    assert {name: got[name] for name in asked} == asked
    assert got["mp_context"].get_start_method() == "spawn"
    assert callable(got["transfer"])


def test_what_a_loader_says_nothing_of_is_left_alone() -> None:
    torch.manual_seed(11)
    got = arguments(DataLoader(Plain()))
    plain = Prefetcher(Plain())._config
    for name in ("num_prefetch", "mp_context", "worker_init_fn", "transfer", "sampler", "ordered"):
        assert got[name] == getattr(plain, name), name
    assert (got["seed"], got["num_proc"], got["collate_fn"]) == (11, 0, collate)


@one_loop
async def test_overrides_win() -> None:
    loader = DataLoader(
        Plain(), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="spawn"
    )
    p = from_dataloader(loader, shuffle=True, num_proc=0, seed=5)
    q = Prefetcher(Plain(), batch_size=4, shuffle=True, num_proc=0, seed=5, collate_fn=collate)
    got = await read(p)
    assert len(got) == 4
    assert same(got, await read(q))
    assert arguments(loader, num_proc=3)["num_prefetch"] == 6
    keys = arguments(loader, batch_sampler=[[1]])
    assert (keys["batch_sampler"], keys["sampler"], keys["batch_size"]) == ([[1]], None, None)


def test_items_that_are_batched_after_all_or_no_longer() -> None:
    batched = DataLoader(Plain(), batch_size=4, drop_last=True)
    single = DataLoader(Plain(), batch_size=None)
    assert arguments(batched, batch_size=None)["collate_fn"] is default_convert
    assert arguments(single, batch_size=4)["collate_fn"] is collate
    assert arguments(single)["collate_fn"] is default_convert
    prepared = DataLoader(Given([[1, 2], [3]]), batch_size=None, collate_fn=default_collate)
    assert arguments(prepared)["collate_fn"] is collate
