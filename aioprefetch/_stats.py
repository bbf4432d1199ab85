"""What happened, who waited for whom, and what to change: values and pure functions.

A pass is a chain of four parts: the source read in this process, the workers, the transport of
batches, the consumer. Each could have been at work for the whole time. The one that nearly was
is the bottleneck; the others waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Part = Literal["workers", "consumer", "source", "transport"]
Bottleneck = Literal["workers", "consumer", "source", "transport", "balanced"]

_CLOSE = 0.2  # two parts that differ by less are in balance
_BUSY = 0.5  # of the time that a bottleneck is at work at least
_SKEWED = 4.0  # times as long as most: a task that holds up those behind it
_FELT = 1e-3  # seconds that others wait for it, if it matters
_TINY = 100e-6  # seconds of a task whose message costs about as much


class Busy(NamedTuple):
    """The share of the time that each part was at work, 0 to 1."""

    workers: float
    consumer: float
    source: float = 0.0
    transport: float = 0.0


def bottleneck(busy: Busy, *, held_up: bool = False) -> Bottleneck:
    """Which part the others waited for.

    Parameters
    ----------
    held_up
        Whether workers are waited for although they are not always at work for this consumer.
    """
    shares: dict[Part, float] = dict(zip(_PARTS, busy, strict=True))
    second, first = sorted(shares, key=shares.__getitem__)[-2:]
    together = busy.consumer + busy.transport  # on one thread, most often
    if max(shares[first], together) < _BUSY:  # nobody's work explains the time
        return "workers" if held_up else "transport"
    if shares[second] > (1 - _CLOSE) * shares[first]:
        return "balanced"
    return first


_NOT_BUSY = Busy(0.0, 0.0)
_PARTS: tuple[Part, ...] = ("workers", "consumer", "source", "transport")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the numbers depend on and a user can change."""

    num_proc: int = 1
    num_prefetch: int = 0  # 0 when there is no window
    ordered: bool = True
    is_async: bool = False
    transfers: bool = False
    shared: bool = False  # the workers are a pool's, which others use too


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a Prefetcher has done since it was made, over all its passes.

    Times are seconds. `str` of it is a summary for people.

    Attributes
    ----------
    delivered
        Batches handed over; items where they are not batched.
    in_flight
        Batches requested and not delivered, now.
    ready
        Of these, made and waiting for the consumer, now.
    bytes
        Of the batches that came.
    elapsed
        Time during which it was iterated; starting workers and the time between passes apart.
    wait
        Time of it that the consumer waited for a batch.
    task_p50, task_p90, task_p99
        What a task took a worker, within 5 %; where several quick ones are reported together,
        their mean.
    queue_wait
        Mean time from the request of a batch to its coming that no worker worked on it.
    decode
        Time that batches took to be rebuilt in this process, and transferred.
    restarts
        Workers that took a dead one's place.
    retries
        Tasks that ran again after a death.
    skipped
        Items left out by ``on_error``.
    busy
        The share of the time that each part was at work.
    bottleneck
        The part that the others waited for: "workers", "consumer", "source", "transport", or
        "balanced".
    advice
        What to change, in a sentence.
    """

    delivered: int = 0
    in_flight: int = 0
    ready: int = 0
    bytes: int = 0
    elapsed: float = 0.0
    wait: float = 0.0
    task_p50: float = 0.0
    task_p90: float = 0.0
    task_p99: float = 0.0
    queue_wait: float = 0.0
    decode: float = 0.0
    restarts: int = 0
    retries: int = 0
    skipped: int = 0
    busy: Busy = _NOT_BUSY
    setting: Setting = Setting()

    @property
    def wait_share(self) -> float:
        """Of the time that it was iterated, 0 to 1."""
        return min(1.0, self.wait / self.elapsed) if self.elapsed else 0.0

    @property
    def bottleneck(self) -> Bottleneck:
        return bottleneck(self.busy, held_up=self._held_up)

    @property
    def _held_up(self) -> bool:
        """Whether workers are waited for while they do what others wait for."""
        return self.wait_share > _BUSY and (self._crowded or self._skewed)

    @property
    def _crowded(self) -> bool:
        """By others on the pool."""
        return self.setting.shared and self.task_p50 >= _TINY

    @property
    def _skewed(self) -> bool:
        """By tasks that take much longer than those behind them."""
        long = max(_SKEWED * self.task_p50, _FELT)
        return self.setting.ordered and self.task_p99 > long

    @property
    def advice(self) -> str:
        if not self.delivered:
            return "Nothing has been delivered yet."
        return _ADVISE[self.bottleneck](self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _for_workers(stats: Stats) -> str:
    setting = stats.setting
    if setting.num_prefetch and setting.num_prefetch < setting.num_proc:
        return (
            f"The window lets {setting.num_prefetch} of {setting.num_proc} workers work: raise "
            f"num_prefetch to {4 * setting.num_proc}, or leave it out."
        )
    if stats.busy.workers < _BUSY and stats._crowded:
        return (
            "The pool's workers are at work for others too: give the pool a larger num_proc, or "
            "this Prefetcher workers of its own."
        )
    if stats.busy.workers < _BUSY:
        return (
            f"Some batches take much longer than most (p50 {seconds(stats.task_p50)}, p99 "
            f"{seconds(stats.task_p99)}), and those behind them wait for their turn: raise "
            "num_prefetch, or take them as they come with ordered=False."
        )
    if stats.task_p50 < _TINY:
        return (
            f"A task takes {seconds(stats.task_p50)}, hardly more than its message: give each "
            "more to do with a batch_size, or a larger one."
        )
    if setting.num_proc == 0:
        return "The consumer waits for the background thread: set num_proc to 1 or more."
    more = "num_proc or concurrency" if setting.is_async else "num_proc"
    return (
        f"The consumer waits for the workers: raise {more} if cores are free, or make the "
        "source, map_fn or collate_fn quicker."
    )


def _for_consumer(stats: Stats) -> str:
    return (
        "The workers wait for the consumer, and batches are there before they are asked for: "
        "nothing is to be gained here; num_proc could be lower."
    )


def _for_source(stats: Stats) -> str:
    return (
        "The source or sampler that is read in this process is too slow: have the workers read it "
        "(split='shard', 'worker' or 'replicate', or a map-style source), or move work from it "
        "into map_fn."
    )


def _for_transport(stats: Stats) -> str:
    if stats.busy.transport < _BUSY:
        return (
            f"Nobody is busy: handing over costs more than the work (a task takes "
            f"{seconds(stats.task_p50)}). Give each task more to do with a batch_size, or a "
            "larger one; if batches are large already, look for what else keeps the event loop."
        )
    if stats.setting.transfers:
        return (
            "The transfer function takes longer than the consumer: make it quicker, or give it "
            "less to move (a smaller dtype, converted on the device)."
        )
    return (
        "Rebuilding batches in this process takes the time: deliver arrays, which are not copied, "
        "in place of many Python objects; collate_fn is where to make them."
    )


def _for_balance(stats: Stats) -> str:
    first, second = sorted(zip(stats.busy, _PARTS, strict=True), reverse=True)[:2]
    return (
        f"{first[1].capitalize()} and {second[1]} are both at work nearly all the time: only "
        "speeding up both helps."
    )


_ADVISE = {
    "workers": _for_workers,
    "consumer": _for_consumer,
    "source": _for_source,
    "transport": _for_transport,
    "balanced": _for_balance,
}


# For people


def _lines(stats: Stats) -> list[str]:
    rate = stats.delivered / stats.elapsed if stats.elapsed else 0.0
    p50, p90, p99 = map(seconds, (stats.task_p50, stats.task_p90, stats.task_p99))
    busy = ", ".join(f"{part} {share:.0%}" for part, share in zip(_PARTS, stats.busy, strict=True))
    rows = [
        ("delivered", f"{stats.delivered:,} in {seconds(stats.elapsed)} ({rate:,.4g}/s)"),
        ("size", size(stats.bytes)),
        ("window", f"{stats.in_flight} in flight, {stats.ready} of them ready"),
        ("waited", f"{seconds(stats.wait)}, {stats.wait_share:.0%} of the time"),
        (
            "tasks",
            f"p50 {p50}, p90 {p90}, p99 {p99}; queued {seconds(stats.queue_wait)}",
        ),
        ("decoding", seconds(stats.decode)),
        ("faults", f"{stats.restarts} restarts, {stats.retries} retries, {stats.skipped} skipped"),
        ("busy", busy),
        ("bottleneck", stats.bottleneck if stats.delivered else "none yet"),
    ]
    return [f"{name:<11} {text}" for name, text in rows] + [stats.advice]


def seconds(value: float) -> str:
    """A time, with its unit."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 1000 else f"{value:.0f} s"
    return f"{value / 1e-6:.3g} µs" if value else "0 s"


def size(value: float) -> str:
    """Bytes, with their unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
