"""What a measurement came to: as JSON, and in words."""

from __future__ import annotations

import platform
from typing import Any

from . import __version__
from ._stats import seconds
from ._sweep import CLOSE, Measured, Result, recommend, usable_cpus

_UNSTEADY = 0.3  # of the median, between the quarters of the measurements
_HEADS = ("num_proc", "batch_size", "num_prefetch", "start method", "rate", "waited", "verdict")


def as_json(result: Result) -> dict[str, Any]:
    """Everything that was measured, as JSON keeps it."""
    return {
        "aioprefetch": __version__,
        "target": result.target,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": usable_cpus(),
        "unit": result.unit,
        "consumer_seconds": result.wishes.consumer,
        "ceiling": result.ceiling,
        "elapsed": result.elapsed,
        "interrupted": result.interrupted,
        "measured": [_row(row) for row in result.measured],
        "left_out": result.left_out,
        "recommendation": _recommendation(result) if result.measured else None,
    }


def _row(row: Measured) -> dict[str, Any]:
    return {
        **row.choice.arguments(),
        "window": row.stats.setting.num_prefetch,
        "rate": row.rate,
        "rates": [sample.rate for sample in row.samples],
        "wait_share": row.wait_share,
        "start_seconds": row.start,
        "task_p50": row.stats.task_p50,
        "bottleneck": row.stats.bottleneck,
        "advice": row.stats.advice,
    }


def _recommendation(result: Result) -> dict[str, Any]:
    take = recommend(result.measured).take
    given = {name: v for name, v in take.choice.arguments().items() if v is not None}
    return {"arguments": given, "why": why(result)}


def why(result: Result) -> list[str]:
    """Reasons for the recommendation, in sentences."""
    take, best = recommend(result.measured)
    rate = f"{number(take.rate)} {result.unit}/s"
    fastest = f"{number(best.rate)} {result.unit}/s with {best.setting}"
    reasons = [
        f"It is the fastest, {rate}, and no smaller setting is within {CLOSE:.0%} of it."
        if take is best
        else f"It is the smallest setting within {CLOSE:.0%} of the fastest: {rate}, and {fastest}."
    ]
    if result.ceiling:
        reasons.append(
            f"The consumer by itself takes {number(result.ceiling)} {result.unit}/s: "
            f"this is {min(1.0, take.rate / result.ceiling):.0%} of it."
        )
    reasons.append(
        f"The consumer waited {take.wait_share:.0%} of the time."
        if result.wishes.consumer
        else "A consumer that does nothing only waits; --consumer-ms gives it a step to do."
    )
    reasons.append(f"Verdict: {take.stats.bottleneck}. {take.stats.advice}")
    if len(take.samples) < 3:
        reasons.append("Few measurements had time: --seconds gives them more.")
    elif take.spread > _UNSTEADY:
        reasons.append(
            f"Measurements of it lie {take.spread:.0%} of their median apart: other load on the "
            "machine makes this a rough answer."
        )
    return reasons


def as_text(result: Result) -> str:
    """The table, the recommendation and why."""
    if not result.measured:
        return "Nothing was measured."
    take = recommend(result.measured).take
    lines = _table(result, take)
    lines += [f"left out: {setting}: {reason}" for setting, reason in result.left_out.items()]
    call = ", ".join(["…", *filter(None, [str(take.choice)])])
    lines += ["", f"Recommended: Prefetcher({call})", *why(result)]
    if result.interrupted:
        lines.append("It was interrupted: this is what had been measured until then.")
    return "\n".join(lines)


def _table(result: Result, take: Measured) -> list[str]:
    rows = [[*_HEADS[:4], f"{result.unit}/s", *_HEADS[5:], ""]]
    rows += [[*_cells(row), "←" if row is take else ""] for row in result.measured]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cells(row: Measured) -> list[str]:
    choice = row.choice.arguments()
    method = choice["mp_context"] or ("default" if row.choice.num_proc else "–")
    return [
        str(choice["num_proc"]),
        "–" if choice["batch_size"] is None else str(choice["batch_size"]),
        str(row.stats.setting.num_prefetch),
        f"{method}, {seconds(row.start)}" if row.choice.num_proc else method,
        number(row.rate),
        f"{row.wait_share:.0%}",
        row.stats.bottleneck,
    ]


def number(value: float) -> str:
    """With three digits at least, and commas."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
