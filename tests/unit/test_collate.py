import sys
import types
from array import array
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    defaultdict,
    deque,
    namedtuple,
)
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioprefetch._collate import default_collate


class Point(NamedTuple):
    x: Any
    y: Any


Other = namedtuple("Other", ["x", "y"])


class Labels(list[Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


class Record(dict[str, Any]):
    source = "unset"


class Column(np.ndarray[Any, Any]):
    pass


@dataclass(frozen=True, slots=True)
class Sample:
    image: Any
    label: Any


@dataclass
class Scored:
    values: Any
    doubled: Any = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.values * 2


@dataclass
class Picky:
    label: int

    def __post_init__(self) -> None:
        if not isinstance(self.label, int):
            raise TypeError("label must be an int")


class Shared(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its storage."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_ = values

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.values_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


class Stubborn(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> NoReturn:
        raise AttributeError("read-only")


class Repeated(Sequence[Any]):
    """A sequence that cannot be built from its values."""

    def __init__(self, value: Any, times: int) -> None:
        self.value, self.times = value, times

    def __getitem__(self, index: Any) -> Any:
        return [self.value] * self.times

    def __iter__(self) -> Iterator[Any]:
        return iter([self.value] * self.times)

    def __len__(self) -> int:
        return self.times


def assert_same(actual: Any, expected: Any) -> None:
    """Equal in value, and in every type and dtype on the way."""
    assert type(actual) is type(expected)
    if isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected, strict=True)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, Sample):
        assert_same((actual.image, actual.label), (expected.image, expected.label))
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


RGB = np.dtype([("r", "u1"), ("xy", ">f4", (2,))])
INTS = np.array([1, 2])
TEXT_U3 = np.array([["abc"], ["de"]], "U3")


def f32(*values: Any) -> Any:
    return np.array(values, np.float32)


BATCHES: dict[str, tuple[list[Any], Any]] = {
    "bool": ([True, False], np.array([True, False])),
    "int": ([1, -(2**63)], np.array([1, -(2**63)])),
    "float": ([1.0, float("nan")], np.array([1.0, np.nan])),
    "complex": ([1j, 2 + 0j], np.array([1j, 2])),
    "str": (["a", "bc"], ["a", "bc"]),
    "str_": ([np.str_("a"), "b"], [np.str_("a"), "b"]),
    "bytes": ([b"a", b"bc"], [b"a", b"bc"]),
    "numpy scalar": ([np.uint64(2**64 - 1), np.uint64(0)], np.array([2**64 - 1, 0], np.uint64)),
    "float16": ([np.float16(1), np.float16(2)], np.array([1, 2], np.float16)),
    "float64 among floats": ([1.0, np.float64(2)], np.array([1.0, 2.0])),
    "int among int64": ([np.int64(1), 2], np.array([1, 2])),
    "datetime64": ([np.datetime64("2020-01-01")] * 2, np.array(["2020-01-01"] * 2, "M8[D]")),
    "void": (list(np.zeros(2, RGB)), np.zeros(2, RGB)),
    "array": ([f32(1, 2), f32(3, 4)], f32([1, 2], [3, 4])),
    "one item": ([f32(1, 2)], f32([1, 2])),
    "0-d": ([np.array(1, "i2"), np.array(2, "i2")], np.array([1, 2], "i2")),
    "empty": ([np.zeros((0, 3))] * 2, np.zeros((2, 0, 3))),
    "empty inside": ([np.zeros((2, 0))] * 3, np.zeros((3, 2, 0))),
    "structured": ([np.ones(3, RGB)] * 2, np.ones((2, 3), RGB)),
    "big-endian": ([np.arange(3, dtype=">i4")] * 2, np.array([[0, 1, 2]] * 2, ">i4")),
    "timedelta": ([np.array([1], "m8[ms]")] * 2, np.array([[1], [1]], "m8[ms]")),
    "unicode array": ([np.array(["abc"]), np.array(["de"], "U3")], TEXT_U3),
    "bytes array": ([np.array([b"a"])] * 2, np.array([[b"a"], [b"a"]], "S1")),
    "not contiguous": (
        [np.arange(6).reshape(2, 3).T] * 2,
        np.array([[[0, 3], [1, 4], [2, 5]]] * 2),
    ),
    "subclass": ([INTS.view(Column), INTS], np.array([[1, 2], [1, 2]])),
    "dict": (
        [{"a": 1, "b": "x"}, {"b": "y", "a": 2}],
        {"a": INTS, "b": ["x", "y"]},
    ),
    "other dict type": ([OrderedDict(a=1), {"a": 2}], OrderedDict(a=INTS)),
    "dict subclass": ([Record(a=1), Record(a=2)], Record(a=INTS)),
    "Counter": ([Counter(a=1), Counter(a=2)], Counter({"a": INTS})),
    "UserDict": ([UserDict(a=1), UserDict(a=2)], UserDict(a=INTS)),
    "ChainMap": ([ChainMap({"a": 1}), ChainMap({"a": 2})], ChainMap({"a": INTS})),
    "mapping proxy": (
        [types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 2})],
        types.MappingProxyType({"a": INTS}),
    ),
    "stubborn dict": ([Stubborn(a=1), Stubborn(a=2)], {"a": INTS}),
    "namedtuple": ([Point(1, "a"), Point(2, "b")], Point(INTS, ["a", "b"])),
    "tuple": ([(1, "a"), (2, "b")], (INTS, ["a", "b"])),
    "tuple subclass": ([Pair([1]), Pair([2])], Pair([INTS])),
    "empty tuple": ([(), ()], ()),
    "list": ([[1, 2.0], [2, 4.0]], [INTS, np.array([2.0, 4.0])]),
    "list subclass": ([Labels([1]), [2]], Labels([INTS])),
    "UserList": ([UserList([1]), UserList([2])], UserList([INTS])),
    "deque": ([deque([1], 3), deque([2], 3)], deque([INTS], 3)),
    "range": ([range(1, 3), range(1, 3)], [np.array([1, 1]), np.array([2, 2])]),
    "array.array": ([array("d", [1.0])], [np.array([1.0])]),
    "not to be rebuilt": ([Repeated(1, 1), Repeated(2, 1)], [INTS]),
    "dataclass": ([Sample(f32(1), "a"), Sample(f32(2), "b")], Sample(f32([1], [2]), ["a", "b"])),
    "nested": (
        [{"a": (1, [Point(1.0, "x")])}, {"a": (2, [Point(2.0, "y")])}],
        {"a": (INTS, [Point(np.array([1.0, 2.0]), ["x", "y"])])},
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batch(case: str) -> None:
    items, expected = BATCHES[case]
    assert_same(default_collate(items), expected)


OUT = "give collate_fn=..., or "
PATH = f"{type(Path()).__module__}.{type(Path()).__name__}"  # Pythons differ in the module
ERRORS: dict[str, tuple[list[Any], type[Exception], str]] = {
    "no items": ([], ValueError, "a batch needs at least one item"),
    "None": (
        [None, 1],
        TypeError,
        f"item: None at position 0 of the batch cannot be collated; {OUT}put a value in its place",
    ),
    "None later": (
        [{"a": (1, f32(1))}, {"a": (1, None)}],
        TypeError,
        "item['a'][1]: None at position 1 of the batch cannot be collated",
    ),
    "unknown type": (
        [{"path": Path("x")}],
        TypeError,
        f"item['path']: {PATH} at position 0 of the batch cannot be collated; {OUT}conv",
    ),
    "set": ([{1}], TypeError, "item: set at position 0"),
    "a dataclass itself": ([Sample], TypeError, "item: type at position 0"),
    "shapes": (
        [{"image": [np.zeros((3, 4))]}, {"image": [np.zeros((3, 4))]}, {"image": [np.zeros(3)]}],
        ValueError,
        (
            "item['image'][0]: shape (3,) at position 2 of the batch, shape (3, 4) at position 0; "
            f"{OUT}pad, crop or resize"
        ),
    ),
    "shapes of equal size": (
        [np.zeros((3, 2)), np.zeros((2, 2)), np.zeros((4, 2))],
        ValueError,
        "item: shape (2, 2) at position 1 of the batch, shape (3, 2) at position 0",
    ),
    "dtypes": (
        [np.zeros(2), f32(1, 2)],
        TypeError,
        (
            "item: numpy.ndarray of float32 at position 1 of the batch, "
            f"numpy.ndarray of float64 at position 0; {OUT}convert to one type"
        ),
    ),
    "byte orders": ([np.zeros(2, "<i4"), np.zeros(2, ">i4")], TypeError, "of >i4 at position 1"),
    "text widths": ([np.array(["a"]), np.array(["ab"])], TypeError, "of <U2 at position 1"),
    "array and list": ([INTS, [1, 2]], TypeError, "list at position 1"),
    "array and scalar": ([np.array(1), np.int64(1)], TypeError, "scalar of int64 at position 1"),
    "objects": (
        [np.array([1, None])],
        TypeError,
        (
            "item: arrays of object hold references to Python objects and cannot be stacked; "
            f"{OUT}return a list"
        ),
    ),
    "objects in a structure": ([Point(np.zeros(1, [("a", "O")]), 1)], TypeError, "item.x: arrays"),
    "object in a scalar": ([np.zeros(1, [("a", "O")])[0]], TypeError, "item: arrays of"),
    "matrix": ([np.zeros((2, 2)).view(np.matrix)], TypeError, "matrix of float64 at position 0"),
    "masked": ([INTS, np.ma.array([1, 2])], TypeError, "MaskedArray of int64 at position 1"),
    "int and float": ([1, 2.5], TypeError, "item: float at position 1 of the batch, int at pos"),
    "int and bool": ([1, True], TypeError, "item: bool at position 1 of the batch, int at pos"),
    "int and str": ([1, 2, "3"], TypeError, "item: str at position 2 of the batch, int at pos"),
    "str and bytes": (["1", b"2"], TypeError, "item: bytes at position 1 of the batch, str at"),
    "scalar dtypes": ([np.int32(1), 2], TypeError, "int at position 1 of the batch, scalar of in"),
    "units": (
        [np.datetime64("2020-01-01", "D"), np.datetime64("2020-01-01", "s")],
        TypeError,
        "scalar of datetime64[s] at position 1 of the batch, scalar of datetime64[D]",
    ),
    "large int": (
        [{"id": 1}, {"id": 2**63}],
        ValueError,
        f"item['id']: the int at position 1 of the batch does not fit int64; {OUT}return it as",
    ),
    "very small int": ([-(2**63) - 1], ValueError, "item: the int at position 0"),
    "missing key": (
        [{"a": {"b": 1, "c": 1}}, {"a": {"b": 1}}],
        ValueError,
        (
            "item['a']: key 'c' is missing at position 1 of the batch, present at position 0; "
            f"{OUT}return the same keys"
        ),
    ),
    "additional key": (
        [{"a": 1}, {"a": 1}, {"a": 1, "b": 1}],
        ValueError,
        "item: key 'b' is missing at position 0 of the batch, present at position 2",
    ),
    "default key": (
        [defaultdict(int, a=1), defaultdict(int)],
        ValueError,
        "item: key 'a' is missing at position 1",
    ),
    "dict and list": ([{"a": 1}, [1]], TypeError, "item: list at position 1 of the batch, dict"),
    "ragged": (
        [([1, 2],), ([1],)],
        ValueError,
        (
            "item[0]: length 1 at position 1 of the batch, length 2 at position 0; "
            f"{OUT}pad or cut to one length"
        ),
    ),
    "ragged the other way": ([[1], [1, 2]], ValueError, "item: length 2 at position 1"),
    "ragged tuples": ([(1,), (1, 2)], ValueError, "item: length 2 at position 1"),
    "list and tuple": ([[1], (1,), 1], TypeError, "item: int at position 2 of the batch, list"),
    "tuple and list": ([(1,), [1]], TypeError, "item: list at position 1 of the batch, tuple"),
    "namedtuples": ([Point(1, 2), Other(1, 2)], TypeError, "Other at position 1 of the batch"),
    "inside a namedtuple": ([Point(1, 2), Point(1, None)], TypeError, "item.y: None"),
    "dataclasses": ([Sample(1, 2), Scored(1)], TypeError, "Scored at position 1 of the batch"),
    "inside a dataclass": ([Sample(1, [2]), Sample(1, [None])], TypeError, "item.label[0]: None"),
    "picky dataclass": (
        [(Picky(1),)],
        TypeError,
        (
            "Picky cannot be built from collated fields (label must be an int); "
            f"{OUT}return a dict from every item"
        ),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error(case: str) -> None:
    items, kind, text = ERRORS[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        default_collate(items)
    assert type(caught.value) is kind
    assert text in str(caught.value)


@pytest.mark.parametrize("case", [case for case in ERRORS if case != "no items"])
def test_each_error_names_path_and_way_out(case: str) -> None:
    items, kind, _ = ERRORS[case]
    with pytest.raises(kind, match=r"^item.*: .*; give collate_fn=\.\.\., or "):
        default_collate(items)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="needs numpy 2")
def test_variable_width_text_is_refused() -> None:
    with pytest.raises(TypeError, match="arrays of StringDType"):
        default_collate([np.array(["a"], np.dtypes.StringDType())])


def test_memmap(tmp_path: Path) -> None:
    rows = np.memmap(tmp_path / "rows", np.int16, "w+", shape=(4, 3))
    rows[:] = np.arange(12).reshape(4, 3)
    assert_same(default_collate(list(rows)), np.arange(12, dtype=np.int16).reshape(4, 3))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_the_batch_is_contiguous_and_its_own(shape: tuple[int, ...]) -> None:
    items = [np.zeros(shape, order="F") for _ in range(3)]
    batch = default_collate(items)
    assert batch.flags.c_contiguous
    assert batch.flags.writeable
    assert not any(np.shares_memory(batch, item) for item in items)


def test_a_copy_keeps_what_a_container_holds_besides_values() -> None:
    record = Record(a=1)
    record.source = "disk"
    assert default_collate([record]).source == "disk"
    assert default_collate([defaultdict(list, a=1)]).default_factory is list
    assert default_collate([deque([1], 3)]).maxlen == 3
    assert default_collate([deque(maxlen=3)]).maxlen == 3


@pytest.mark.parametrize(
    "item",
    [Record(a=1), Shared({"a": 1}), UserDict(a=1), ChainMap({"a": 1}), UserList([1]), deque([1])],
    ids=lambda item: type(item).__name__,
)
def test_the_items_are_not_changed(item: Any) -> None:
    batch = default_collate([item])
    assert type(batch) is type(item)
    values = item.values() if isinstance(item, Mapping) else item
    assert list(values) == [1]


def test_fields_outside_init_are_made_anew() -> None:
    batch = default_collate([Scored(1), Scored(2)])
    assert_same(batch.doubled, np.array([2, 4]))


def test_any_sequence_of_items_will_do() -> None:
    assert_same(default_collate((1, 2)), INTS)
    assert_same(default_collate(deque([1, 2])), INTS)


leaves: list[st.SearchStrategy[Any]] = [
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=3),
    st.binary(max_size=3),
    hnp.arrays(np.float32, (2, 3), elements=st.just(1.5)),
    hnp.arrays(">i2", (), elements=st.integers(0, 9)),
    hnp.arrays("M8[s]", 2),
    st.integers(0, 255).map(np.uint8),
]


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Strategies for items of one structure, around the strategies that `inner` draws."""
    several = st.lists(inner, max_size=3)
    return st.one_of(
        several.map(lambda parts: st.tuples(*parts)),
        several.map(lambda parts: st.tuples(*parts).map(list)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(st.fixed_dictionaries),
        st.tuples(inner, inner).map(lambda parts: st.builds(Point, *parts)),
        st.tuples(inner, inner).map(lambda parts: st.builds(Sample, *parts)),
    )


structures = st.recursive(st.sampled_from(leaves), containers, max_leaves=8)


def taken(batch: Any, position: int, like: Any) -> Any:
    """The item at `position`, given one like it to tell a column of text from a list."""
    if isinstance(like, dict):
        return {key: taken(batch[key], position, like[key]) for key in like}
    if isinstance(like, Sample):
        parts = [(batch.image, like.image), (batch.label, like.label)]
        return Sample(*(taken(part, position, one) for part, one in parts))
    if isinstance(like, tuple | list):
        parts = [taken(part, position, one) for part, one in zip(batch, like, strict=True)]
        return Point(*parts) if isinstance(like, Point) else type(like)(parts)
    if isinstance(like, np.ndarray):
        return batch[position, ...]
    return batch[position] if isinstance(like, str | bytes | np.generic) else batch[position].item()


@given(st.data())
def test_a_batch_holds_its_items(data: st.DataObject) -> None:
    structure = data.draw(structures)
    items = data.draw(st.lists(structure, min_size=1, max_size=4))
    batch = default_collate(items)
    for position, item in enumerate(items):
        assert_same(taken(batch, position, item), item)


def test_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    batch = default_collate([{"x": torch.ones(2)}, {"x": torch.zeros(2)}])
    assert torch.equal(batch["x"], torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    parameters = [torch.nn.Parameter(torch.ones(2), requires_grad=False)] * 2
    assert torch.equal(default_collate(parameters), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"item: shape \(3,\) at position 1 of the batch"):
        default_collate([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match=r"item: torch.Tensor of torch.int64 at position 1"):
        default_collate([torch.ones(2), torch.tensor([1, 2])])
    with pytest.raises(TypeError, match=r"item: numpy.ndarray of int64 at position 1"):
        default_collate([torch.ones(2), INTS])
    with pytest.raises(TypeError, match=r"torch.Tensor .*at position 0 of the batch cannot be"):
        default_collate([torch.eye(2).to_sparse()])


class FakeTensor:
    shape = (2,)
    dtype = layout = "of torch"
    device = types.SimpleNamespace(type="elsewhere")
    is_nested = False


def test_tensors_are_recognised_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [FakeTensor(), FakeTensor()]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TypeError, match="FakeTensor at position 0 of the batch cannot be collated"):
        default_collate(tensors)
    torch = types.SimpleNamespace(Tensor=FakeTensor, strided="of torch", stack=list)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert default_collate(tensors) == tensors
    with pytest.raises(TypeError, match="item: None at position 1 of the batch"):
        default_collate([FakeTensor(), None])
