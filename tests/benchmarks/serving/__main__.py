"""Load the server of examples/inference_server.py, beside others that prepare images elsewhere.

python -m tests.benchmarks.serving [--side 256] [--json PATH] [--plot PATH]
python -m tests.benchmarks.serving --faults
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import uvloop

from tests.benchmarks import machine

from . import plot
from .client import bodies, load, ready, scans
from .faults import Damage, damage
from .processes import Server, server
from .rounds import GOALS, Results, Rounds, medians, table, verdicts
from .variants import VARIANTS

EQUAL = 0.7  # of what the plain executor answers, as the equal load
TITLES = {name: title for name, (title, _) in VARIANTS.items()}


async def compare(options: argparse.Namespace) -> Results:
    """Load all variants in turn, again and again; those not asked are idle meanwhile."""
    images = scans(options.side)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_start(name, options)) for name in VARIANTS}
        for each in servers.values():
            await ready(each.port)
            await load(each.port, bodies(images), options.connections, 0.5)
        full = await _rounds(servers, images, options, None)
        rate = EQUAL * medians(full)["executor"]["requests_a_second"]
        return Results(full, await _rounds(servers, images, options, rate), rate)


async def _rounds(
    servers: dict[str, Server], images: list[bytes], options: argparse.Namespace, rate: float | None
) -> Rounds:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for _ in range(options.rounds):
        for name, each in servers.items():
            rounds[name].append(await _measure(each, images, options, rate))
    return rounds


async def _measure(
    server: Server, images: list[bytes], options: argparse.Namespace, rate: float | None
) -> dict[str, float]:
    before = server.cpu()
    made = await load(server.port, bodies(images), options.connections, options.seconds, rate)
    if made.wrong:
        raise AssertionError(f"{len(made.wrong)} answers are wrong, the first: {made.wrong[0]}")
    spent = {
        f"{part}_cpu_ms": 1000 * (seconds - before[part]) / len(made.seconds)
        for part, seconds in server.cpu().items()
    }
    return made.summary() | spent


def _start(name: str, options: argparse.Namespace) -> AbstractContextManager[Server]:
    module = "tests.benchmarks.serving.variants"
    return server("-m", module, name, "--num-proc", str(options.num_proc))


async def harm(options: argparse.Namespace) -> Damage:
    command = ("examples/inference_server.py", "--port", "0", "--num-proc", str(options.num_proc))
    with server(*command) as up:
        await ready(up.port)
        return await damage(
            up, side=options.side, connections=options.connections, lasts=options.seconds
        )


def main() -> int:
    options = _options()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.faults:
            done = runner.run(harm(options))
            print(done)
            return 1 if done.load.wrong else 0
        results = runner.run(compare(options))
    print(report(results))
    if options.json is not None:
        _write(options.json, _record(results, options))
    if options.plot is not None:
        plot.draw(results.full, TITLES, options.plot)
    return 0


def report(results: Results) -> str:
    return "\n\n".join(
        [
            "Full load:",
            table(results.full, TITLES),
            f"Equal load, {results.rate:.0f} requests/s, {EQUAL:.0%} of run_in_executor's most:",
            table(results.equal, TITLES),
            verdicts(results),
        ]
    )


def _record(results: Results, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "side": options.side,
        "connections": options.connections,
        "seconds": options.seconds,
        "num_proc": options.num_proc,
        "machine": machine.describe(),
        "ratios": {goal.text: goal.ratio(results) for goal in GOALS},
        **results._asdict(),
    }


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", action="store_true", help="kill workers and send bad images")
    parser.add_argument("--side", type=int, default=256, help="pixels of an image (default: 256)")
    parser.add_argument("--connections", type=int, default=64, help="default: 64")
    parser.add_argument("--rounds", type=int, default=5, help="of each variant (default: 5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load (default: 4)")
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every round")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw a picture")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
