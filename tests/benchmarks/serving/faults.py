"""Workers killed and images that are none, while every answer is checked."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from tests.processes import send

from .client import Load, bodies, load, scans
from .processes import Server

POISON_EVERY = 50  # one request in so many is no image


class Damage(NamedTuple):
    """What was done, and what became of the requests."""

    killed: int
    load: Load

    def __str__(self) -> str:
        statuses = ", ".join(f"{n} × {code}" for code, n in sorted(self.load.statuses.items()))
        return (
            f"{'requests':<28}{len(self.load.seconds):8}\n"
            f"{'answers':<28}{statuses:>8}\n"
            f"{'workers killed':<28}{self.killed:8}\n"
            f"{'answers that are wrong':<28}{len(self.load.wrong):8}\n"
            f"{'p99':<28}{self.load.summary()['p99_ms']:8.0f} ms"
        )


async def damage(
    server: Server, *, side: int, connections: int, lasts: float, kill_every: float = 1.0
) -> Damage:
    """Load a server, kill one of its workers every so many seconds, and check its answers."""
    killed: list[int] = []
    requests = bodies(scans(side), POISON_EVERY)
    async with asyncio.TaskGroup() as group:
        group.create_task(_kill(server, kill_every, lasts, killed))
        loading = group.create_task(load(server.port, requests, connections, lasts))
    return Damage(len(killed), loading.result())


async def _kill(server: Server, every: float, lasts: float, killed: list[int]) -> None:
    for _ in range(int(lasts / every)):
        await asyncio.sleep(every)
        for worker in random.sample(server.workers(), 1):
            send(worker)
            killed.append(worker.pid)
