"""``python -m tests.benchmarks.serving [--side 256] [--faults] [--json PATH] [--plot PATH]``."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from .client import bodies, load, ready, scans
from .processes import Server, server
from .variants import VARIANTS

Rounds = dict[str, list[dict[str, float]]]  # of each variant


async def compare(options: argparse.Namespace) -> Rounds:
    """Load all variants in turn, again and again; those not asked are idle meanwhile."""
    images = scans(options.side)
    rounds: Rounds = {name: [] for name in VARIANTS}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_start(name, options)) for name in VARIANTS}
        for each in servers.values():
            await ready(each.port)
            await load(each.port, bodies(images), options.connections, 0.5)
        for _ in range(options.rounds):
            for name, each in servers.items():
                rounds[name].append(await _measure(each, images, options))
    return rounds


async def _measure(
    server: Server, images: list[bytes], options: argparse.Namespace
) -> dict[str, float]:
    before = server.cpu()
    made = await load(server.port, bodies(images), options.connections, options.lasts)
    assert not made.wrong, made.wrong[:3]
    spent = {
        f"{part}_cpu_ms": 1000 * (seconds - before[part]) / len(made.seconds)
        for part, seconds in server.cpu().items()
    }
    return made.summary() | spent


def _start(name: str, options: argparse.Namespace) -> Any:
    module = "tests.benchmarks.serving.variants"
    return server("-m", module, name, "--num-proc", str(options.num_proc))


def medians(rounds: Rounds) -> dict[str, dict[str, float]]:
    return {
        name: {key: median(each[key] for each in made) for key in made[0]}
        for name, made in rounds.items()
    }


def ratios(rounds: Rounds) -> dict[str, float]:
    """Ours beside others', round by round."""

    def ratio(key: str, other: str) -> float:
        pairs = zip(rounds["pool"], rounds[other], strict=True)
        return median(ours[key] / theirs[key] for ours, theirs in pairs)

    return {
        "throughput, of run_in_executor's": ratio("requests_a_second", "executor"),
        "/health p99, of inline's": ratio("health_p99_ms", "inline"),
        "/health p99, of run_in_executor's": ratio("health_p99_ms", "executor"),
    }


def table(rounds: Rounds) -> str:
    lines = [
        "| images prepared | requests/s | p50 ms | p99 ms | /health p99 ms | CPU ms a request: server | workers |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in medians(rounds).items():
        lines.append(
            f"| {VARIANTS[name][0]} | {row['requests_a_second']:,.0f} | {row['p50_ms']:.1f} "
            f"| {row['p99_ms']:.1f} | {row['health_p99_ms']:.1f} "
            f"| {row['loop_cpu_ms']:.2f} | {row['workers_cpu_ms']:.2f} |"
        )
    return "\n".join([*lines, "", *(f"{ratios(rounds)[key]:.2f}  {key}" for key in ratios(rounds))])


def main() -> None:
    options = _options()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds = runner.run(compare(options))
    print(table(rounds))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.serving", description=__doc__)
    parser.add_argument("--side", type=int, default=256, help="pixels of an image (default: 256)")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lasts", type=float, default=4.0, help="seconds of each load")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH")
    return parser.parse_args()


if __name__ == "__main__":
    main()
