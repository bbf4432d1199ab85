"""Tensors over the memory that batches come in; torch's own view of its workers and seeds."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make conformance")

from torch.nn.utils.rnn import pack_sequence  # noqa: E402
from torch.utils.data import get_worker_info  # noqa: E402

from aioprefetch import Prefetcher  # noqa: E402
from aioprefetch._arena import Reader, Space, Writer  # noqa: E402
from aioprefetch._codec import Packed, encode_result, plain_dumps, receive  # noqa: E402
from aioprefetch._collate import allocate, default_collate  # noqa: E402
from aioprefetch.torch import collate, to  # noqa: E402
from tests.conformance.torch_sources import (  # noqa: E402
    Drawing,
    Given,
    Pairs,
    Telling,
    TellingMap,
    collate_and_look,
    collate_and_look_later,
    grow,
    initial_seed,
    is_shared,
    what_is_imported,
)

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

# torch takes seconds to import: once here, not in every worker.
multiprocessing.set_forkserver_preload(["aioprefetch._serve", "torch"])

TENSORS: dict[str, Any] = {
    "float": torch.rand(300, 4),
    "large": torch.rand(300, 400),
    "small": torch.rand(3),
    "bfloat16": torch.rand(2000).to(torch.bfloat16),
    "bfloat16 of no dimension": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty bfloat16": torch.empty(0, 3, dtype=torch.bfloat16),
    "float8": torch.rand(64).to(torch.float8_e4m3fn),
    "half": torch.rand(9).half(),
    "bool": torch.tensor([True, False]),
    "unsigned": torch.arange(5).to(torch.uint16),
    "complex": torch.rand(5, dtype=torch.complex64),
    "half complex": torch.rand(4).half().view(torch.complex32),
    "conjugate": torch.rand(5, dtype=torch.complex64).conj(),
    "negative": torch.rand(5, dtype=torch.complex64).conj().imag,
    "of no dimension": torch.tensor(4.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.rand(40, 50).T,
    "channels last": torch.rand(2, 3, 8, 9).to(memory_format=torch.channels_last),
    "every other": torch.rand(400)[::2],
    "expanded": torch.ones(1).expand(300),
    "leaf": torch.rand(200).requires_grad_(),
    "parameter": torch.nn.Parameter(torch.rand(200)),
    "sparse": torch.eye(4).to_sparse(),
    "without data": torch.empty(3, device="meta"),
}


@one_loop
@pytest.mark.parametrize("num_proc", [0, 1])
async def test_tensors_come_as_they_are(num_proc: int) -> None:
    p = Prefetcher(Given([[t, "more"] for t in TENSORS.values()]), num_proc=num_proc)
    got = [item async for item in p]
    for (name, expected), (tensor, _) in zip(TENSORS.items(), got, strict=True):
        for attribute in ("dtype", "layout", "shape", "device", "requires_grad", "is_leaf"):
            assert getattr(tensor, attribute) == getattr(expected, attribute), (name, attribute)
        assert type(tensor) is type(expected), name
        assert expected.is_meta or torch.equal(values_of(tensor), values_of(expected)), name


def values_of(tensor: Any) -> Any:
    if tensor.dtype in (torch.float8_e4m3fn, torch.complex32):
        return tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int32)
    return tensor.to_dense()


@pytest.mark.parametrize("name", ["transposed", "channels last", "bfloat16"])
def test_dense_tensors_keep_their_strides_without_a_copy(name: str) -> None:
    (back,), copies = there_and_back([TENSORS[name]])
    assert back.stride() == TENSORS[name].stride()
    assert torch.equal(back, TENSORS[name])
    assert copies == 1


class CountingWriter(Writer):
    """Counts what is copied into shared memory."""

    copies = 0

    def copy(self, *args: Any) -> None:
        self.copies += 1
        super().copy(*args)

    def view(self, *args: Any) -> Any:
        self.copies += 1
        return super().view(*args)


def there_and_back(value: Any) -> tuple[Any, int]:
    """What a parent gets of a worker's result, and how many copies that took."""
    space = Space.create(1)
    writer, reader = CountingWriter(space), Reader(space)
    packed, segments = encode_result(value, writer)
    assert not segments
    back = receive(packed, [], reader).open()
    space.close_fd()
    return back, writer.copies


