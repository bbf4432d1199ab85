"""What rounds of load came to: medians, ratios, a table."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

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


class Goal(NamedTuple):
    """Ours, beside another's in the same round."""

    text: str
    key: str
    other: str
    least: float = 0.0
    most: float = float("inf")

    def ratio(self, rounds: Rounds) -> float:
        pairs = zip(rounds["pool"], rounds[self.other], strict=True)
        return median(ours[self.key] / theirs[self.key] for ours, theirs in pairs)

    def __str__(self) -> str:
        return self.text

    def is_met(self, rounds: Rounds) -> bool:
        return self.least <= self.ratio(rounds) <= self.most


GOALS = (
    Goal("requests/s, of run_in_executor's: 1.3 or more", "requests_a_second", "executor", 1.3),
    Goal("/health p99, of inline's: 0.1 or less", "health_p99_ms", "inline", most=0.1),
    Goal("/health p99, of run_in_executor's: 1 or less", "health_p99_ms", "executor", most=1.0),
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


def verdicts(rounds: Rounds) -> str:
    return "\n".join(
        f"{goal.ratio(rounds):5.2f}  {goal}{'' if goal.is_met(rounds) else ' (missed)'}"
        for goal in GOALS
    )
