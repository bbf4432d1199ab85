"""Writes docs/conformance.md."""

from pathlib import Path

from tests.conformance.page import page
from tests.processes import ROOT

Path(ROOT, "docs", "conformance.md").write_text(page())
