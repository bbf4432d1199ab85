"""Objects there and back, errors too, and what is said of those that cannot go."""

import collections
import datetime
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioprefetch import SerializationError, TaskError, WorkerDied
from aioprefetch._arena import Reader, Space, Writer
from aioprefetch._codec import (
    Packed,
    decode,
    encode,
    encode_result,
    encode_source,
    receive,
)
from aioprefetch._culprit import explain
from aioprefetch._exceptions import pack_error, unpack_error
from aioprefetch._messages import Lost
from aioprefetch._payload import Intake, Live, Store, encode_values, sent
from aioprefetch._wire import LARGE
from tests import faulty

Way = Callable[[Any], Any]


def as_result(value: Any) -> Any:
    """Through the channel alone, as where there is no shared memory."""
    packed, segments = encode_result(value, None)
    packed = pickle.loads(pickle.dumps(packed))
    return receive(packed, [bytearray(segment) for segment in segments], None).open()


@pytest.fixture(scope="module")
def space() -> Iterator[Space]:
    space = Space.create(1)
    yield space
    space.close_fd()


@pytest.fixture(scope="module")
def as_shared_result(space: Space) -> Way:
    """Through shared memory."""
    writer, reader = Writer(space), Reader(space)

    def way(value: Any) -> Any:
        packed, segments = encode_result(value, writer)
        assert not segments
        return receive(pickle.loads(pickle.dumps(packed)), [], reader).open()

    return way


def as_value(value: Any) -> Any:
    """As a key or item that a worker is sent."""
    payload = encode_values([value])
    message = pickle.loads(pickle.dumps(sent(payload)))
    segments = [] if isinstance(payload, Live) else map(bytearray, payload.segments)
    [back] = Intake(None, keeps=True).open(message, list(segments))
    return back


@pytest.fixture(scope="module")
def as_shared_value() -> Iterator[Way]:
    """The same through shared memory."""
    store = Store()

    def way(value: Any) -> Any:
        payload = store.put(encode_values([value]))
        message = pickle.loads(pickle.dumps(sent(payload)))
        [back] = Intake(store.space, keeps=True).open(message, [])
        return back

    yield way
    store.close()


def as_source(value: Any) -> Any:
    segments = encode_source(value)
    return decode([segments[0], *map(bytearray, segments[1:])])


WAYS: dict[str, Way] = {"result": as_result, "value": as_value, "source": as_source}


@pytest.fixture(params=[*WAYS, "shared_result", "shared_value"])
def way(request: pytest.FixtureRequest) -> Way:
    if request.param not in WAYS:
        shared: Way = request.getfixturevalue(f"as_{request.param}")
        return shared
    return WAYS[request.param]


def same_array(there: Any, back: Any) -> None:
    assert type(back) is type(there)
    assert (back.dtype, back.shape) == (there.dtype, there.shape)
    if there.dtype.hasobject:
        assert there.tolist() == back.tolist()
    else:
        assert there.tobytes() == back.tobytes()
    assert back.flags.writeable or not there.flags.writeable


POINT = np.dtype([("x", "<f4"), ("tag", "S3"), ("box", ">i2", (2,))])

