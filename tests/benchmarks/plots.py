"""Pictures of results: bars with every repeat on them, or curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from .contenders import CONTENDERS
from .results import NOT_PEERS, Record, short, spread
from .workloads import WORKLOADS, Metric

OURS, THEIRS, ASIDE, DOT = "#1b6ca8", "#b9bec5", "#e3c67b", "#33373d"


def draw(record: Record, workload: str, path: Path) -> None:
    if WORKLOADS[workload].axis is None:
        figure = _bars(record, workload, WORKLOADS[workload].metrics[0])
    else:
        figure = _curves(record, workload)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _bars(record: Record, workload: str, metric: Metric) -> Any:
    rows = _sorted(record, workload, metric)
    figure, axes = plt.subplots(figsize=(7.5, 1.1 + 0.38 * len(rows)), layout="constrained")
    widest = max(most for *_, most in rows)
    for height, (name, middle, values, most) in enumerate(rows):
        axes.barh(height, middle, color=_colour(name), height=0.62)
        axes.plot(values, [height] * len(values), ".", color=DOT, markersize=4, alpha=0.7)
        axes.text(most + 0.012 * widest, height, short(middle), va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [CONTENDERS[name].title for name, *_ in rows], fontsize=9)
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel(_label(metric), fontsize=9)
    _finish(axes, WORKLOADS[workload].title)
    return figure


def _sorted(
    record: Record, workload: str, metric: Metric
) -> list[tuple[str, float, list[float], float]]:
    """The best at the top, that is last."""
    rows = [
        (name, found.median, [repeat[metric.key] for repeat in repeats], found.most)
        for name, repeats in record["workloads"][workload]["results"].items()
        if (found := spread(record, workload, name, metric.key)) is not None
    ]
    return sorted(rows, key=lambda row: row[1], reverse=metric.better == "less")


def _curves(record: Record, workload: str) -> Any:
    """Metrics named ``what_1``, ``what_2`` … are one curve each ``what``."""
    kinds = _kinds(workload)
    figure, grid = plt.subplots(
        1, len(kinds), figsize=(7.5, 3.2), layout="constrained", squeeze=False
    )
    for axes, (kind, metrics) in zip(grid[0], kinds.items(), strict=True):
        for name in record["workloads"][workload]["results"]:
            _curve(axes, record, workload, name, metrics)
        axes.set_xlabel(_axis_label(workload), fontsize=9)
        axes.set_ylabel(f"{_kind_label(metrics[0])}, {metrics[0].unit}", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(len(metrics)), [metric.key.split("_")[1] for metric in metrics])
        _finish(axes, WORKLOADS[workload].title if kind == next(iter(kinds)) else "")
        axes.legend(fontsize=8, frameon=False)
    return figure


def _kinds(workload: str) -> dict[str, list[Metric]]:
    kinds: dict[str, list[Metric]] = {}
    for metric in WORKLOADS[workload].metrics:
        kind, _, point = metric.key.rpartition("_")
        if kind and point.isdigit():
            kinds.setdefault(kind, []).append(metric)
    return kinds


def _curve(axes: Any, record: Record, workload: str, name: str, metrics: list[Metric]) -> None:
    points = [
        (place, found)
        for place, metric in enumerate(metrics)
        if (found := spread(record, workload, name, metric.key)) is not None
    ]
    places, spreads = [place for place, _ in points], [found for _, found in points]
    axes.plot(
        places,
        [found.median for found in spreads],
        "o-",
        color=OURS if CONTENDERS[name].module == "ours" else "#8a8f98",
        label=CONTENDERS[name].title,
    )
    axes.vlines(
        places, [found.least for found in spreads], [found.most for found in spreads], color=DOT
    )


def _axis_label(workload: str) -> str:
    axis = WORKLOADS[workload].axis
    return f"{axis}, power of ten" if axis == "indices" else str(axis)


def _kind_label(metric: Metric) -> str:
    before, colon, after = metric.label.partition(": ")
    return after if colon else before.partition(", num_proc")[0]


def _label(metric: Metric) -> str:
    unit = f", {metric.unit}" if metric.unit else ""
    return f"{metric.label}{unit} ({metric.better} is better)"


def _colour(name: str) -> str:
    if name in NOT_PEERS:
        return ASIDE
    return OURS if CONTENDERS[name].module == "ours" else THEIRS


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
