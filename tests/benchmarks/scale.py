"""How far one consumer reaches: its scheduler with up to 1,000 workers, and real delays.

    python -m tests.benchmarks.scale

The workers are timers on the loop: each answers a task after the time that it would take. All
else is what runs in earnest: plan, window, dispatch, delivery. So what is measured is the part
that does not grow with the cluster, batches a second through one process; and, where tasks
take long, whether it keeps all workers at work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from aioprefetch import Prefetcher
from aioprefetch._config import Staff
from aioprefetch._lane import Kind, Lane, LaneEvents
from aioprefetch._live import Here
from aioprefetch._messages import Hello, Joined, Made, Report, Task
from aioprefetch._payload import Live, Payload, Store
from aioprefetch._program import Program, Terms
from aioprefetch._shared_pool import SharedPool
from aioprefetch._threads import Helper


class _TimerLane(Lane):
    """A worker that does one task after another, each in ``seconds``."""

    def __init__(self, seconds: float, number: int, keeper: Helper, events: LaneEvents) -> None:
        super().__init__(number, keeper, events)
        self._seconds = seconds
        self._until = 0.0  # when it is done with what it holds

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to start."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        super().attach(loop)
        loop.call_soon(self._heard, Hello(None))

    def say(self, message: Any) -> None:
        """It need not be told."""

    def admit(self, tenant: int, terms: Terms, shipment: Any) -> None:
        self._call_on_loop(self._heard, Joined(tenant, None))

    def give(self, orders: list[tuple[int, Task, Payload, Any]]) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self._until = max(now, self._until) + self._seconds * len(orders)
        done = [(ticket, Made(0, Live(task.position))) for ticket, task, *_ in orders]
        report = Report(done, [], self._seconds * len(orders))
        self._loop.call_at(self._until, self._tell, report)

    def _tell(self, report: Report) -> None:
        if not self.dead:
            self._heard(report)

    def say_goodbye(self) -> None:
        self.kill()

    def kill(self) -> None:
        if not self.dead:
            self.dead = True
            self._keeper.post(self.bury)

    def wait(self, timeout: float | None) -> bool:
        return True


class _Timers:
    in_process = True
    frees = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def lane(self, number: int, keeper: Helper, events: LaneEvents, incarnation: int) -> Lane:
        return _TimerLane(self._seconds, number, keeper, events)

    def check(self, num_proc: int) -> None:
        """There are always enough."""

    def ship(self, program: Program) -> Here:
        return Here(program)

    def store(self) -> Store | None:
        return None


class TimerPool(SharedPool):
    """Workers that are timers."""

    _in_process = True

    def __init__(self, num_proc: int, seconds: float) -> None:
        super().__init__(Staff(num_proc, None, None, None), 2, 5.0)
        self._seconds = seconds

    def _kind(self, loop: asyncio.AbstractEventLoop) -> Kind:
        return _Timers(self._seconds)


class Row(NamedTuple):
    """One measurement."""

    workers: int
    task_ms: float
    ordered: bool
    batches_a_second: float
    busy: float  # share of the workers' time that is used
    cpu_us: float  # of the consumer's process, a batch
    state_bytes: int
    peak_mib: float


async def measure(workers: int, seconds: float, ordered: bool, lasts: float) -> Row:
    async with TimerPool(workers, seconds) as pool:
        p = Prefetcher(range(10**12), batch_size=64, shuffle=True, pool=pool, ordered=ordered)
        async with p:
            it = aiter(p)
            for _ in range(2 * workers):
                await anext(it)
            count, began, cpu = 0, time.perf_counter(), time.process_time()
            while (took := time.perf_counter() - began) < lasts:
                await anext(it)
                count += 1
            cpu = time.process_time() - cpu
            state = len(json.dumps(p.state_dict()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = count / took
    busy = min(1.0, rate * seconds / workers)
    return Row(workers, 1000 * seconds, ordered, rate, busy, 1e6 * cpu / count, state, peak)


async def main(args: argparse.Namespace) -> list[Row]:
    rows = []
    print(
        "| workers | ms a task | order | batches/s | workers busy | CPU µs a batch | state bytes |"
        "\n|---|---|---|---|---|---|---|"
    )
    for workers in args.workers:
        for seconds in args.task_seconds:
            for ordered in (True, False):
                row = await measure(workers, seconds, ordered, args.lasts)
                rows.append(row)
                print(
                    f"| {row.workers} | {row.task_ms:g} | {'ordered' if ordered else 'as made'} "
                    f"| {row.batches_a_second:,.0f} | {row.busy:.0%} | {row.cpu_us:.0f} "
                    f"| {row.state_bytes:,} |",
                    flush=True,
                )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 10, 100, 1000])
    parser.add_argument("--task-seconds", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    parser.add_argument("--lasts", type=float, default=3.0, help="seconds that each is measured")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(main(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([row._asdict() for row in found], indent=1))
