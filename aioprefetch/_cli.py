"""``python -m aioprefetch``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m aioprefetch",
        description="Prefetch data in worker processes and iterate it with `async for`.",
    )
    parser.add_argument("--version", action="version", version=f"aioprefetch {__version__}")
    parser.parse_args(argv)
    parser.print_help()
    return 0
