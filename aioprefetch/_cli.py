"""``python -m aioprefetch``: what may be said on the command line.

What the commands do is imported when one is given, and by no worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import __version__

if TYPE_CHECKING:
    from ._sweep import Result, Wishes
    from ._target import Target

_INTERRUPTED = 130  # as shells have it for Ctrl-C

_MAIN = """\
examples:
  python -m aioprefetch doctor                is this machine fit for it?
  python -m aioprefetch doctor train:dataset  can this dataset go to workers?
  python -m aioprefetch bench train:dataset   which num_proc, batch_size, …?

`train:dataset` is the object `dataset` of train.py in the current directory.
`COMMAND --help` says more.
"""

_BENCH = """\
Measure your own dataset: how many items a second come under which setting, and
which setting to take.

MODULE:OBJECT is a dataset, a function without arguments that makes one, or a
Prefetcher, whose other arguments are kept. One argument is swept after another.
The settings of a sweep are measured in turns and compared by their medians.
Recommended is the smallest setting within 5% of the best.
"""

_BENCH_EXAMPLES = """\
examples:
  python -m aioprefetch bench train:dataset
  python -m aioprefetch bench train:dataset --consumer-ms 20 --batch-size 64
        beside a training step of 20 ms: how few workers keep up with it?
  python -m aioprefetch bench train:make --batch-size 32,64 --num-proc 0,1,2,4
  python -m aioprefetch bench train:prefetcher --json run.json --html run.html

Ctrl-C ends it with what was measured so far. Other load on the machine is part
of the answer: run it while that does what it will do beside the loader.

exit status: 0; 2 if the dataset cannot be read; 130 after Ctrl-C
"""

_DOCTOR = """\
Check this machine, and a dataset if one is named: whether it can be sent to
workers, or which part of it cannot, and how large it is; start methods, shared
memory, limits of memory, CPUs and file descriptors, threads of BLAS, and what
makes a fork unsafe. Each finding is ok, a note, a WARNING or a PROBLEM, and
says the way out.
"""

_DOCTOR_EXAMPLES = """\
examples:
  python -m aioprefetch doctor
  python -m aioprefetch doctor train:dataset
  python -m aioprefetch doctor train:prefetcher --json findings.json

The module is imported; nothing is read from the dataset.

