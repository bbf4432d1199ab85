"""Fetch items over HTTP: the requests of one worker overlap, so waiting costs almost nothing.

A small server in this process answers each request after a delay, as a distant one would.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from aioprefetch import Prefetcher


class Server:
    """Answers GET /<number> with the number's square; notes how busy it was."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.requests = self.at_once = self.most_at_once = 0
        self.delays = 0.0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        number = int(request.split()[1].removeprefix(b"/"))
        self.requests += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.wait(self.delay * (0.5 + number % 11 / 10))  # half to one and a half
        self.at_once -= 1
        body = str(number**2).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async def wait(self, seconds: float) -> None:
        self.delays += seconds
        await asyncio.sleep(seconds)


class Squares:
    """A map-style dataset whose items are awaited."""

    def __init__(self, port: int, length: int) -> None:
        self.port = port
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> int:
        return int(await get(self.port, f"/{index}"))


async def get(port: int, path: str) -> bytes:
    """The body of one HTTP/1.1 response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = response.partition(b"\r\n\r\n")
    if head.split()[1] != b"200":
        raise OSError(head.decode())
    return body


async def main(args: argparse.Namespace) -> None:
    server = Server(args.delay / 1000)
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    squares = Squares(listener.sockets[0].getsockname()[1], args.items)
    values = []
    async with (
        listener,
        Prefetcher(
            squares, batch_size=8, num_proc=args.num_proc, concurrency=args.concurrency
        ) as batches,
    ):
        began = time.perf_counter()
        async for batch in batches:
            values.extend(batch.tolist())
        seconds = time.perf_counter() - began
    assert values == [index**2 for index in range(args.items)]
    print(f"{'items, all there and in order':<34}{len(values):8}")
    print(f"{'workers':<34}{args.num_proc:8}")
    print(f"{'requests a worker may have open':<34}{args.concurrency:8}")
    print(f"{'most that the server saw at once':<34}{server.most_at_once:8}")
    print(f"{'the delays one after the other':<34}{server.delays:8.2f} s")
    print(f"{'wall time':<34}{seconds:8.2f} s")
    print(f"{'overlap':<34}{server.delays / seconds:8.1f} times")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--delay", type=float, default=50, help="of a response, in ms")
    parser.add_argument("--num-proc", type=int, default=1, help="worker processes")
    parser.add_argument("--concurrency", type=int, default=16, help="requests a worker has open")
    asyncio.run(main(parser.parse_args()))
