"""A page about a measurement: one file, its plots drawn here, nothing fetched from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 16, 40
_LONG, _ROW = 920, 26  # of the timeline
_MARGIN = 82
_VISIBLE = 0.4  # px of a span that is drawn

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2433; --soft: #5c6577; --line: #dfe3ea;
  --card: #f7f8fa; --main: #2563c9; --good: #17803d; --wait: #d9822b; --fetch: #2563c9;
  --map: #7a4fc4; --collate: #0f8a8a; --iterate: #5577a8; --consume: #17803d; --idle: #c9ced8; }
@media (prefers-color-scheme: dark) { :root { --page: #14171d; --ink: #e6e9ef; --soft: #9aa3b3;
  --line: #303642; --card: #1c2027; --main: #6ea3f5; --good: #56c27a; --wait: #e8a05a;
  --fetch: #6ea3f5; --map: #ad8cf0; --collate: #4cc0c0; --iterate: #8fabd4; --consume: #56c27a;
  --idle: #454c5a; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.soft { color: var(--soft); } code, pre { font: 14px/1.5 ui-monospace, monospace; }
.take { background: var(--card); border-left: 4px solid var(--good); padding: .8rem 1.1rem;
  margin: 1.2rem 0; border-radius: 4px; } .take pre { margin: 0 0 .4rem; white-space: pre-wrap; }
.take p { margin: .2rem 0; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem 2rem; }
.plots figure { flex: 1 1 400px; } figure { margin: 0; }
figcaption { font-weight: 600; margin-bottom: .2rem; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; stroke: var(--page);
  stroke-width: 3px; paint-order: stroke; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; } tr.taken td { color: var(--good); font-weight: 600; }
.scroll { overflow-x: auto; } .key { display: inline-block; width: .8em; height: .8em;
  border-radius: 2px; margin: 0 .35em 0 .9em; vertical-align: -1px; }
"""

_COLOURS = {
    "wait": "var(--wait)",
    "idle": "var(--idle)",
    "consume": "var(--consume)",
    "iterate": "var(--iterate)",
    "fetch": "var(--fetch)",
    "map": "var(--map)",
    "collate": "var(--collate)",
}
_SAYS = {"wait": "consumer waits", "idle": "worker waits", "consume": "consumer works"}


class Bar(NamedTuple):
    """A span of the timeline, in milliseconds."""

    row: str
    name: str
    began: float
    ended: float


def page(report: dict[str, Any], events: Sequence[dict[str, Any]] = ()) -> str:
    """The page of a report as `_summary.as_json` gives it, and of the trace of a run."""
    title = f"{escape(report['target'])} under aioprefetch"
    body = "".join(_body(report, events))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _body(report: dict[str, Any], events: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"<h1>{escape(report['target'])}</h1><p class=soft>{escape(_where(report))}</p>"
    if not report["measured"]:
        yield "<p>Nothing was measured.</p>"
        return
    yield _advice(report["recommendation"])
    rows = by_workers(report["measured"])
    yield '<div class="plots">'
    yield _figure(f"Throughput, {report['unit']} a second", _throughput(rows, report["ceiling"]))
    yield _figure("Time that the consumer waited", _waiting(rows))
    yield "</div><p class=soft>Medians; a vertical line spans the measurements of a setting.</p>"
    yield f"<h2>All settings</h2>{_table(report)}"
    bars = second_of(events)
    if bars:
        yield f"<h2>{_span_of(bars)} under the recommended setting</h2>"
        yield f"<div class=scroll>{timeline(bars)}</div>{_legend(bars)}"


def _where(report: dict[str, Any]) -> str:
    step = report["consumer_seconds"]
    consumer = (
        f"a consumer of {step * 1e3:g} ms a batch" if step else "a consumer that does nothing"
    )
    cut = ", interrupted" if report["interrupted"] else ""
    return (
        f"{consumer}; {report['cpus']} CPUs, Python {report['python']}, {report['platform']}, "
        f"aioprefetch {report['aioprefetch']}; measured for {report['elapsed']:.0f} s{cut}"
    )


def _advice(advice: dict[str, Any]) -> str:
    given = "".join(f", {name}={value!r}" for name, value in advice["arguments"].items())
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in advice["why"])
    return f'<div class="take"><pre>Prefetcher(…{escape(given)})</pre>{reasons}</div>'


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _table(report: dict[str, Any]) -> str:
    unit = report["unit"]
    heads = ("num_proc", "batch_size", "window", "start method", "start", f"{unit}/s", "waited")
    lines = ["".join(f"<th>{escape(head)}</th>" for head in (*heads, "verdict"))]
    taken = report["recommendation"]["arguments"]
    names = ("num_proc", "batch_size", "num_prefetch", "mp_context")
    for row in report["measured"]:
        is_taken = {n: row[n] for n in names if row[n] is not None} == taken
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row))
        lines.append(f"<tr{' class=taken' if is_taken else ''}>{cells}</tr>")
    body = "".join(lines[1:])
    return f"<div class=scroll><table><tr>{lines[0]}</tr>{body}</table></div>"


