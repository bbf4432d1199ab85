"""The command line: what it measures, recommends, finds, shows and refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioprefetch import Prefetcher
from aioprefetch._bench import Bench
from aioprefetch._cli import main
from aioprefetch._doctor import (
    Finding,
    descriptor_finding,
    examine,
    memory_finding,
    shipping_finding,
)
from aioprefetch._html import joined, nice, page, second_of
from aioprefetch._progress import Line
from aioprefetch._stats import Setting, Stats
from aioprefetch._summary import as_json, as_text
from aioprefetch._sweep import (
    CLOSE,
    SLOT,
    Budget,
    Choice,
    Measured,
    Result,
    Sample,
    Wishes,
    candidates,
    recommend,
    worker_counts,
)
from aioprefetch._target import Target, Unusable, load
from tests.processes import ROOT, Script

MODULE = """\
import threading
import time
import numpy as np
from aioprefetch import Prefetcher


class Slow:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.001)
        return np.full(4, index)


class Locked(Slow):
    def __init__(self):
        self.lock = threading.Lock()


class Broken(Slow):
    def __getitem__(self, index):
        raise KeyError("no such file")


def make():
    return Slow()


def numbers():
    yield from range(50)


slow = Slow()
locked = Locked()
broken = Broken()
once = iter([1, 2])
number = 5
empty = []
prefetcher = Prefetcher(slow, batch_size=4, num_proc=0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of datasets in it."""
    (tmp_path / "train.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    return tmp_path


def start(folder: Path, *arguments: str) -> Script:
    return Script("-W", "error", "-m", "aioprefetch", *arguments, cwd=folder)


# Real runs


def test_bench_measures_recommends_and_writes(folder: Path) -> None:
    files = ("--json", "run.json", "--html", "run.html")
    limits = ("--seconds", "1.5", "--num-proc", "0,1", "--batch-size", "8", "--consumer-ms", "1")
    ended = start(folder, "bench", "train:slow", *limits, *files).end()
    assert ended.code == 0, ended.err
    assert "Recommended: Prefetcher(…, num_proc=" in ended.out
    report = json.loads((folder / "run.json").read_text())
    first = report["measured"][0]
    assert (first["num_proc"], first["batch_size"]) == (0, 8)
    assert 50 < first["rate"] < 1000  # an item takes a millisecond
    assert report["ceiling"] < 8 / 0.001  # a batch of 8 takes the consumer one too
    assert report["elapsed"] < 12
    text = (folder / "run.html").read_text()
    assert "under the recommended setting" in text


def test_interrupted_it_shows_what_was_measured(folder: Path) -> None:
    arguments = ("bench", "train:slow", "--seconds", "4", "--num-proc", "0", "--json", "run.json")
    script = start(folder, *arguments, "--num-prefetch", "2,4,8")
    assert script.process.stderr is not None
    for line in script.process.stderr:
        if line == "measuring num_prefetch\n":
            break
    script.process.send_signal(signal.SIGINT)
    ended = script.end()
    assert (ended.code, "Traceback" in ended.err) == (130, False)
    assert "It was interrupted" in ended.out
    report = json.loads((folder / "run.json").read_text())
    assert report["interrupted"] is True
    assert report["measured"][0]["rates"]


def test_doctor_finds_this_machine_fit(folder: Path) -> None:
    ended = start(folder, "doctor", "train:slow", "--json", "found.json").end()
    assert (ended.code, ended.err) == (0, "written: found.json\n")
    assert "Slow is map-style, 64 items" in ended.out
    subjects = {f["subject"] for f in json.loads((folder / "found.json").read_text())["findings"]}
    assert {"Python", "shared memory", "CPUs", "BLAS", "file descriptors", "pickling"} <= subjects


# Bench


async def quick(source: Any, **wishes: Any) -> Result:
    target = Target("it", Prefetcher(source, num_proc=0)._config.arguments())
    limits = Wishes(seconds=0.2, num_proc=[0], **wishes)
    return await Bench(target, limits, _silent, traced=None).run()


async def test_items_are_counted_although_the_last_batch_is_short() -> None:
    result = await quick(list(range(5)), batch_size=[64], consumer=0.01)
    assert 200 < result.measured[0].rate <= 500  # 5 items in 10 ms, not 64


async def test_what_a_prefetcher_refuses_is_left_out() -> None:
    target = Target("it", {"source": iter_numbers, "task_timeout": 5.0})
    bench = Bench(target, Wishes(0.2, num_proc=[0]), _silent, traced=None)
    with pytest.raises(Unusable, match="task_timeout needs worker processes"):
        await bench.run()


def iter_numbers() -> Any:
    yield from range(10)


async def test_without_items_it_says_so() -> None:
    with pytest.raises(Unusable, match="no items"):
        await quick([])


def row(rate: float, choice: Choice, window: int = 4, *, wait: float = 0.5) -> Measured:
    samples = [Sample(rate * f, wait, 0.2) for f in (1.0, 0.5, 3.0)]
    stats = Stats(delivered=9, setting=Setting(num_prefetch=window))
    return Measured(choice, samples, stats)


def test_the_smallest_setting_close_to_the_best_is_recommended() -> None:
    table = [row(50, Choice(0)), row(96, Choice(1)), row(100, Choice(2)), row(94, Choice(0, 8))]
    advice = recommend(table)
    assert (advice.take, advice.best) == (table[1], table[2])


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (row(96, Choice(2), 4), row(100, Choice(2, num_prefetch=16), 16)),
        (row(96, Choice(2, 8), 4), row(100, Choice(2, 64), 4)),
        (row(96, Choice(2)), row(100, Choice(2, mp_context="spawn"))),
    ],
    ids=["window", "batch", "start method"],
)
def test_of_as_many_workers_the_one_that_holds_less_is_smaller(
    small: Measured, large: Measured
) -> None:
    assert recommend([large, small]).take is small


@given(st.lists(st.tuples(st.floats(1, 1e6), st.integers(0, 16)), min_size=1, max_size=9))
def test_nothing_smaller_is_as_good(numbers: list[tuple[float, int]]) -> None:
    table = [row(rate, Choice(workers)) for rate, workers in numbers]
    take, best = recommend(table)
    close = (1 - CLOSE) * best.rate
    assert best.rate == max(m.rate for m in table)
    assert take.rate >= close
    assert not [m for m in table if m.rate >= close and m.size < take.size]


def test_workers_are_swept_up_to_the_cpus() -> None:
    assert worker_counts(1) == [0, 1, 2]
    assert worker_counts(6) == [0, 1, 2, 4, 6]


def test_a_sweep_changes_one_argument() -> None:
    at = Choice(2, 32, None, "spawn")
    wishes = Wishes(batch_size=[8, None])
    assert candidates("batch_size", at, wishes) == [
        Choice(2, 8, None, "spawn"),
        Choice(2, None, None, "spawn"),
    ]
    assert [c.num_prefetch for c in candidates("num_prefetch", at, wishes)] == [None, 4, 16]


def test_without_workers_there_is_no_start_method() -> None:
    assert Choice(0, mp_context="spawn").arguments()["mp_context"] is None


def test_a_budget_is_shared_out() -> None:
    now = [100.0]
    budget = Budget(60.0, clock=lambda: now[0])
    end = budget.share(1, 4)
    assert end == 15.0
    assert budget.slot(end, settings=5, start=0.4) == pytest.approx(0.6)
    assert budget.slot(end, settings=1, start=0.4) == SLOT[1]
    now[0] += 40
    assert (budget.used, budget.left) == (40.0, 20.0)
    assert budget.slot(end, settings=5, start=0.4) == SLOT[0]
    assert budget.share(1, 2) == 50.0
    now[0] += 40
    assert budget.left == 0.0


# What it shows


def measured() -> Result:
    wishes = Wishes(consumer=0.005)
    rows = [row(50, Choice(0, 32)), row(100, Choice(1, 32)), row(101, Choice(2, 32), 8)]
    return Result("train:<b>&", wishes, table=rows, ceiling=150.0, left_out={"a": "b"})


def test_the_report_says_what_to_take_and_why() -> None:
    text = as_text(measured())
    assert "Recommended: Prefetcher(…, num_proc=1, batch_size=32)\n" in text
    fastest = "101 items/s with num_proc=2, batch_size=32, num_prefetch=8."
    assert f"within 5% of the fastest: 100 items/s, and {fastest}" in text
    assert "The consumer by itself takes 150 items/s: this is 67% of it." in text
    assert "rough answer" in text  # the rates lie far apart
    [taken] = [line for line in text.splitlines() if line.endswith("←")]
    assert taken.split()[:2] == ["1", "32"]


def test_without_measurements_there_is_no_recommendation() -> None:
    nothing = Result("it", Wishes(), interrupted=True)
    assert as_text(nothing) == "Nothing was measured."
    assert as_json(nothing)["recommendation"] is None
    assert "Nothing was measured" in page(as_json(nothing))


EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "pid": 10, "tid": 0, "name": "process_name", "args": {"name": "worker 0"}},
    {"ph": "X", "pid": 0, "tid": 1, "name": "wait", "ts": 0.0, "dur": 9e5},
    {"ph": "X", "pid": 0, "tid": 1, "name": "consume", "ts": 9e5, "dur": 6e5},
    {"ph": "X", "pid": 10, "tid": 0, "name": "task", "ts": 0.0, "dur": 15e5},
    {"ph": "X", "pid": 10, "tid": 0, "name": "fetch", "ts": 1e5, "dur": 2e5},
    {"ph": "X", "pid": 10, "tid": 0, "name": "wait", "ts": 7e5, "dur": 1e5},
    {"ph": "b", "pid": 10, "tid": 0, "name": "map", "ts": 8e5, "id": 1},
    {"ph": "e", "pid": 10, "tid": 0, "name": "map", "ts": 9e5, "id": 1},
]


def test_the_timeline_is_the_last_second() -> None:
    assert {tuple(bar) for bar in second_of(EVENTS)} == {
        ("consumer", "wait", 0.0, 400.0),
        ("consumer", "consume", 400.0, 1000.0),
        ("worker 0", "idle", 200.0, 300.0),
        ("worker 0", "map", 300.0, 400.0),
    }
    assert second_of([]) == []


def test_many_short_spans_are_drawn_as_few() -> None:
    bars = [b for b in second_of(EVENTS) if b.name == "idle"]
    many = [bars[0]._replace(began=n / 10, ended=n / 10 + 0.09) for n in range(1000)]
    [bar] = joined(many, 0.5)
    assert bar.began == 0.0
    assert bar.ended == pytest.approx(99.99)


class Reader(HTMLParser):
    """Whether every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_parses_and_fetches_nothing() -> None:
    text = page(as_json(measured()), EVENTS)
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert {"svg", "table", "style"} <= reader.seen
    assert not reader.seen & {"script", "img", "link", "iframe"}
    assert not [word for word in ("http", "src=", "href", "url(", "@import") if word in text]
    assert "train:&lt;b&gt;&amp;" in text
    assert "<b>" not in text
    drawings = [f"<svg{part.split('</svg>')[0]}</svg>" for part in text.split("<svg")[1:]]
    assert len([ElementTree.fromstring(drawing) for drawing in drawings]) == 3


@given(st.floats(1e-6, 1e9))
def test_an_axis_ends_above_its_values(value: float) -> None:
    assert value <= nice(value) <= 2.1 * value


def test_progress_is_one_line_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = Line(10.0)
    line.tell(5.0, "num_proc: num_proc=2, batch_size=32")
    line.tell(6.0, "done")
    line.close()
    shown = capsys.readouterr().err
    assert shown.count("\n") == 0
    assert shown.split("\r")[1:3] == [" 50%  num_proc: num_proc=2, b", " 60%  done".ljust(29)]


# Doctor


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}


