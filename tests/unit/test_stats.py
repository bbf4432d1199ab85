"""What `stats` says: the counts, the verdict, the advice, and its text."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from aioprefetch import Prefetcher, ProcessPool, Stats, TaskError
from aioprefetch._meter import Durations
from aioprefetch._stats import Busy, Setting, bottleneck, seconds, size
from aioprefetch.prometheus import PrefetchCollector
from tests.benchmarks import bottleneck as costs
from tests.datasets import Numbers
from tests.helpers import collect, run, until

# The verdict


@given(st.lists(st.floats(0.0, 0.5), min_size=3, max_size=3), st.integers(0, 3))
def test_what_is_always_at_work_is_the_bottleneck(others: list[float], place: int) -> None:
    """With twice the work of any other."""
    others.insert(place, 1.0)
    assert bottleneck(Busy(*others)) == Busy._fields[place]


@given(st.permutations([1.0, 0.85, 0.3, 0.1]))
def test_two_that_are_nearly_always_at_work_are_in_balance(parts: list[float]) -> None:
    assert bottleneck(Busy(*parts)) == "balanced"


@given(st.permutations([1.0, 0.75, 0.3, 0.1]))
def test_a_fifth_less_is_out_of_balance(parts: list[float]) -> None:
    assert bottleneck(Busy(*parts)) == Busy._fields[parts.index(1.0)]


idle = st.builds(Busy, *(st.floats(0.0, most) for most in (0.49, 0.24, 0.49, 0.24)))


@given(idle)
def test_when_nobody_is_busy_the_time_goes_between_them(busy: Busy) -> None:
    assert bottleneck(busy) == "transport"
    assert bottleneck(busy, held_up=True) == "workers"


def test_rebuilding_and_consuming_share_a_thread() -> None:
    assert bottleneck(Busy(workers=0.2, consumer=0.49, transport=0.48)) == "balanced"


# The numbers


@given(st.lists(st.floats(1e-6, 1000.0), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_within_5_percent(values: list[float], share: float) -> None:
    durations = Durations()
    for value in values:
        durations.add(value)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert durations.quantile(share) == pytest.approx(exact, rel=0.05)


def test_durations_of_any_size_have_a_class() -> None:
    durations = Durations()
    durations.add(0.0, 2)
    durations.add(1e9)
    assert durations.total == 3
    assert durations.quantile(0.5) < 1e-6
    assert durations.quantile(1.0) > 3600


def test_nothing_has_happened_yet() -> None:
    stats = Prefetcher(Numbers(3)).stats()
    assert (stats.delivered, stats.wait, stats.elapsed, stats.wait_share) == (0, 0, 0, 0)
    assert "Nothing has been delivered yet" in str(stats)
    with pytest.raises(FrozenInstanceError):
        stats.delivered = 1  # type: ignore[misc]


def rest(item: int) -> int:
    time.sleep(0.01)
    return item


async def test_counts_and_times_are_those_of_the_run() -> None:
    async with Prefetcher(Numbers(40), map_fn=rest, batch_size=2, num_proc=2) as p:
        began = time.monotonic()
        await collect(p)
        took = time.monotonic() - began
        stats = p.stats()
    assert (stats.delivered, stats.in_flight, stats.ready) == (20, 0, 0)
    assert stats.bytes >= 20 * 2 * 8
    assert (stats.restarts, stats.retries, stats.skipped) == (0, 0, 0)
    assert 0.9 * took < stats.elapsed <= took
    assert 0.7 < stats.wait_share <= 1.0
    assert 0.019 < stats.task_p50 <= stats.task_p90 <= stats.task_p99 < took
    assert 0 < stats.queue_wait < took
    assert p.stats().delivered == 20  # closed, and nothing is forgotten


async def test_what_is_on_its_way_is_counted() -> None:
    async with Prefetcher(Numbers(100), num_proc=1, num_prefetch=8) as p:
        batches = aiter(p)
        await anext(batches)
        assert await until(lambda: p.stats().ready == 8)  # nobody takes them
        assert p.stats().in_flight == 8


async def test_passes_add_up_and_the_time_between_them_does_not() -> None:
    p = Prefetcher(Numbers(4), num_proc=0)
    await collect(p)
    first = p.stats()
    await asyncio.sleep(0.2)
    await collect(p)
    second = p.stats()
    assert (first.delivered, second.delivered) == (4, 8)
    assert second.elapsed < first.elapsed + 0.2


async def test_a_wait_that_goes_on_is_seen() -> None:
    async with Prefetcher(Numbers(1), map_fn=rest_long, num_proc=1) as p:
        waiting = asyncio.ensure_future(anext(aiter(p)))
        await asyncio.sleep(0.2)
        assert p.stats().wait_share > 0.8
        waiting.cancel()


def rest_long(item: int) -> int:
    time.sleep(0.5)
    return item


async def test_a_time_out_of_the_consumer_is_a_wait() -> None:
    async with Prefetcher(Numbers(1), map_fn=rest_long, num_proc=1) as p:
        batches = aiter(p)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(batches)
        assert p.stats().wait > 0.14


def fails(item: int) -> int:
    if item % 2:
        raise ValueError(item)
    return item


@pytest.mark.parametrize("num_proc", [0, 1])
async def test_what_is_left_out_is_counted(num_proc: int) -> None:
    p = Prefetcher(Numbers(10), map_fn=fails, batch_size=5, on_error="skip", num_proc=num_proc)
    await collect(p)
    assert p.stats().skipped == p.skipped == 5
    p = Prefetcher(Numbers(4), map_fn=fails, on_error="skip", num_proc=num_proc)
    await collect(p)
    assert (p.stats().skipped, p.stats().delivered) == (2, 2)


class KillsOnce:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, item: int) -> int:
        if item == 3 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return item


async def test_deaths_and_what_runs_again_are_counted(tmp_path: Path) -> None:
    p = Prefetcher(Numbers(8), map_fn=KillsOnce(tmp_path / "mark"), num_proc=1, num_prefetch=2)
    assert await collect(p) == list(range(8))
    assert p.stats().restarts == 1
    assert p.stats().retries >= 1


async def test_errors_are_no_deliveries() -> None:
    async with Prefetcher(Numbers(2), map_fn=fails, num_proc=1) as p:
        batches = aiter(p)
        assert await anext(batches) == 0
        with pytest.raises(TaskError):
            await anext(batches)
        assert p.stats().delivered == 1


async def test_a_pool_adds_up_what_its_users_came_to() -> None:
    async with ProcessPool(2) as pool:
        first = Prefetcher(Numbers(20), map_fn=rest, pool=pool)
        second = Prefetcher(Numbers(10), map_fn=rest, pool=pool)
        await asyncio.gather(collect(first), collect(second), pool.run(rest, 1))
        stats = pool.stats()
        assert stats.delivered == 31
        assert stats.elapsed == pytest.approx(first.stats().elapsed + second.stats().elapsed)
        assert first.stats().delivered == 20
        assert 0.009 < stats.task_p50 < 0.1
    assert pool.stats() == Stats()


# End to end


def test_the_bottleneck_is_found() -> None:
    """One setting of each kind; `python -m tests.benchmarks.bottleneck` tries 40."""
    for setting in costs.grid(seed=1, settings=5):
        stats = run(costs.measure(setting, batches=40), asyncio.new_event_loop)
        assert stats.bottleneck == setting.expected, f"{setting}\n{stats}"


async def test_tiny_items_are_a_matter_of_transport() -> None:
    async with Prefetcher(range(20_000), num_proc=2) as p:
        async for _ in p:
            pass
        stats = p.stats()
    assert stats.bottleneck == "transport", str(stats)
    assert "batch_size" in stats.advice


# What to do

ADVICE = [
    (Busy(1.0, 0.2), Setting(num_proc=4, num_prefetch=16), "raise num_proc if cores are free"),
    (Busy(1.0, 0.2), Setting(num_proc=4, num_prefetch=2), "raise num_prefetch to 16"),
    (Busy(1.0, 0.2), Setting(num_proc=0, num_prefetch=4), "num_proc to 1"),
    (Busy(1.0, 0.2), Setting(num_prefetch=4, is_async=True), "concurrency"),
    (Busy(0.2, 0.2), Setting(num_prefetch=4, shared=True), "give the pool a larger num_proc"),
    (Busy(0.2, 1.0), Setting(num_prefetch=4), "nothing is to be gained"),
    (Busy(0.2, 0.1, source=1.0), Setting(num_prefetch=4), "have the workers read it"),
    (Busy(0.2, 0.1, transport=1.0), Setting(num_prefetch=4), "deliver arrays"),
    (Busy(0.2, 0.1, transport=1.0), Setting(num_prefetch=4, transfers=True), "transfer function"),
    (Busy(0.2, 0.1), Setting(num_prefetch=4), "handing over costs more than the work"),
    (Busy(0.9, 1.0), Setting(num_prefetch=4), "Consumer and workers are both at work"),
]


@pytest.mark.parametrize(("busy", "setting", "advice"), ADVICE, ids=[row[2] for row in ADVICE])
def test_advice_says_what_to_change(busy: Busy, setting: Setting, advice: str) -> None:
    stats = made(busy=busy, setting=setting)
    assert advice in stats.advice
    assert str(stats).endswith(stats.advice)


def made(**values: Any) -> Stats:
    usual: dict[str, Any] = {"delivered": 100, "elapsed": 10.0, "wait": 9.0}
    times = {"task_p50": 0.02, "task_p90": 0.02, "task_p99": 0.02}
    return Stats(**{**usual, **times, **values})


def test_tasks_that_hold_up_others_are_named() -> None:
    held_up = made(busy=Busy(0.3, 0.1), task_p99=0.5, setting=Setting(num_prefetch=4))
    assert held_up.bottleneck == "workers"
    assert "ordered=False" in held_up.advice
    as_they_come = made(
        busy=Busy(0.3, 0.1), task_p99=0.5, setting=Setting(num_prefetch=4, ordered=False)
    )
    assert as_they_come.bottleneck == "transport"


def test_tasks_that_are_too_small_are_named() -> None:
    tiny = {"task_p50": 2e-5, "task_p90": 2e-5, "task_p99": 3e-5}
    assert "batch_size" in made(busy=Busy(1.0, 0.2), setting=Setting(num_prefetch=4), **tiny).advice


def test_the_text_is_for_people() -> None:
    stats = made(busy=Busy(1.0, 0.2, 0.0, 0.01), bytes=3_500_000, setting=Setting(num_prefetch=4))
    assert str(stats) == TEXT


TEXT = """\
delivered   100 in 10 s (10/s)
size        3.5 MB
window      0 in flight, 0 of them ready
waited      9 s, 90% of the time
tasks       p50 20 ms, p90 20 ms, p99 20 ms; queued 0 s
decoding    0 s
faults      0 restarts, 0 retries, 0 skipped
busy        workers 100%, consumer 20%, source 0%, transport 1%
bottleneck  workers
The consumer waits for the workers: raise num_proc if cores are free, or make the source, \
map_fn or collate_fn quicker."""


def test_units() -> None:
    assert [seconds(value) for value in (0, 2.5e-6, 0.0123, 1.0, 59.96, 86400)] == [
        "0 s", "2.5 µs", "12.3 ms", "1 s", "60 s", "86400 s"
    ]  # fmt: skip
    assert [size(value) for value in (0, 999, 1000, 2.5e9, 7e13)] == [
        "0 B", "999 B", "1 kB", "2.5 GB", "70 TB"
    ]  # fmt: skip


# Prometheus


async def test_prometheus_reads_when_it_is_asked() -> None:
    registry = CollectorRegistry()
    async with Prefetcher(Numbers(6), batch_size=2, num_proc=1) as p:
        sources: dict[str, Any] = {"train": p}
        registry.register(PrefetchCollector(sources))
        assert 'aioprefetch_delivered_total{name="train"} 0.0' in scrape(registry)
        await collect(p)
        told = scrape(registry)
        sources["other"] = Prefetcher(Numbers(1))
    assert 'aioprefetch_delivered_total{name="train"} 3.0' in told
    assert 'aioprefetch_in_flight{name="train"} 0.0' in told
    assert any(
        line.startswith('aioprefetch_busy_ratio{name="train",part="workers"}') for line in told
    )
    quantiles = [line for line in told if line.startswith("aioprefetch_task_seconds{")]
    assert [line.split('quantile="')[1].split('"')[0] for line in quantiles] == [
        "0.5",
        "0.9",
        "0.99",
    ]
    assert 'aioprefetch_delivered_total{name="other"} 0.0' in scrape(registry)


def scrape(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


# Beside progress bars


async def test_tqdm_counts_what_is_delivered(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm.asyncio import tqdm

    p = Prefetcher(Numbers(6), batch_size=2, num_proc=0)
    bar = tqdm(p, total=len(p))
    assert [batch.tolist() async for batch in bar] == [[0, 1], [2, 3], [4, 5]]
    assert (bar.n, bar.total) == (3, 3)
    assert "3/3" in capsys.readouterr().err


async def test_rich_shows_what_is_waited_for() -> None:
    from io import StringIO

    from rich.console import Console
    from rich.progress import Progress

    screen = StringIO()
    p = Prefetcher(Numbers(6), batch_size=2, num_proc=0)
    with Progress(*Progress.get_default_columns(), console=Console(file=screen)) as progress:
        task = progress.add_task("train", total=len(p))
        async for _ in p:
            progress.update(task, advance=1, description=f"waited {p.stats().wait_share:.0%}")
        assert progress.tasks[0].completed == len(p)
    assert "waited" in screen.getvalue()
    assert "100%" in screen.getvalue()
