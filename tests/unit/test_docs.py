"""The programs in the documentation run, and print what it says they print.

A program is a block of Python that begins with ``# file: its_name.py``. A block of text right
after it is its output, to the letter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import ROOT, Script

PAGES = (
    "README.md",
    "docs/guide.md",
    "docs/pools.md",
    "docs/seeing.md",
    "docs/command-line.md",
    "docs/serving.md",
)

PROGRAM = re.compile(
    r"^```python\n(?P<text># file: (?P<name>\w+\.py)\n.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


EXPECTED = re.compile(r"takes its place$|%\|.*batch|^$")  # a death, a progress bar


class Program(NamedTuple):
    page: str
    name: str
    text: str
    output: str | None


def programs(page: str) -> list[Program]:
    text = Path(ROOT, page).read_text()
    return [Program(page, m["name"], m["text"], m["output"]) for m in PROGRAM.finditer(text)]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_python_is_a_program(page: str) -> None:
    blocks = Path(ROOT, page).read_text().count("\n```python")
    assert len(programs(page)) == blocks > 0


@pytest.mark.parametrize(
    "program", [p for page in PAGES for p in programs(page)], ids=lambda p: p.name
)
def test_program_does_what_the_page_says(tmp_path: Path, program: Program) -> None:
    file = tmp_path / program.name
    file.write_text(program.text)
    ended = Script("-W", "error", str(file), cwd=tmp_path).end()
    told = [line for line in ended.err.splitlines() if not EXPECTED.search(line)]
    assert (ended.code, told) == (0, [])
    if program.output is not None:
        assert ended.out == program.output