def test_a_dataset_that_does_not_pickle_is_a_problem(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "train:locked"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  pickling          source.lock cannot be pickled" in out
    assert "→ Create it in the worker instead" in out


def test_without_workers_it_need_not_pickle(folder: Path) -> None:
    target = load("train:locked")
    arguments = {**target.arguments, "num_proc": 0}
    assert levels(examine(Target("it", arguments)))["pickling"] == "ok"


@pytest.mark.filterwarnings("ignore:mp_context='fork'")
def test_threads_are_a_hazard_where_it_forks() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="of the dataset")
    thread.start()
    try:
        usual = levels(examine(Target("it", {"source": [1, 2]})))
        forks = levels(examine(Target("it", {"source": [1, 2], "mp_context": "fork"})))
    finally:
        end.set()
        thread.join()
    assert (usual["threads"], forks["threads"]) == ("note", "warning")
    assert (usual["start methods"], forks["start methods"]) == ("ok", "warning")


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (memory_finding(50 << 20, "50 MB"), "problem", "raise the limit"),
        (memory_finding(500 << 20, "500 MB"), "warning", "batch_size"),
        (memory_finding(8 << 30, "8 GB"), "ok", ""),
        (descriptor_finding(256, 64, asked=True), "problem", "ulimit -n 1088"),
        (descriptor_finding(256, 64, asked=False), "warning", "lower num_proc"),
        (descriptor_finding(2000, 64, asked=True), "ok", ""),
        (shipping_finding(100, 0, 1 << 30), "ok", ""),
        (shipping_finding(60_000_000, 0, 1 << 40), "warning", "SharedList"),
        (shipping_finding(100, 1 << 29, 1 << 30), "warning", "mmap_mode"),
    ],
)
def test_each_finding_has_its_level_and_the_way_out(
    finding: Finding, level: str, words: str
) -> None:
    assert finding.level == level
    assert words in finding.way_out
    assert bool(finding.way_out) == (level != "ok")


