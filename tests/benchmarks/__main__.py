"""``python -m tests.benchmarks [--quick] [--only NAME ...] [--json PATH]``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import machine, results, runner
from .contenders import CONTENDERS
from .workloads import WORKLOADS, Workload

QUICK_REPEATS = 3
REPEATS = 5


def main() -> None:
    options = _options()
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    path = options.json or Path("build", "bench-quick.json" if options.quick else "bench.json")
    record = {
        "quick": options.quick,
        "repeats": repeats,
        "machine": machine.describe(),
        "versions": machine.versions(),
        "workloads": {},
    }
    for name in options.only or _usual(options.quick):
        record["workloads"][name] = _run(WORKLOADS[name], options, repeats)
        _write(path, record)
        print(results.summary(record, name), flush=True)
    print(f"written: {path}")


def _usual(quick: bool) -> list[str]:
    return [name for name, workload in WORKLOADS.items() if workload.quick or not quick]


def _run(workload: Workload, options: argparse.Namespace, repeats: int) -> dict[str, Any]:
    usual = workload.quick if options.quick else workload.contenders
    names = options.contender or list(usual)
    print(f"{workload.name}: {workload.title}, {repeats} repeats", flush=True)
    return asdict(runner.run(workload, names, repeats, options.quick))


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer peers, smaller sizes")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(WORKLOADS))
    parser.add_argument(
        "--contender", nargs="+", choices=list(CONTENDERS), metavar="NAME", help="these instead"
    )
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


if __name__ == "__main__":
    main()
