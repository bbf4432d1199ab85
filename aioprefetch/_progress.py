"""A line that says how far a measurement is."""

from __future__ import annotations

import shutil
import sys
from typing import Any, Protocol


class Progress(Protocol):
    """How far it is; called with the seconds used and what is being done."""

    def tell(self, used: float, text: str) -> None: ...
    def close(self) -> None: ...


class Line:
    """Overwritten on a terminal; elsewhere each thing that is done gets one of its own."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def tell(self, used: float, text: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            line = f"{min(1.0, used / self._seconds):4.0%}  {text}"
            self._write(f"\r{line[:width]:<{width}}")
        elif (kind := text.partition(":")[0]) != self._last:
            self._last = kind
            self._write(f"measuring {kind}\n" if ":" in text else f"{text}\n")

    def close(self) -> None:
        if self._terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class Bar:
    """A tqdm bar of the seconds."""

    def __init__(self, seconds: float, tqdm: Any) -> None:
        layout = "{percentage:3.0f}% |{bar:20}| {desc}"
        self._bar = tqdm(total=seconds, bar_format=layout, leave=False, file=sys.stderr)

    def tell(self, used: float, text: str) -> None:
        self._bar.n = min(used, self._bar.total)
        self._bar.set_description_str(text)

    def close(self) -> None:
        self._bar.close()


def progress(seconds: float) -> Progress:
    """A bar on a terminal where tqdm is installed, else plain text."""
    if not sys.stderr.isatty():
        return Line(seconds)
    try:
        from tqdm import tqdm
    except ImportError:
        return Line(seconds)
    return Bar(seconds, tqdm)
