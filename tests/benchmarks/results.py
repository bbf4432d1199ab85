"""The JSON of a run, read: medians with their spread, ratios, and goals met or missed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from .contenders import CONTENDERS
from .workloads import WORKLOADS, Goal, Metric

Record = dict[str, Any]
NOT_PEERS = ("floor", "idle")


@dataclass(frozen=True)
class Spread:
    """One figure over all repeats."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.least)}–{short(self.most)})"


def short(value: float) -> str:
    """Three digits, without an exponent."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 4}f}"


@dataclass(frozen=True)
class Verdict:
    """A goal beside what was reached."""

    goal: Goal
    reached: float | None
    against: str | None  # the contender's name

    @property
    def met(self) -> bool:
        if self.reached is None:
            return False
        if self.goal.at == "least":
            return self.reached >= self.goal.limit
        return self.reached <= self.goal.limit


def spread(record: Record, workload: str, contender: str, key: str) -> Spread | None:
    repeats = record["workloads"].get(workload, {}).get("results", {}).get(contender, [])
    values = [repeat[key] for repeat in repeats if key in repeat]
    return Spread.of(values) if values else None


def verdicts(record: Record, workload: str) -> list[Verdict]:
    """What of the goals could be judged."""
    goals = [goal for goal in WORKLOADS[workload].goals if not (goal.full and record["quick"])]
    found = [_verdict(record, workload, goal) for goal in goals]
    return [verdict for verdict in found if verdict.reached is not None]


def _verdict(record: Record, workload: str, goal: Goal) -> Verdict:
    ours = spread(record, workload, goal.ours, goal.metric)
    if goal.against is None:
        return Verdict(goal, None if ours is None else ours.median, None)
    name = best_peer(record, workload, goal.metric) if goal.against == "best" else goal.against
    theirs = None if name is None else spread(record, workload, name, goal.metric)
    if ours is None or theirs is None or theirs.median == 0:
        return Verdict(goal, None, name)
    if goal.difference:
        return Verdict(goal, ours.median - theirs.median, name)
    return Verdict(goal, ours.median / theirs.median, name)


def best_peer(record: Record, workload: str, key: str) -> str | None:
    better = {metric.key: metric.better for metric in WORKLOADS[workload].metrics}[key]
    peers: dict[str, float] = {
        name: figures.median
        for name in record["workloads"][workload]["results"]
        if name not in NOT_PEERS and CONTENDERS[name].module != "ours"
        if (figures := spread(record, workload, name, key)) is not None
    }
    if not peers:
        return None
    return (max if better == "more" else min)(peers, key=lambda name: peers[name])


def ratio(record: Record, workload: str, metric: Metric, contender: str) -> float | None:
    """How many times better ours is; under 1 it is worse."""
    ours = spread(record, workload, "ours", metric.key)
    theirs = spread(record, workload, contender, metric.key)
    if ours is None or theirs is None or 0 in (ours.median, theirs.median):
        return None
    quotient = ours.median / theirs.median
    return quotient if metric.better == "more" else 1 / quotient


def goal_text(workload: str, verdict: Verdict) -> str:
    """What was to be reached and what was, in words."""
    return f"{subject(workload, verdict)}: {reached_text(workload, verdict)}"


def subject(workload: str, verdict: Verdict) -> str:
    """What a goal speaks of, beside what."""
    goal, name = verdict.goal, verdict.against
    who = "" if goal.ours == "ours" else f"{CONTENDERS[goal.ours].title}, "
    other = "" if name is None else f", beside {CONTENDERS[name].title}"
    best = " (the best peer)" if goal.against == "best" else ""
    return f"{who}{_metric(workload, goal).label}{other}{best}"


def reached_text(workload: str, verdict: Verdict) -> str:
    judged = "met" if verdict.met else "MISSED"
    return f"{shown(workload, verdict)} (goal {bound(workload, verdict.goal)}): {judged}"


def shown(workload: str, verdict: Verdict) -> str:
    return "" if verdict.reached is None else _shown(workload, verdict.goal, verdict.reached)


def bound(workload: str, goal: Goal) -> str:
    return f"{'≥' if goal.at == 'least' else '≤'} {_shown(workload, goal, goal.limit)}"


def _metric(workload: str, goal: Goal) -> Metric:
    return next(metric for metric in WORKLOADS[workload].metrics if metric.key == goal.metric)


def _shown(workload: str, goal: Goal, value: float) -> str:
    """A ratio where it is one; small ones are easier read as 1/n."""
    if goal.against is not None and not goal.difference:
        return f"1/{1 / value:.3g}" if 0 < value < 0.5 else f"{value:.3g}×"
    return f"{'+' if goal.difference else ''}{value:.3g} {_metric(workload, goal).unit}".strip()


def summary(record: Record, workload: str) -> str:
    """A table for the terminal, and the goals."""
    lines = []
    for name in record["workloads"][workload]["results"]:
        figures = [
            f"{metric.label} {found} {metric.unit}"
            for metric in WORKLOADS[workload].metrics
            if (found := spread(record, workload, name, metric.key)) is not None
        ]
        lines.append(f"    {CONTENDERS[name].title:34} {'; '.join(figures)}")
    lines += [f"    → {goal_text(workload, verdict)}" for verdict in verdicts(record, workload)]
    return "\n".join(lines)