def _cells(row: dict[str, Any]) -> list[str]:
    method = row["mp_context"] or ("default" if row["num_proc"] else "–")
    return [
        str(row["num_proc"]),
        "–" if row["batch_size"] is None else str(row["batch_size"]),
        str(row["window"]),
        method,
        f"{row['start_seconds']:.2f} s",
        _short(row["rate"]),
        f"{row['wait_share']:.0%}",
        row["bottleneck"],
    ]


# Plots


def by_workers(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that differ in the number of workers alone."""
    first = measured[0]
    alike = [
        row
        for row in measured
        if (row["batch_size"], row["num_prefetch"]) == (first["batch_size"], first["num_prefetch"])
    ]
    found = {row["num_proc"]: row for row in reversed(alike)}
    return [found[workers] for workers in sorted(found)]


def _throughput(rows: Sequence[dict[str, Any]], ceiling: float | None) -> str:
    top = max(max(row["rates"]) for row in rows)
    shows = ceiling is not None and ceiling < 3 * top
    top = nice(max(top, ceiling or 0) if shows else top)
    parts = list(_axes(rows, top, _short))
    points = [(_x(n, rows), _y(row["rate"], top)) for n, row in enumerate(rows)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--main)" stroke-width="2"/>')
    for (x, y), row in zip(points, rows, strict=True):
        low, high = _y(min(row["rates"]), top), _y(max(row["rates"]), top)
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="var(--main)"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--main)"/>')
    if shows and ceiling:
        y = _y(ceiling, top)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="var(--good)" '
            f'stroke-dasharray="5 4"/><text x="{_LEFT + 6}" y="{y - 5:.1f}">'
            f"the consumer alone: {_short(ceiling)}</text>"
        )
    return _svg(_WIDTH, _HEIGHT, parts)


def _waiting(rows: Sequence[dict[str, Any]]) -> str:
    parts = list(_axes(rows, 1.0, lambda share: f"{share:.0%}"))
    wide = min(46.0, 0.6 * (_WIDTH - _LEFT - _RIGHT) / len(rows))
    for n, row in enumerate(rows):
        x, y = _x(n, rows), _y(row["wait_share"], 1.0)
        high = _y(0, 1.0) - y
        parts.append(
            f'<rect x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
            f'rx="2" fill="var(--wait)"/><text x="{x:.1f}" y="{max(y - 4, 11):.1f}" '
            f'text-anchor="middle">{row["wait_share"]:.0%}</text>'
        )
    return _svg(_WIDTH, _HEIGHT, parts)


def _axes(rows: Sequence[dict[str, Any]], top: float, label: Any) -> Iterator[str]:
    for n in range(5):
        y = _y(top * n / 4, top)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="var(--line)"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label(top * n / 4)}</text>'
    for n, row in enumerate(rows):
        yield (
            f'<text x="{_x(n, rows):.1f}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">'
            f"{row['num_proc']}</text>"
        )
    yield (
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        "workers (num_proc)</text>"
    )


def _x(place: int, rows: Sequence[Any]) -> float:
    return _LEFT + (place + 0.5) / len(rows) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def nice(value: float) -> float:
    """The next number that divides well in four."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(
        power * step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if power * step >= value
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _svg(width: float, height: float, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


# The timeline


def read_trace(path: str) -> list[dict[str, Any]]:
    """The events of a trace; none where there is no complete one."""
    try:
        with open(path, encoding="utf-8") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    except (OSError, ValueError):
        return []
    return events


def second_of(events: Sequence[dict[str, Any]]) -> list[Bar]:
    """What was done in the last second of a trace, before it was closed."""
    bars = [bar for bar in _bars(events) if bar.name in _COLOURS]
    consumer = [bar.ended for bar in bars if bar.row == "consumer"]
    if not consumer:
        return []
    end = max(consumer)
    begin = max(end - 1000.0, min(bar.began for bar in bars if bar.row == "consumer"))
    cut = [
        bar._replace(began=max(bar.began, begin) - begin, ended=min(bar.ended, end) - begin)
        for bar in bars
        if bar.began < end and bar.ended > begin
    ]
    return joined(cut, (end - begin) * _VISIBLE / _LONG)


def _bars(events: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    open_spans: dict[tuple[int, int], float] = {}
    for event in events:
        kind, pid, name = event["ph"], event["pid"], event["name"]
        if kind == "X":
            row = rows.get(pid, "")
            if pid == 0:
                row = {1: "consumer", 2: "source"}.get(event["tid"], "")
            yield _bar(row, name, event["ts"], event["ts"] + event["dur"])
        elif kind == "b":
            open_spans[pid, event["id"]] = event["ts"]
        elif kind == "e":
            began = open_spans.pop((pid, event["id"]), event["ts"])
            yield _bar(rows.get(pid, ""), name, began, event["ts"])


def _bar(row: str, name: str, began: float, ended: float) -> Bar:
    if name == "wait" and row != "consumer":
        name = "idle"
    return Bar(row, "fetch" if name == "read" else name, began / 1e3, ended / 1e3)


def _span_of(bars: Sequence[Bar]) -> str:
    last = max(bar.ended for bar in bars)
    return "One second" if last > 990 else f"{last:.0f} ms"


def timeline(bars: Sequence[Bar]) -> str:
    """The spans, a row for each part."""
    rows = sorted({bar.row for bar in bars}, key=_rank)
    last = max(bar.ended for bar in bars)
    scale = (_LONG - _MARGIN - 10) / last  # px a millisecond
    height = len(rows) * _ROW + 30
    parts = [
        f'<text x="{_MARGIN - 8}" y="{n * _ROW + 17}" text-anchor="end">{escape(row)}</text>'
        for n, row in enumerate(rows)
    ]
    for bar in bars:
        x, wide = _MARGIN + bar.began * scale, (bar.ended - bar.began) * scale
        parts.append(
            f'<rect x="{x:.2f}" y="{rows.index(bar.row) * _ROW + 3}" width="{wide:.2f}" '
            f'height="{_ROW - 6}" fill="{_COLOURS[bar.name]}"/>'
        )
    for n in range(6):
        x = _MARGIN + n / 5 * last * scale
        parts.append(
            f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{n / 5 * last:.0f} ms</text>'
        )
    return _svg(_LONG + 20, height, parts)


def _rank(row: str) -> tuple[int, int]:
    order = {"consumer": 0, "source": 1}
    digits = "".join(c for c in row if c.isdigit())
    return order.get(row, 2), int(digits or 0)


def joined(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """Spans of one kind that nearly touch as one, and without those too short to see."""
    made: list[Bar] = []
    latest: dict[str, Bar] = {}
    for bar in sorted(bars, key=lambda b: (b.row, b.began)):
        before = latest.get(bar.row)
        if before is not None and before.name == bar.name and bar.began - before.ended <= gap:
            made[-1] = before._replace(ended=max(before.ended, bar.ended))
        else:
            made.append(bar)
        latest[bar.row] = made[-1]
    return [bar for bar in made if bar.ended - bar.began >= gap]


def _legend(bars: Sequence[Bar]) -> str:
    there = {bar.name for bar in bars}
    keys = "".join(
        f'<span class=key style="background:{colour}"></span>{_SAYS.get(name, name)}'
        for name, colour in _COLOURS.items()
        if name in there
    )
    return f"<p class=soft>{keys}</p>"
