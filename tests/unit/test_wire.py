"""Frames over a socketpair, in whatever pieces they come."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioprefetch._wire import (
    LARGE,
    BlockingChannel,
    Channel,
    Frame,
    FrameReader,
    FrameWriter,
    Segment,
)
from tests.processes import eventually

EDGES = [0, 1, 8, LARGE - 1, LARGE, LARGE + 1, 65_535, 65_536, 65_537, 5 * LARGE]
sizes = st.sampled_from(EDGES) | st.integers(0, 300)
frame_sizes = st.lists(st.lists(sizes, max_size=4), max_size=5)
pieces = st.lists(st.sampled_from([1, 3, 11, 100, 4096, 70_000]), min_size=1, max_size=8)


@contextlib.contextmanager
def socketpair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def frames_of(sizes: list[list[int]]) -> list[Frame]:
    """Frames of segments that differ from each other."""
    numbers = iter(range(10**6))
    return [[bytes([next(numbers) % 251]) * size for size in frame] for frame in sizes]


def plain(frames: list[Frame]) -> list[list[bytes]]:
    return [[bytes(segment) for segment in frame] for frame in frames]


def read_all(sock: socket.socket) -> bytes:
    data = bytearray()
    with contextlib.suppress(BlockingIOError):
        while chunk := sock.recv(1 << 20):
            data += chunk
    return bytes(data)


def written(frames: list[Frame]) -> bytes:
    """What a writer makes of them."""
    writer, data = FrameWriter(), bytearray()
    with socketpair() as (ours, theirs):
        for frame in frames:
            writer.push(frame)
        while not writer.flush(ours):
            data += read_all(theirs)
        return bytes(data + read_all(theirs))


def received(data: bytes, cuts: list[int]) -> tuple[list[Frame], bool]:
    """What a reader makes of bytes that come in pieces and then end, and whether it is open."""
    reader, frames, cut = FrameReader(), list[Frame](), 0
    with socketpair() as (ours, theirs):
        rest = memoryview(data)
        while rest:
            sent = ours.send(rest[: cuts[cut % len(cuts)]])
            rest, cut = rest[sent:], cut + 1
            more, is_open = reader.receive(theirs)
            frames += more
            if not is_open:
                return frames, False
        ours.close()
        is_open = True
        while is_open:
            more, is_open = reader.receive(theirs)
            frames += more
        return frames, is_open


@given(frame_sizes, pieces)
@settings(max_examples=150)
def test_frames_come_as_they_went(sizes: list[list[int]], cuts: list[int]) -> None:
    frames = frames_of(sizes)
    data = written(frames)
    cuts = [max(cut, len(data) // 2000) for cut in cuts]
    assert plain(received(data, cuts)[0]) == plain(frames)


@given(frame_sizes, pieces, st.data())
@settings(max_examples=150)
def test_a_half_frame_is_never_delivered(
    sizes: list[list[int]], cuts: list[int], data: st.DataObject
) -> None:
    frames = frames_of(sizes)
    ends = [len(written(frames[: n + 1])) for n in range(len(frames))]
    whole = written(frames)
    stop = data.draw(
        st.sampled_from([*ends, *(end - 1 for end in ends)] or [0]) if ends else st.just(0)
    )
    stop = data.draw(st.sampled_from([stop, data.draw(st.integers(0, len(whole)))]))
    cuts = [max(cut, stop // 2000) for cut in cuts]
    complete = sum(end <= stop for end in ends)
    assert plain(received(whole[:stop], cuts)[0]) == plain(frames[:complete])


@given(st.binary(max_size=300), st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=300)
def test_rubbish_is_an_end_and_no_error(rubbish: bytes, segments: list[bytes]) -> None:
    """It may come after whole frames, which are delivered."""
    frame: Frame = list(segments)
    frames, is_open = received(written([frame]) + rubbish, [64])
    assert plain(frames[:1]) == plain([frame])
    assert not is_open


def test_truncated_at_every_byte() -> None:
    frames = frames_of([[3, 0, 5], [], [1]])
    whole = written(frames)
    ends = [len(written(frames[: n + 1])) for n in range(len(frames))]
    for stop in range(len(whole) + 1):
        complete = sum(end <= stop for end in ends)
        assert plain(received(whole[:stop], [1])[0]) == plain(frames[:complete])


def test_a_frame_of_very_many_segments() -> None:
    frames = frames_of([[1] * 5000, [LARGE] * 20])
    assert plain(received(written(frames), [65_536])[0]) == plain(frames)


def test_large_segments_are_writable_memory_of_their_own() -> None:
    [frame], _ = received(written(frames_of([[LARGE, LARGE + 5]])), [1000])
    for segment in frame:
        array = np.frombuffer(segment, np.uint8)
        array[:] = 7
    assert {bytes(segment[:1]) for segment in frame} == {b"\x07"}


@pytest.mark.parametrize(
    "segment",
    [bytearray(b"abcd"), memoryview(b"abcd"), np.arange(4, dtype=">i4").data, memoryview(b"")],
)
def test_segments_of_any_kind(segment: Any) -> None:
    assert plain(received(written([[segment]]), [5])[0]) == [[bytes(segment)]]


# On a loop


class End:
    """One end of a pair: a channel, and what it has heard."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames: list[Frame] = []
        self.ends = 0
        self.channel = Channel(
            asyncio.get_running_loop(), sock, self.frames.append, self._count_end
        )

    def _count_end(self) -> None:
        self.ends += 1


