"""The picture: throughput, and how long requests and /health waited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from .rounds import COLUMNS, Column, Rounds, medians

OURS, THEIRS, DOT = "#1b6ca8", "#b9bec5", "#33373d"
DRAWN = ("requests_a_second", "p99_ms", "health_p99_ms")


def draw(rounds: Rounds, titles: Mapping[str, str], path: Path) -> None:
    """Bars for medians, a dot for each round."""
    columns = [column for column in COLUMNS if column.key in DRAWN]
    figure, panels = plt.subplots(
        1, len(columns), figsize=(10, 2.4), layout="constrained", sharey=True
    )
    for axes, column in zip(panels, columns, strict=True):
        _bars(axes, rounds, column)
    names = list(rounds)
    panels[0].set_yticks(range(len(names)), [titles[name] for name in names], fontsize=9)
    panels[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _bars(axes: plt.Axes, rounds: Rounds, column: Column) -> None:
    for height, (name, row) in enumerate(medians(rounds).items()):
        colour = OURS if name == "pool" else THEIRS
        axes.barh(height, row[column.key], color=colour, height=0.62)
        values = [each[column.key] for each in rounds[name]]
        axes.plot(values, [height] * len(values), ".", color=DOT, markersize=4, alpha=0.7)
    axes.set_title(column.title, fontsize=10)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
