"""Frames on a socket, for both ends.

A frame is any number of segments, and the stream may stop at any byte, in either direction:

    u32 count │ u64 length × count │ the segments

A large segment is received straight into memory of its own, which becomes the memory of
the array in it. A half frame at the end of the stream is never delivered.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

Segment = bytes | bytearray | memoryview
Frame = list[Segment]

LARGE = 16 * 1024  # bytes from which a segment gets writable memory of its own
_CHUNK = 64 * 1024
_READS = 8  # reads a wake-up: one busy peer must not hold the loop
_MOMENT = 0.0003  # seconds of frames after which it is another's turn
_VIEWS = 64  # buffers a sendmsg: well under every IOV_MAX
_MOST_SEGMENTS = 1 << 20
_LONGEST = 1 << 46  # bytes of a segment
_COUNT = struct.Struct("<I")


class FrameReader:
    """Puts frames together from a stream that may stop at any byte."""

    def __init__(self) -> None:
        self.received = 0  # bytes
        self._bytes = bytearray()  # not yet understood
        self._lengths: list[int] = []  # segments still to come, last first
        self._frame: Frame | None = None
        self._hole: memoryview | None = None  # the unfilled rest of a large segment

    def receive(self, sock: socket.socket, reads: int = _READS) -> tuple[list[Frame], bool]:
        """Read what is there, or the best part of it.

        Returns
        -------
        frames, open
            The frames completed, and False once the peer has closed.
        """
        frames: list[Frame] = []
        for _ in range(reads):
            wanted = _CHUNK if self._hole is None else len(self._hole)
            try:
                received = self._fill(sock, frames)
            except (BlockingIOError, InterruptedError):
                break
            except (OSError, MemoryError):  # the peer is gone, or what came is no message
                received = 0
            if not received:
                return frames, False
            self.received += received
            if received < wanted:  # there was no more
                break
        return frames, True

    def _fill(self, sock: socket.socket, frames: list[Frame]) -> int:
        if self._hole is not None:
            received = sock.recv_into(self._hole)
            self._hole = self._hole[received:] if received < len(self._hole) else None
            if self._hole is None:
                self._parse(frames)
            return received
        chunk = sock.recv(_CHUNK)
        self._bytes += chunk
        self._parse(frames)
        return len(chunk)

    def _parse(self, frames: list[Frame]) -> None:
        while self._begin() and self._segments():
            assert self._frame is not None
            frames.append(self._frame)
            self._frame = None

    def _begin(self) -> bool:
        if self._frame is not None:
            return True
        if len(self._bytes) < _COUNT.size:
            return False
        (count,) = _COUNT.unpack_from(self._bytes)
        if count > _MOST_SEGMENTS:
            raise OSError(f"a frame of {count} segments: its bytes are not a message's")
        header = _COUNT.size + 8 * count
        if len(self._bytes) < header:
            return False
        lengths = struct.unpack_from(f"<{count}Q", self._bytes, _COUNT.size)
        if max(lengths, default=0) > _LONGEST:
            raise OSError(f"a segment of {max(lengths)} bytes: its bytes are not a message's")
        self._lengths = list(reversed(lengths))
        self._frame = []
        del self._bytes[:header]
        return True

    def _segments(self) -> bool:
        """Take the segments that are there; True when the frame is whole."""
        assert self._frame is not None
        while self._lengths:
            length = self._lengths[-1]
            if length >= LARGE:
                self._frame.append(self._large(length))
            elif len(self._bytes) >= length:
                self._frame.append(bytes(self._bytes[:length]))
                del self._bytes[:length]
            else:
                return False
            self._lengths.pop()
            if self._hole is not None:
                return False
        return True

    def _large(self, length: int) -> memoryview:
        # np.empty, since bytearray(n) writes every page once on the loop for nothing.
        segment = np.empty(length, np.uint8).data
        here = min(length, len(self._bytes))
        segment[:here] = self._bytes[:here]
        del self._bytes[:here]
        self._hole = segment[here:] if here < length else None
        return segment


class FrameWriter:
    """Queues frames and writes as much of them as the socket takes."""

    def __init__(self) -> None:
        self._views: deque[memoryview] = deque()

    def push(self, frame: Sequence[Segment]) -> None:
        lengths = [memoryview(segment).nbytes for segment in frame]
        header = _COUNT.pack(len(frame)) + struct.pack(f"<{len(frame)}Q", *lengths)
        self._views.append(memoryview(header))
        self._views.extend(
            memoryview(s).cast("B") for s, n in zip(frame, lengths, strict=True) if n
        )

    def flush(self, sock: socket.socket) -> bool:
        """Write; True when nothing is left.

        Raises
        ------
        OSError
            The peer is gone.
        """
        while self._views:
            try:
                sent = _send(sock, list(islice(self._views, _VIEWS)))
            except (BlockingIOError, InterruptedError):
                return False
            self._advance(sent)
        return True

    def _advance(self, sent: int) -> None:
        while sent:
            view = self._views.popleft()
            if sent < len(view):
                self._views.appendleft(view[sent:])
                return
            sent -= len(view)


def _send(sock: socket.socket, views: list[memoryview]) -> int:
    if hasattr(sock, "sendmsg"):
        return sock.sendmsg(views)
    return sock.send(views[0])


class Channel:
    """One end of a socketpair on an event loop; neither direction ever blocks it.

    ``on_frame`` is called with each frame; ``on_end`` once, when the peer has closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._arrived: deque[Frame] = deque()
        self._reading = True
        self._coming_back = False
        self._writing = False
        self._ended = False
        loop.add_reader(sock, self._readable)

    def send(self, frame: Sequence[Segment]) -> None:
        """Send a frame now or as the socket takes it; dropped when the peer is gone."""
        self._writer.push(frame)
        if not self._writing:
            self._writable()

    @property
    def sent(self) -> bool:
        """Whether all that was sent is with the system."""
        return not self._writing

    def drain(self) -> None:
        """Deliver every whole frame that the peer, now dead, has left behind."""
        before = -1
        while self._reading and self._reader.received > before:
            before = self._reader.received
            self._read()
        self._deliver(None)

    def detach(self) -> None:
        """Leave the loop; the socket stays open."""
        self._stop_reading()
        self._stop_writing()

    def _readable(self) -> None:
        if not self._arrived and self._reading:
            self._read()
        self._deliver(time.perf_counter() + _MOMENT)

    def _read(self) -> None:
        frames, is_open = self._reader.receive(self._sock)
        self._arrived += frames
        if not is_open:
            # At its end a stream is readable for ever: a reader left there would spin.
            self._stop_reading()
            self._ended = True

    def _deliver(self, until: float | None) -> None:
        """Hand over what has arrived, the rest in the next turn of the loop, then the end."""
        while self._arrived:
            self._on_frame(self._arrived.popleft())
            if until is not None and self._arrived and time.perf_counter() > until:
                if not self._coming_back:
                    self._coming_back = True
                    self._loop.call_soon(self._come_back)
                return
        if self._ended:
            self._ended = False
            self._on_end()

    def _come_back(self) -> None:
        self._coming_back = False
        self._deliver(time.perf_counter() + _MOMENT)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def _writable(self) -> None:
        try:
            done = self._writer.flush(self._sock)
        except OSError:  # the peer is gone, which its death or end of stream will tell
            done = True
        if done:
            self._stop_writing()
        elif not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, self._writable)

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)


class BlockingChannel:
    """The same frames on a socket that may be blocked on; one thread receives, any may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._frames: deque[Frame] = deque()
        self._sending = threading.Lock()

    def send(self, frame: Sequence[Segment]) -> None:
        with self._sending:
            self._writer.push(frame)
            self._writer.flush(self._sock)

    def receive(self) -> Frame:
        """The next frame; EOFError when the peer has closed."""
        while not self._frames:
            frames, is_open = self._reader.receive(self._sock, reads=1)
            self._frames.extend(frames)
            if not is_open and not self._frames:
                raise EOFError
        return self._frames.popleft()
