"""The page: one table a fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .data import LENGTH
from .one import AFTER, TIMEOUT

HEAD = f"""\
# Reliability

What becomes of a loader when a worker dies, hangs or is stopped, or its own process is killed.
This page is made by `python -m tests.reliability`, in the environment that `make bench` makes.

Each loader reads the same {LENGTH} items with two workers. The fault comes after {AFTER} of them;
an item that does harm does so the first time only, as a crash of the machine's making does. Where
a loader can be given a time limit for an item it is {TIMEOUT:g} s. *Lost* are items that did not
come; *left behind* are processes and names in `/dev/shm` two seconds after the end.

What this package does in each of these cases, and in some forty others, is tested: `make test`
plays every fault once, `make chaos` plays them under every start method and event loop, and
`make soak` does them at random for as long as you like.
"""


def page(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]],
    faults: Mapping[str, str],
    titles: Mapping[str, str],
    versions: Mapping[str, str],
) -> str:
    lines = [HEAD, ", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    for fault, what in faults.items():
        lines += ["", f"## {what[0].upper()}{what[1:]}", ""]
        lines += ["| loader | the consumer saw | after | lost | repeated | left behind |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [_row(titles[name], fault, seen) for name, seen in results[fault].items()]
    return "\n".join(lines) + "\n"


def _row(title: str, fault: str, seen: Mapping[str, Any]) -> str:
    if "cannot" in seen or "delivered" not in seen:
        return f"| {title} | does not run here: {seen.get('cannot', 'no answer')} | | | | |"
    cells = [title, _saw(fault, seen), _after(seen)]
    if fault == "parent killed":
        cells += ["", ""]
    else:
        cells += [str(seen["lost"]), str(seen["repeated"])]
    return f"| {' | '.join([*cells, _left(seen)])} |"


def _saw(fault: str, seen: Mapping[str, Any]) -> str:
    if fault == "parent killed":
        return "nothing more"
    if not seen["ended"]:
        return f"**nothing more: it hangs** after {seen['delivered']} items"
    if seen["error"]:
        return f"`{_short(seen['error'])}` after {seen['delivered']} items"
    if seen["lost"]:
        return f"**an early end, without an error,** after {seen['delivered']} items"
    return f"all {seen['delivered']} items"


def _short(error: str) -> str:
    text = error.replace("|", "/").replace("`", "'")
    return text if len(text) <= 100 else f"{text[:100]}…"


def _after(seen: Mapping[str, Any]) -> str:
    return "" if seen["seconds"] is None else f"{seen['seconds']:.1f} s"


def _left(seen: Mapping[str, Any]) -> str:
    return ", ".join(_things(seen)) or "nothing"


def _things(seen: Mapping[str, Any]) -> Iterator[str]:
    if seen["processes"]:
        yield f"**{seen['processes']} processes**"
    if seen["shared"]:
        yield f"**{seen['shared']} names in /dev/shm**"