exit status: 0; 1 if there is a problem; 2 if the dataset cannot be imported
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    from ._target import Unusable

    try:
        return int(arguments.run(arguments))
    except Unusable as error:
        print(f"aioprefetch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aioprefetch",
        description="Prefetch data in worker processes and iterate it with `async for`.",
        epilog=_MAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aioprefetch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_bench(commands)
    _add_doctor(commands)
    return parser


def _command(commands: Any, name: str, about: str, text: str, examples: str) -> Any:
    return commands.add_parser(
        name,
        help=about,
        description=text,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_bench(commands: Any) -> None:
    about = "measure a dataset, and recommend settings"
    bench = _command(commands, "bench", about, _BENCH, _BENCH_EXAMPLES)
    bench.set_defaults(run=_bench)
    add = bench.add_argument
    add(
        "target", metavar="MODULE:OBJECT", help="what to measure; the current directory is searched"
    )
    add("--seconds", type=_positive, default=60.0, metavar="S", help="for all of it (default: 60)")
    add(
        "--num-proc",
        type=_list(_count),
        metavar="N,…",
        help="workers (default: 0, 1, 2, 4, … CPUs)",
    )
    add(
        "--batch-size",
        type=_list(_batch),
        metavar="N,…",
        help="items a batch; `none` for one by one (default: the Prefetcher's, or 32)",
    )
    add(
        "--num-prefetch",
        type=_list(_least_one),
        metavar="N,…",
        help="batches on their way (default: the Prefetcher's, twice and eight times num_proc)",
    )
    add(
        "--mp-context",
        type=_list(str),
        metavar="NAME,…",
        help="start methods (default: the usual one and spawn)",
    )
    add(
        "--consumer-ms",
        type=_not_negative,
        default=0.0,
        metavar="MS",
        help="time that a training step takes for each batch, off the CPU (default: 0)",
    )
    add("--shuffle", action="store_true", help="read a map-style dataset in a random order")
    add("--unordered", action="store_true", help="take batches as they are completed")
    add(
        "--split",
        choices=("parent", "shard", "worker", "replicate"),
        help="who iterates an iterable dataset; see the guide",
    )
    add("--json", metavar="FILE", type=_writable, help="write all measurements")
    add("--html", metavar="FILE", type=_writable, help="write a page with plots and a timeline")


def _add_doctor(commands: Any) -> None:
    about = "check this machine and a dataset"
    doctor = _command(commands, "doctor", about, _DOCTOR, _DOCTOR_EXAMPLES)
    doctor.set_defaults(run=_doctor)
    doctor.add_argument(
        "target", metavar="MODULE:OBJECT", nargs="?", help="a dataset or Prefetcher"
    )
    doctor.add_argument("--json", metavar="FILE", type=_writable, help="write the findings")


# Values


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")
    return value


def _count(text: str) -> int:
    return _number(text, 0)


def _least_one(text: str) -> int:
    return _number(text, 1)


def _batch(text: str) -> int | None:
    return None if text.lower() == "none" else _number(text, 1)


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A type of values with commas between them, each once."""
    return lambda text: list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return value


def _positive(text: str) -> float:
    value = _not_negative(text)
    if not value:
        raise argparse.ArgumentTypeError("it must be more than 0")
    return value


def _writable(text: str) -> str:
    folder = os.path.dirname(os.path.abspath(text))
    if os.path.isdir(text) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: is {folder} a folder of yours?"
        )
    return text


# Commands


def _bench(arguments: argparse.Namespace) -> int:
    from . import _summary
    from ._sweep import Wishes
    from ._target import load

    wishes = Wishes(
        seconds=arguments.seconds,
        num_proc=arguments.num_proc,
        batch_size=arguments.batch_size,
        num_prefetch=arguments.num_prefetch,
        mp_context=arguments.mp_context,
        consumer=arguments.consumer_ms / 1e3,
        shuffle=arguments.shuffle,
        unordered=arguments.unordered,
        split=arguments.split,
    )
    target = load(arguments.target)
    with tempfile.TemporaryDirectory(prefix="aioprefetch-") as folder:
        trace = os.path.join(folder, "trace.json")
        result = _measure(target, wishes, trace if arguments.html else None)
        print(_summary.as_text(result))
        report = _summary.as_json(result)
        if arguments.json:
            _write(arguments.json, json.dumps(report, indent=2) + "\n")
        if arguments.html:
            from ._html import page, read_trace

            _write(arguments.html, page(report, read_trace(trace)))
    return _INTERRUPTED if result.interrupted else 0


def _measure(target: Target, wishes: Wishes, trace: str | None) -> Result:
    from ._bench import Bench
    from ._errors import PrefetchError, describe_error
    from ._progress import progress
    from ._target import Unusable

    shown = progress(wishes.seconds)
    try:
        return asyncio.run(Bench(target, wishes, shown.tell, traced=trace).run())
    except (PrefetchError, TypeError, ValueError, MemoryError) as error:
        text = describe_error(error).splitlines()[0]
        raise Unusable(f"{target.name} cannot be measured: {text}") from error
    finally:
        shown.close()


def _doctor(arguments: argparse.Namespace) -> int:
    from ._doctor import as_json, examine
    from ._target import load

    findings = examine(load(arguments.target) if arguments.target else None)
    print("\n".join(map(str, findings)))
    if arguments.json:
        _write(arguments.json, json.dumps(as_json(findings), indent=2) + "\n")
    return int(any(finding.level == "problem" for finding in findings))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"written: {path}", file=sys.stderr)
