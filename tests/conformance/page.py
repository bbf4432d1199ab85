"""docs/conformance.md: the table of behaviours as a page."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from tests.conformance.behaviours import BEHAVIOURS, Behaviour

_VERDICTS = {"K": "kept", "A": "adapted", "B": "better", "N": "not applicable"}

_HEAD = """# Conformance

What the test suites of other loaders check, row by row, and which test here is about it.
The tests named are part of `make test`; those in `test_torch.py` and `test_beside_torch.py`, which
run the same datasets through torch's DataLoader and compare the batches, are run by
`make conformance`. A row passes when its tests do. This page is made by
`python -m tests.conformance`.
"""


def page() -> str:
    """The page, from the table."""
    parts = [_HEAD, _summary()]
    for (peer, group), rows in groupby(BEHAVIOURS, key=lambda row: (row.peer, row.group)):
        parts.append(f"## {peer}: {group}\n\n{_table(list(rows))}")
    return "\n".join(parts)


def _summary() -> str:
    counts = Counter[str](row.verdict for row in BEHAVIOURS)
    told = ", ".join(f"{counts[verdict]} {name}" for verdict, name in _VERDICTS.items())
    return f"{len(BEHAVIOURS)} behaviours: {told}.\n"


def _table(rows: list[Behaviour]) -> str:
    lines = ["| there | what | here | tests |", "|---|---|---|---|"]
    for row in rows:
        theirs = "" if row.peer == "tensorpack" else row.theirs
        verdict = _VERDICTS[row.verdict] + (f": {row.note}" if row.note else "")
        tests = "<br>".join(f"`{test.rpartition('/')[2]}`" for test in row.ours)
        lines.append(f"| {theirs} | {row.checks} | {verdict} | {tests or '–'} |")
    return "\n".join(lines) + "\n"
