"""One workload, one contender, one repeat; the figures as a line of JSON in a file.

Workers that are spawned import this module again, so it imports no peer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .contenders import CONTENDERS, CannotRun
from .workloads import WORKLOADS


def main() -> None:
    name, contender, size, path = sys.argv[1:]
    try:
        answer: object = WORKLOADS[name].measure(CONTENDERS[contender], size == "quick")
    except CannotRun as reason:
        answer = {"cannot": str(reason)}
    Path(path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