ARRAYS: dict[str, Any] = {
    "0-d": np.array(3.5),
    "empty": np.empty((0, 3), np.int16),
    "empty and large": np.empty((10**6, 0)),
    "bool": np.array([True, False]),
    "big-endian": np.arange(5, dtype=">i4"),
    "structured": np.array([(1.5, b"abc", (1, 2))], POINT),
    "recarray": np.array([(1.5, b"abc", (1, 2))], POINT).view(np.recarray),
    "datetime64": np.array(["2026-01-01", "NaT"], "datetime64[us]"),
    "timedelta64": np.array([1, 2], "timedelta64[ns]"),
    "complex": np.array([1 + 2j]),
    "float16": np.arange(4, dtype=np.float16),
    "text": np.array(["ä", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "object": np.array([None, "a", [1, 2]], object),
    "strided": np.arange(20)[::3],
    "reversed": np.arange(20)[::-1],
    "transposed": np.arange(12).reshape(3, 4).T,
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "sliced": np.arange(1000)[10:20],
    "read-only": np.frombuffer(b"\x01\x02\x03\x04", np.uint8),
    "masked": np.ma.masked_array([1, 2, 3], [False, True, False]),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("large", [False, True])
def test_arrays(name: str, large: bool, way: Way) -> None:
    array = ARRAYS[name]
    if large and array.ndim and array.size:
        array = np.ma.masked_array(np.arange(LARGE)) if name == "masked" else _many(array)
    back = way({"image": array})["image"]
    if name == "masked":
        assert (back == array).all()
    else:
        same_array(array, back)


def _many(array: Any) -> Any:
    """As large as to leave the pickle, with its strides where it has odd ones."""
    tiled = np.tile(array, (LARGE // array.size + 1, *[1] * (array.ndim - 1)))
    return tiled[::-1] if array.strides[0] < 0 else tiled.view(type(array))


# numpy itself turns some arrays to the machine's byte order when it pickles them.
dtypes = (
    hnp.scalar_dtypes()
    | hnp.unicode_string_dtypes(max_len=4)
    | hnp.byte_string_dtypes(max_len=4)
    | hnp.array_dtypes(max_size=3)
).map(lambda dtype: dtype.newbyteorder("="))
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@given(st.data())
@settings(max_examples=100)
def test_any_array(data: st.DataObject) -> None:
    array = data.draw(arrays)
    for way in WAYS.values():
        same_array(array, way(array))


@given(array=arrays, times=st.integers(1, 3 * LARGE))
@settings(max_examples=100)
def test_any_array_in_shared_memory(as_shared_result: Way, array: Any, times: int) -> None:
    array = np.repeat(array.reshape(1, *array.shape), max(1, times // max(1, array.nbytes)), 0)
    same_array(array, as_shared_result([array, array[::2]])[0])
    same_array(array[::2], as_shared_result([array, array[::2]])[1])


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass
class Sample:
    image: Any
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Any


def _deep(levels: int) -> list[Any]:
    return [_deep(levels - 1)] if levels else []


CONTAINERS: dict[str, Any] = {
    "none": None,
    "text": "ä" * 10,
    "long text": "ä" * LARGE,
    "long bytes": b"abc" * LARGE,
    "bytearray": bytearray(b"abc") * LARGE,
    "integers": [0, -1, 2**70],
    "nested": {"a": [(1, {"b": {2.5, 3}}), None], (1, 2): frozenset([3])},
    "deep": _deep(100),
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("abca"),
    "deque": collections.deque([1, 2], maxlen=3),
    "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "scalar": np.float32(1.5),
    "dtype": POINT,
    "type": dict,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str, way: Way) -> None:
    value = CONTAINERS[name]
    back = way(value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("kind", [Pair, Sample, Frozen, lambda *images: list(images)])
@pytest.mark.parametrize("size", [10, LARGE, 10 * LARGE])
def test_arrays_in_containers(kind: Any, size: int, way: Way) -> None:
    image = np.arange(size, dtype=np.uint16)
    value = Pair(image, 3) if kind is Pair else kind(image)
    back = way(value)
    assert type(back) is type(value)
    same_array(image, back[0] if isinstance(back, (list, tuple)) else back.image)


def test_what_is_the_same_stays_the_same(way: Way) -> None:
    array, shared = np.zeros(LARGE), [1]
    first, second, third, fourth = way([array, array, shared, shared])
    assert first is second
    assert third is fourth


def test_a_large_array_is_not_copied_into_the_pickle() -> None:
    array = np.zeros(100 * LARGE, np.uint8)
    for segments in (encode(array), encode_source(array)):
        assert sum(memoryview(segment).nbytes for segment in segments[:-1]) < LARGE
        assert np.shares_memory(np.frombuffer(segments[-1], np.uint8), array)


def test_what_is_read_in_place_is_not_copied(space: Space) -> None:
    array = np.arange(100 * LARGE, dtype=np.uint8)
    packed, _ = encode_result([array, array[: 50 * LARGE].copy()], Writer(space))
    assert isinstance(packed, Packed)
    back, other = receive(packed, [], Reader(space)).open()
    assert not np.shares_memory(back, other)
    assert np.shares_memory(back, space.array(packed.blocks[0]))


def test_values_go_one_by_one_and_those_that_cannot_are_lost() -> None:
    values = [1, np.zeros(LARGE), threading.Lock(), faulty.FailsIn("worker"), "x"]
    back = encode_values(values).open()
    assert (back[0], back[1].shape, back[4]) == (1, (LARGE,), "x")
    assert isinstance(back[2], Lost)
    assert isinstance(back[2].error, SerializationError)


# Errors


def through(error: BaseException) -> BaseException:
    return unpack_error(pickle.loads(pickle.dumps(pack_error(error))))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("name", faulty.NAMES)
def test_any_exception_is_told(name: str) -> None:
    error = TaskError("text", index=1, indices=(1, 2), seq=3, epoch=4, worker=5, stage="map")
    error.__cause__ = raised(faulty.ODD[name]())
    packed = pickle.dumps(pack_error(error))
    assert len(packed) < 100_000
    back = unpack_error(pickle.loads(packed))
    assert isinstance(back, TaskError)
    assert (str(back), back.__dict__) == ("text", error.__dict__)
    cause = back.__cause__
    assert cause is not None
    assert name.strip(":") in f"{type(cause).__name__} {cause.args}"
    assert "in raised" in str(cause.__cause__)


def test_an_exception_with_its_arguments_and_notes() -> None:
    error = raised(KeyError("a", 2))
    error.add_note("a note")
    back = through(error)
    assert type(back) is KeyError
    assert back.args == ("a", 2)
    assert "a note" in str(back.__cause__)


def test_a_death_keeps_its_exit_code() -> None:
    error = WorkerDied("text", index=1)
    error.pid, error.exitcode = 12, -9
    back = through(error)
    assert isinstance(back, WorkerDied)
    assert (back.pid, back.exitcode, back.index) == (12, -9, 1)


@pytest.mark.parametrize("index", [threading.Lock(), faulty.FailsIn("parent"), [1, 2], np.int64(3)])
def test_the_keys_of_an_error_travel_or_are_told(index: Any) -> None:
    error = TaskError("text", index=index, indices=(index, 7))
    error.__cause__ = raised(ValueError())
    back = through(error)
    assert isinstance(back, TaskError)
    assert len(back.indices) == 2
    if isinstance(index, (list, np.int64)):
        assert back.index == index
    else:
        assert type(index).__name__ in str(back.index)


def test_a_chain_of_exceptions_is_in_the_text() -> None:
    def fail() -> None:
        try:
            raise KeyError("the first")
        except KeyError as error:
            raise ValueError("the second") from error

    with pytest.raises(ValueError, match="second") as caught:
        fail()
    assert "the first" in str(through(caught.value).__cause__)


# What cannot go


class Slots:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Base:
    def __init__(self) -> None:
        self.inner = Sample(image={"k": [0, threading.Lock()]})

    def method(self) -> None:
        """Bound, it holds its object."""


def closure() -> Callable[[], Any]:
    held = {"lock": threading.Lock()}
    return lambda: held


GLOBAL_LOCK = threading.Lock()


def uses_global() -> Any:
    return GLOBAL_LOCK


def with_default(lock: Any = GLOBAL_LOCK) -> Any:
    return lock


def in_main(function: Callable[[], Any]) -> Callable[[], Any]:
    """As if defined in ``__main__``, where functions travel with their globals."""
    function.__module__ = "__main__"
    return function


CULPRITS: dict[str, tuple[Any, str]] = {
    "itself": (threading.Lock(), "thing"),
    "attribute": (faulty.Resisting(), "thing.handle"),
    "nested": (Base(), "thing.inner.image['k'][1]"),
    "slot": (Slots(), "thing.lock"),
    "dict": ({"a": {1: threading.Lock()}}, "thing['a'][1]"),
    "tuple": ((1, (threading.Lock(),)), "thing[1][0]"),
    "named tuple": (Pair(1, threading.Lock()), "thing.label"),
    "closure": (closure(), "thing → variable held['lock']"),
    "method": (Base().method, "thing.__self__.inner.image['k'][1]"),
    "partial": (functools.partial(max, threading.Lock()), "thing.args[0]"),
    "keyword": (functools.partial(max, key=threading.Lock()), "thing.keywords['key']"),
    "global": (in_main(uses_global), "thing → global GLOBAL_LOCK"),
    "default": (in_main(with_default), "thing → default 0"),
    "generator": ([(n for n in range(3))], "thing[0]"),
}


@pytest.mark.parametrize("name", CULPRITS)
def test_the_part_that_resists_is_named(name: str) -> None:
    value, path = CULPRITS[name]
    text = explain(value, "thing")
    assert text.startswith(f"{path} cannot be pickled: ")
    assert ("generator" if name == "generator" else "lock") in text


@pytest.mark.parametrize(
    "encoder", [encode, encode_source, lambda value: encode_result(value, None)]
)
def test_it_is_named_by_whatever_encodes(encoder: Callable[[Any], Any]) -> None:
    with pytest.raises(SerializationError, match=r"inner\.image\['k'\]\[1\] cannot be pickled"):
        encoder(Base())


def test_an_object_that_contains_itself_is_explained() -> None:
    value: dict[str, Any] = {"lock": threading.Lock()}
    value["self"] = value
    assert "thing['lock'] cannot be pickled" in explain(value, "thing")
