"""What rounds of load came to: medians, ratios, a table."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Literal, NamedTuple

Rounds = Mapping[str, list[dict[str, float]]]  # of each variant, round by round


class Column(NamedTuple):
    key: str
    title: str
    digits: int


COLUMNS = (
    Column("requests_a_second", "requests/s", 0),
    Column("p50_ms", "p50 ms", 1),
    Column("p99_ms", "p99 ms", 1),
    Column("health_p99_ms", "/health p99 ms", 1),
    Column("server_cpu_ms", "CPU ms of the server, a request", 2),
    Column("workers_cpu_ms", "of its workers", 2),
)


class Results(NamedTuple):
    """Of two kinds of load."""

    full: Rounds  # as many requests as it answers
    equal: Rounds  # the same number for each variant
    rate: float  # of these, a second


class Goal(NamedTuple):
    """Ours, beside another's in the same round."""

    text: str
    load: Literal["full", "equal"]
    key: str
    other: str
    least: float = 0.0
    most: float = float("inf")

    def ratio(self, results: Results) -> float:
        rounds: Rounds = getattr(results, self.load)
        pairs = zip(rounds["pool"], rounds[self.other], strict=True)
        return median(ours[self.key] / theirs[self.key] for ours, theirs in pairs)

    def is_met(self, results: Results) -> bool:
        return self.least <= self.ratio(results) <= self.most


GOALS = (
    Goal(
        "full load: requests/s, of run_in_executor's; 1.3 or more",
        "full",
        "requests_a_second",
        "executor",
        least=1.3,
    ),
    Goal(
        "full load: /health p99, of inline's; 0.1 or less",
        "full",
        "health_p99_ms",
        "inline",
        most=0.1,
    ),
    Goal(
        "equal load: /health p99, of run_in_executor's; 1 or less",
        "equal",
        "health_p99_ms",
        "executor",
        most=1.0,
    ),
)


def medians(rounds: Rounds) -> dict[str, dict[str, float]]:
    return {
        name: {key: median(each[key] for each in made) for key in made[0]}
        for name, made in rounds.items()
    }


def table(rounds: Rounds, titles: Mapping[str, str]) -> str:
    head = " | ".join(column.title for column in COLUMNS)
    lines = [f"| images prepared | {head} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in medians(rounds).items():
        cells = [f"{row[column.key]:,.{column.digits}f}" for column in COLUMNS]
        lines.append(f"| {titles[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(results: Results) -> str:
    return "\n".join(
        f"{goal.ratio(results):5.2f}  {goal.text}{'' if goal.is_met(results) else ' (missed)'}"
        for goal in GOALS
    )