@pytest.mark.parametrize("function", [default_collate, collate])
@pytest.mark.parametrize(
    "item",
    [
        torch.rand(64, 64),
        torch.rand(64, 64).T,
        torch.rand(64, 64).to(torch.bfloat16),
        np.random.rand(64, 64),
        torch.nn.Parameter(torch.rand(64, 64)),
    ],
    ids=["float", "transposed", "bfloat16", "array", "parameter"],
)
def test_a_batch_is_written_once_and_handed_over_where_it_was(function: Any, item: Any) -> None:
    space = Space.create(1)
    writer, reader = CountingWriter(space), Reader(space)
    token = allocate.set(writer.empty)
    try:
        batch = function([{"x": item}] * 4)
    finally:
        allocate.reset(token)
    packed, segments = encode_result(batch, writer)
    back = receive(packed, segments, reader).open()
    assert isinstance(packed, Packed)
    assert (writer.copies, len(segments), len(packed.blocks)) == (0, 0, 1)
    assert address(back["x"]) == address(batch["x"])  # one mapping has both ends
    assert type(back["x"]) is type(batch["x"])
    assert back["x"].dtype == batch["x"].dtype
    assert torch.equal(torch.as_tensor(back["x"][2]), torch.as_tensor(item))
    space.close_fd()


def address(values: Any) -> int:
    return int(values.ctypes.data if isinstance(values, np.ndarray) else values.data_ptr())


@one_loop
@pytest.mark.parametrize("how", [{}, {"collate_fn": collate}, {"collate_fn": torch.stack}])
async def test_a_batch_lies_in_the_memory_that_the_worker_wrote(how: dict[str, Any]) -> None:
    assert not is_shared(torch.ones(4096))
    p = Prefetcher(Given([torch.full((64, 64), float(n)) for n in range(8)]), batch_size=4, **how)
    async with p:
        held = []
        async for batch in p:
            assert is_shared(batch)
            held.append(batch[1:].add_(1))  # a view keeps all of it, and may be written
    del batch
    assert all(map(is_shared, held))
    assert [float(x) for batch in held for x in batch[:, 0, 0]] == [2, 3, 4, 6, 7, 8]


@one_loop
async def test_a_collate_of_the_user_s_stacks_in_place_through_ours() -> None:
    source = Given([torch.full((64, 64), float(n)) for n in range(8)])
    p = Prefetcher(source, batch_size=4, collate_fn=collate_and_look)
    assert [in_place async for _, in_place in p] == [True, True]
    # While one waits, what another has made and not sent is given back.
    p = Prefetcher(source, batch_size=4, collate_fn=collate_and_look_later)
    got = [pair async for pair in p]
    assert [in_place for _, in_place in got] == [False, False]
    assert torch.equal(torch.cat([batch for batch, _ in got]), torch.stack(source.items))


@one_loop
async def test_tensors_go_to_workers_too() -> None:
    tensors = [torch.full((64, 64), n, dtype=torch.bfloat16) for n in range(4)]
    p = Prefetcher(iter(tensors), map_fn=grow, split="parent", num_proc=2)
    assert [float(tensor[0, 0]) async for tensor in p] == [1, 2, 3, 4]
    assert [float(tensor[0, 0]) for tensor in tensors] == [0, 1, 2, 3]


@one_loop
async def test_what_was_computed_comes_as_its_values() -> None:
    (tensor,) = there_and_back([torch.ones(3).requires_grad_() * 2])[0]
    assert not tensor.requires_grad
    assert tensor.tolist() == [2, 2, 2]


