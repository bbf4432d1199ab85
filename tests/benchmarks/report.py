"""``python -m tests.benchmarks.report``: docs/benchmarks.md and its plots, from the JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from . import plots, results
from .contenders import CONTENDERS
from .results import Record, Verdict
from .workloads import WORKLOADS, Metric

HEAD = """\
# Benchmarks

What aioprefetch costs beside what others cost for the same work on the same machine.
This page is made by `python -m tests.benchmarks.report` from `benchmarks/results.json`.
`make bench` measures again, `make bench-quick` a part of it in under three minutes.

## How it is measured

- All contenders of a workload take turns, A B C A B C …, {repeats} times, each time in a fresh
  process. A figure is the median, with the least and the most in brackets; ratios are of medians.
- Rates are taken when workers are up and windows full. What starting costs is measured for itself.
- Two workers, unless a workload says otherwise. Ours has its default settings, the others those
  that served them best, in the last table. The consumer looks at a batch and drops it.
- The *floor* is the same work and the same `np.stack` into memory that is warm already, in as
  many plain processes, which hand nothing over. Each turns over 4 buffers, as a loader's window
  does; what it gives with one buffer is told beside it.
- *Everyone's CPU* is the processor time of the parent and all workers together.
"""


def main() -> None:
    options = _options()
    record = json.loads(options.json.read_text())
    pictures = options.out / "benchmarks"
    pictures.mkdir(parents=True, exist_ok=True)
    for name in _measured(record):
        plots.draw(record, name, pictures / f"{name}.png")
    (pictures / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "benchmarks.md").write_text(page(record))
    print(f"written: {options.out / 'benchmarks.md'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.report", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the page")
    return parser.parse_args()


def page(record: Record) -> str:
    parts = [HEAD.format(repeats=record["repeats"]), _machine(record), _goals(record)]
    parts += [_overview(record)]
    parts += [_section(record, name) for name in _measured(record)]
    parts += [_settings(record)]
    return "\n".join(parts)


def _measured(record: Record) -> list[str]:
    return [name for name in record["workloads"] if record["workloads"][name]["results"]]


def _machine(record: Record) -> str:
    machine = record["machine"]
    size = " **A quick run: smaller, and with fewer peers.**" if record["quick"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"Measured on {machine['date']}: {machine['cpus']} cores ({machine['processor']}), "
        f"{machine['memory_gb']} GB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"load before it {machine['load_before']:.1f}.{size}\n\n{versions}.\n"
    )


def _goals(record: Record) -> str:
    rows = [
        _goal_row(name, verdict)
        for name in _measured(record)
        for verdict in results.verdicts(record, name)
    ]
    met = sum("| met |" in row for row in rows)
    table = _table(("workload", "figure", "goal", "reached", ""), rows)
    return f"## Goals\n\n{met} of {len(rows)} are met.\n\n{table}"


def _goal_row(name: str, verdict: Verdict) -> str:
    cells = (
        f"[{WORKLOADS[name].title}](#{name})",
        results.subject(name, verdict),
        results.bound(name, verdict.goal),
        results.shown(name, verdict),
        "met" if verdict.met else "**missed**",
    )
    return f"| {' | '.join(cells)} |"


def _overview(record: Record) -> str:
    """One line a workload: ours, the best peer, the floor."""
    rows = []
    for name in _measured(record):
        metric = WORKLOADS[name].metrics[0]
        best = results.best_peer(record, name, metric.key)
        cells = (
            f"[{WORKLOADS[name].title}](#{name})",
            f"{metric.label}{metric.unit and f', {metric.unit}'}",
            _cell(record, name, "ours", metric),
            f"{_cell(record, name, best, metric)} {CONTENDERS[best].title}" if best else "",
            _times(record, name, metric, best) if best else "",
            _cell(record, name, "floor", metric) or _cell(record, name, "idle", metric),
        )
        rows.append(f"| {' | '.join(cells)} |")
    heads = ("workload", "figure", "aioprefetch", "best peer", "ours is better by", "floor")
    return f"## At a glance\n\n{_table(heads, rows)}"


def _cell(record: Record, name: str, contender: str | None, metric: Metric) -> str:
    found = None if contender is None else results.spread(record, name, contender, metric.key)
    return "" if found is None else str(found)


def _times(record: Record, name: str, metric: Metric, contender: str) -> str:
    ratio = results.ratio(record, name, metric, contender)
    return "" if ratio is None else f"{results.short(ratio)}×"


def _section(record: Record, name: str) -> str:
    workload = WORKLOADS[name]
    goals = [f"- {results.goal_text(name, verdict)}" for verdict in results.verdicts(record, name)]
    reasons = [f"{CONTENDERS[who].title}: {why}" for who, why in _left_out(record, name)]
    parts = [
        f"## {workload.title} {{ #{name} }}",
        workload.text,
        f"![{workload.title}](benchmarks/{name}.png)",
        _details(record, name),
        "\n".join(goals),
        f"Left out: {'; '.join(reasons)}." if reasons else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _left_out(record: Record, name: str) -> Iterator[tuple[str, str]]:
    """Who is not in a workload, and why."""
    measured = record["workloads"][name]
    yield from measured["left_out"].items()
    seen = {CONTENDERS[who].module for who in (*measured["results"], *measured["left_out"])}
    for who, entry in CONTENDERS.items():
        if entry.packages and entry.module not in seen:
            yield who, "not measured here, to keep the run short"


def _details(record: Record, name: str) -> str:
    """Every figure of every contender; upright where the metrics are a curve."""
    metrics, contenders = WORKLOADS[name].metrics, list(record["workloads"][name]["results"])
    if WORKLOADS[name].axis is not None:
        heads = ["", *(CONTENDERS[who].title for who in contenders)]
        rows = [
            [_head(metric), *(_cell(record, name, who, metric) for who in contenders)]
            for metric in metrics
        ]
    else:
        heads = ["", *map(_head, metrics), "ours is better by"]
        rows = [
            [
                CONTENDERS[who].title,
                *(_cell(record, name, who, metric) for metric in metrics),
                "" if who == "ours" else _times(record, name, metrics[0], who),
            ]
            for who in contenders
        ]
    return _table(tuple(heads), [f"| {' | '.join(row)} |" for row in rows if any(row[1:])])


def _head(metric: Metric) -> str:
    return f"{metric.label}{metric.unit and f', {metric.unit}'}"


def _settings(record: Record) -> str:
    seen = {who for name in _measured(record) for who in record["workloads"][name]["results"]}
    rows = [
        f"| {entry.title} | {entry.settings} |" for who, entry in CONTENDERS.items() if who in seen
    ]
    return f"## Settings\n\n{_table(('', 'settings'), rows)}"


def _table(heads: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join(_lines(heads, rows)) + "\n"


def _lines(heads: tuple[str, ...], rows: list[str]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from rows


if __name__ == "__main__":
    main()