@contextlib.asynccontextmanager
async def end_and_peer() -> AsyncIterator[tuple[End, socket.socket]]:
    with socketpair() as (ours, theirs):
        end = End(ours)
        try:
            yield end, theirs
        finally:
            end.channel.detach()


async def test_both_ends_send_more_than_a_socket_holds() -> None:
    """Neither reads before it has sent, so blocking would be for ever."""
    frames = frames_of([[2**22, 5, 0], [], [2**21], [1, 2, 3]] * 3)
    async with end_and_peer() as (left, peer):
        right = End(peer)
        for frame in frames:
            left.channel.send(frame)
            right.channel.send(frame)
        assert await eventually(lambda: len(left.frames) + len(right.frames) == 24, 10)
        assert plain(left.frames) == plain(right.frames) == plain(frames)
        right.channel.detach()


async def test_a_peer_that_reads_slowly_gets_all_in_order() -> None:
    frames = frames_of([[100_000, 3], [200_000], [7]])
    data = bytearray()
    async with end_and_peer() as (end, peer):
        for frame in frames:
            end.channel.send(frame)  # returns though nobody reads
        expected = written(frames)
        while len(data) < len(expected):
            data += await asyncio.get_running_loop().sock_recv(peer, 10_007)
    assert bytes(data) == expected


async def test_a_peer_that_stops_in_a_frame_holds_nobody_up() -> None:
    data = written(frames_of([[5], [LARGE * 3, 9]]))
    async with end_and_peer() as (end, peer):
        peer.send(data[: LARGE * 2])
        assert await eventually(lambda: end.frames, 2)
        ticks = 0
        for _ in range(20):
            await asyncio.sleep(0)
            ticks += 1
        assert (ticks, len(end.frames)) == (20, 1)
        peer.setblocking(True)
        peer.sendall(data[LARGE * 2 :])
        assert await eventually(lambda: len(end.frames) == 2, 2)
    assert plain(end.frames) == plain(frames_of([[5], [LARGE * 3, 9]]))


@pytest.mark.parametrize("cut", [0, 1, 3, 11, 17, LARGE])
async def test_the_end_is_told_once_and_after_what_came(cut: int) -> None:
    frames = frames_of([[5], [LARGE * 2]])
    data = written(frames)
    first = len(written(frames[:1]))
    async with end_and_peer() as (end, peer):
        peer.send(data[: first + cut])
        peer.close()
        assert await eventually(lambda: end.ends, 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert end.ends == 1
        assert plain(end.frames) == plain(frames[:1])
        end.channel.send([b"to nobody"])
        end.channel.drain()
        assert end.ends == 1


async def test_draining_reads_all_that_the_dead_wrote() -> None:
    frames = frames_of([[1000] * 3] * 40)
    async with end_and_peer() as (end, peer):
        peer.send(written(frames))
        peer.close()
        end.channel.drain()  # without a turn of the loop
        assert plain(end.frames) == plain(frames)
        assert end.ends == 1


async def test_nothing_is_heard_once_detached() -> None:
    async with end_and_peer() as (end, peer):
        end.channel.detach()
        peer.send(written([[b"late"]]))
        peer.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert (end.frames, end.ends) == ([], 0)


# On a thread


def test_a_thread_and_a_loop_understand_each_other() -> None:
    def echo(sock: socket.socket) -> None:
        channel = BlockingChannel(sock)
        with contextlib.suppress(EOFError):
            while True:
                channel.send(channel.receive())

    async def main() -> list[Frame]:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=echo, args=(theirs,))
        thread.start()
        end = End(ours)
        for frame in frames:
            end.channel.send(frame)
        assert await eventually(lambda: len(end.frames) == len(frames), 10)
        end.channel.detach()
        ours.close()
        thread.join()
        theirs.close()
        return end.frames

    frames = frames_of([[3], [2**22, 0, 2**21], [], [LARGE]])
    assert plain(asyncio.run(main())) == plain(frames)


def test_a_blocking_end_is_told_of_the_end() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        segment: Segment = b"abc"
        BlockingChannel(ours).send([segment])
        ours.close()
        channel = BlockingChannel(theirs)
        assert plain([channel.receive()]) == [[b"abc"]]
        with pytest.raises(EOFError):
            channel.receive()