def test_what_is_set_on_a_tensor_stays() -> None:
    tensor = torch.rand(3)
    tensor.origin = "mine"
    (back, again), _ = there_and_back([tensor, tensor])
    assert back.origin == "mine"
    assert back is again


@dataclass
class Record:
    """Has neither a way of its own to be pickled, nor a tensor."""

    value: Any


def test_other_objects_are_pickled_as_ever() -> None:
    value = [Record(1), {"a": np.float32(2)}, Record]
    assert plain_dumps(value) == pickle.dumps(value, protocol=5)
    (back, tensor), _ = there_and_back([Record(1), torch.ones(1)])
    assert back == Record(1)
    assert tensor == torch.ones(1)


@one_loop
async def test_a_worker_that_imports_it_does_not_import_what_starts_workers() -> None:
    p = Prefetcher(range(2), batch_size=2, collate_fn=what_is_imported)
    assert [names async for names in p] == [["aioprefetch.torch"]]


# Workers and seeds


@one_loop
@pytest.mark.parametrize("num_proc", [1, 2])
async def test_torch_knows_its_workers(num_proc: int) -> None:
    told = [item async for item in Prefetcher(Telling(), num_proc=num_proc)]
    assert [item[:3] for item in told] == [(n, num_proc, True) for n in range(num_proc)]
    told = [item async for item in Prefetcher(TellingMap(4), num_proc=num_proc)]
    assert {(workers, own) for _, workers, own, _ in told} == {(num_proc, True)}
    assert {number for number, _, _, _ in told} <= set(range(num_proc))
    assert get_worker_info() is None


@one_loop
async def test_torch_s_seed_is_another_in_each_worker_and_each_epoch() -> None:
    """As in torch, but the same in every run."""
    runs = []
    for _ in range(2):
        async with Prefetcher(Telling(), num_proc=2, epochs=2) as p:
            runs.append([seed async for *_, seed in p])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4
    assert all(0 <= seed < 2**63 for seed in runs[0])
    mapped = Prefetcher(TellingMap(1), num_proc=1, epochs=2)
    assert len({seed async for *_, seed in mapped}) == 2


@one_loop
async def test_torch_is_seeded_when_a_worker_begins() -> None:
    p = Prefetcher(Telling(), num_proc=2, worker_init_fn=initial_seed, map_fn=None)
    assert len([item async for item in p]) == 2


@one_loop
async def test_a_stream_is_torch_s_worker_on_any_worker() -> None:
    """Three streams that go on, on two workers, of which one has two of them."""
    three = Prefetcher(Telling(), split="worker", num_proc=3)
    p = Prefetcher(Telling(), split="worker", num_proc=2)
    p.load_state_dict(three.state_dict())
    assert [item[:3] async for item in p] == [(n, 3, True) for n in range(3)]


@one_loop
async def test_a_thread_is_not_torch_s_worker() -> None:
    told = [item async for item in Prefetcher(TellingMap(2), num_proc=0)]
    assert told == [None, None]
    assert get_worker_info() is None


@one_loop
async def test_torch_is_seeded_by_item() -> None:
    runs = [[x async for x in Prefetcher(Drawing(6), num_proc=num_proc)] for num_proc in (1, 2)]
    assert len(runs[0]) == len(runs[1]) == 6
    assert all(map(torch.equal, *runs))
    assert len({float(x[0]) for x in runs[0]}) == 6


# Transfer


class Wrapped(NamedTuple):
    tensor: Any
    name: str


@dataclass(frozen=True)
class Derived:
    """Its second field is made of the first."""

    tensor: Any
    name: str
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        assert not self.tensor.is_meta, "it was made anew"
        object.__setattr__(self, "double", self.tensor * 2)


class Movable:
    """Not a tensor, but knows where it is; has the least that a user would write."""

    device = "nowhere"

    def to(self, device: Any) -> Movable:
        moved = Movable()
        moved.device = str(device)
        return moved


