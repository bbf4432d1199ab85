"""What a workload is: who takes part, what one repeat measures, what is to be reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.benchmarks.contenders import Contender

Figures = dict[str, float]


@dataclass(frozen=True)
class Metric:
    """A figure that a repeat gives."""

    key: str
    label: str
    unit: str
    better: Literal["more", "less"]


@dataclass(frozen=True)
class Goal:
    """A figure of ours beside another's, or beside a number.

    The figure divided by the one of ``against`` ("best" is the best peer), less it where
    ``difference`` is set, or as it is where ``against`` is None.
    """

    metric: str
    limit: float
    at: Literal["least", "most"]
    against: str | None = None
    difference: bool = False
    ours: str = "ours"
    full: bool = False  # a quick run is too small for it


@dataclass(frozen=True)
class Workload:
    """One question. `measure` runs in a process of its own and gives one repeat's figures."""

    name: str
    title: str
    text: str
    contenders: tuple[str, ...]
    quick: tuple[str, ...]  # those of a quick run
    metrics: tuple[Metric, ...]
    measure: Callable[[Contender, bool], Figures]
    goals: tuple[Goal, ...] = ()
    axis: str | None = None  # what grows from metric to metric, where they are a curve
    left_out: Mapping[str, str] = field(default_factory=dict)