def test_empty_and_one_shot_datasets_are_found(folder: Path) -> None:
    assert levels(examine(load("train:empty")))["dataset"] == "problem"
    assert levels(examine(load("train:once")))["dataset"] == "warning"


# Refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent:x", "cannot import absent: ModuleNotFoundError"),
        ("train:absent", "train has no absent; there are"),
        ("train", "is not MODULE:OBJECT"),
        ("train.py:slow", "write train, a module's name"),
        ("train:number", "int is not a source"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_what_is_no_dataset_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, words: str
) -> None:
    assert main([command, name]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train:broken", "TaskError: item 0 failed in fetch: KeyError"),
        ("train:once", "an iterator, which can be read once"),
        ("train:empty", "has no items"),
    ],
)
def test_what_cannot_be_read_is_not_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert main(["bench", name, "--num-proc", "0", "--seconds", "1"]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--seconds", "0", "more than 0"),
        ("--num-proc", "0,x", "'x' is not a whole number, 0 or more"),
        ("--batch-size", "0", "1 or more"),
        ("--json", "absent/run.json", "cannot be written"),
        ("--consumer-ms", "-1", "is not a number, 0 or more"),
    ],
)
def test_options_are_checked_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], option: str, value: str, words: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "train:slow", option, value])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [(), ("bench",), ("doctor",)])
def test_help_has_examples_and_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    out = capsys.readouterr().out
    assert "examples:\n  python -m aioprefetch " in out
    assert max(map(len, out.splitlines())) <= 80


def test_workers_import_none_of_it() -> None:
    rooms = [f"aioprefetch.{name}" for name in ("_cli", "_bench", "_doctor", "_html", "_sweep")]
    code = (
        f"import aioprefetch._serve, aioprefetch._cli, sys; print(set({rooms}) & {{*sys.modules}})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "{'aioprefetch._cli'}\n"


@pytest.mark.parametrize("name", ["train:make", "train:numbers", "train:prefetcher", "train:slow"])
def test_datasets_and_what_makes_them_are_understood(folder: Path, name: str) -> None:
    assert load(name).config.facts.kind in ("map", "iterable", "factory")


@pytest.fixture
def configured(folder: Path) -> Target:
    return load("train:prefetcher")


async def test_a_prefetcher_keeps_its_configuration(configured: Target) -> None:
    result = await Bench(configured, Wishes(0.2, num_proc=[0]), _silent, traced=None).run()
    assert {m.choice.batch_size for m in result.measured} == {4}


def _silent(used: float, text: str) -> None:
    pass