class Pinnable:
    """As torch's documentation has it: a batch that pins itself."""

    pinned = False

    def pin_memory(self) -> Pinnable:
        self.pinned = True
        return self


def everywhere(tensor: Any) -> Any:
    counted = defaultdict(int, {"tensor": tensor})
    return {
        "a": tensor,
        "list": [tensor, (tensor, "text")],
        "named": Wrapped(tensor, "d"),
        "fields": Derived(tensor, "e"),
        "counted": counted,
        "numbers": range(3),
        "text": "a",
    }


def tensors_in(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Derived):
        yield from (value.tensor, value.double)
    elif not isinstance(value, str):
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(parts, (list, tuple)) or parts is not value else ():
            yield from tensors_in(part)


def test_to_moves_tensors_wherever_they_are() -> None:
    tensor = torch.ones(2)
    batch = everywhere(tensor)
    moved = to("meta")(batch)
    assert len(list(tensors_in(moved))) == 7
    assert all(part.is_meta for part in tensors_in(moved))
    assert not any(part.is_meta for part in tensors_in(batch))
    assert [type(moved[key]) for key in moved] == [type(batch[key]) for key in batch]
    assert (moved["list"][1][1], moved["named"].name, moved["fields"].name) == ("text", "d", "e")
    assert moved["counted"]["new"] == 0
    assert moved["numbers"] is batch["numbers"]


def test_what_moves_by_itself_does() -> None:
    assert to("meta")([Movable()])[0].device == "meta"
    packed = to("meta")(pack_sequence([torch.ones(2), torch.ones(1)]))
    assert packed.data.is_meta
    assert not packed.batch_sizes.is_meta


def test_where_nothing_moves_a_batch_is_handed_over_as_it_is() -> None:
    batch = everywhere(torch.ones(2))
    assert to("cpu")(batch) is batch
    assert to(None)(batch) is batch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_pinned() -> None:
    batch = [torch.ones(2), Pinnable()]
    assert to(None, pin_memory=True)(batch) is batch
    assert not batch[1].pinned


@one_loop
async def test_to_is_a_transfer() -> None:
    async with Prefetcher(Pairs(), batch_size=4, num_proc=1, transfer=to("meta")) as p:
        texts = []
        async for batch in p:
            assert batch["image"].is_meta
            texts += batch["text"]
    assert texts == [f"item {n}" for n in range(13)]


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@one_loop
@on_a_gpu
@pytest.mark.parametrize("pin_memory", [False, True])
async def test_batches_arrive_on_the_gpu(pin_memory: bool) -> None:
    transfer = to("cuda", pin_memory=pin_memory)
    source = Given([torch.full((256, 256), float(n)) for n in range(64)])
    async with Prefetcher(source, batch_size=8, num_proc=2, transfer=transfer) as p:
        sums = [batch.sum(dim=(1, 2)) async for batch in p]
    assert torch.cat(sums).tolist() == [n * 65536.0 for n in range(64)]


@one_loop
@on_a_gpu
async def test_a_batch_may_be_dropped_before_the_gpu_has_used_it() -> None:
    """Its memory is not the next one's until the work that waits for it is done."""
    transfer = to("cuda", pin_memory=True)
    source = Given([torch.full((512, 512), float(n)) for n in range(64)])
    sums = []
    async with Prefetcher(source, batch_size=4, num_proc=2, transfer=transfer) as p:
        async for batch in p:
            torch.cuda._sleep(50_000_000)  # tens of milliseconds, in which others arrive
            sums.append(batch.sum(dim=(1, 2)))
            del batch
    assert torch.cat(sums).tolist() == [n * 262144.0 for n in range(64)]


@on_a_gpu
def test_pinned_batches() -> None:
    tensor, thing = to(None, pin_memory=True)([torch.ones(2), Pinnable()])
    assert tensor.is_pinned()
    assert thing.pinned
