"""Workers up for one Prefetcher, from start to close.

With `_iteration` the core of the public handles: the loop, the futures and the workers know
it, and it never knows the handles, so that dropping a handle ends what it stood for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from ._config import Config, keys_length
from ._cursor import Cursor
from ._engine import Pool
from ._errors import WorkerStartError, describe_error
from ._feed import Feed
from ._inline import InlinePool
from ._iteration import Iteration, Reason
from ._meter import Ledger, Meter
from ._plan import IndexPlan, Pass, Plan, StreamPlan, num_batches
from ._pool import Crew, Supervisor
from ._processes import Processes
from ._record import Record
from ._source import Facts, Split, describe, is_async_function, log, reset, was_cancelled
from ._state import Layout
from ._trace import Trace
from ._transfer import Transfer
from ._window import Sizes, Window


class _Thread(Protocol):
    def where(self) -> str:
        """The line of code that it is at."""


class Session:
    """Workers up for one configuration, and what was learnt of the source."""

    def __init__(self, config: Config, cursor: Cursor, ledger: Ledger) -> None:
        self.loop = asyncio.get_running_loop()
        self.cursor = cursor
        self.meter = Meter()
        self._ledger = ledger
        ledger.add(self.meter)
        if config.trace is not None:
            self.meter.draw(Trace(config.trace))
        self.started = False
        self._config = config
        self._pid = os.getpid()
        self._seed = self._run_seed()
        self._source = config.source
        self._facts = config.facts_now()
        self._split: Split | None = None
        self._num_streams = 0  # of all hosts
        self._transfer = None if config.transfer is None else Transfer(config.transfer, self.meter)
        self._carried: tuple[int, StreamPlan, Window] | None = None  # replicas between passes
        self._sizes = Sizes(sys.maxsize)
        self._chores: dict[asyncio.Future[Any], tuple[str, _Thread]] = {}
        self._feeds: list[Feed] = []
        self._live: Iteration | None = None
        self._live_window: Window | None = None
        self._pool = self._make_pool()
        self._runs = itertools.count(self._pool.first_run)
        self._starting = self.loop.create_task(self._start())
        self._starting.add_done_callback(_retrieve)
        self._closing: asyncio.Task[None] | None = None

    def _run_seed(self) -> int:
        seed = self._config.seed
        return self.cursor.draw_seed() if seed is None else seed

    # Starting

    def _make_pool(self) -> Pool:
        config = self._config
        if self._facts.kind == "iterable":
            self._split = config.split_of(self._facts)
        elif self._facts.kind == "factory":
            self._split = config.split
        program = config.program(self._split)
        terms = config.terms(self._split, self._seed, self.cursor.origin)
        if config.pool is not None:
            guest: Pool = config.pool._admit(
                program, terms, config.rules, config.shutdown_timeout, self.meter
            )
            return guest
        if config.num_proc == 0:
            return InlinePool(program, terms, config.shutdown_timeout, self.meter)
        crew = Crew(
            Processes(config.staff.context(), self.loop),
            config.num_proc,
            config.worker_threads,
            config.shutdown_timeout,
            config.rules,
        )
        return Supervisor(program, terms, crew, self.meter)

    async def start(self) -> None:
        """Wait for the workers; the start itself goes on when this is cancelled."""
        if not self._starting.done():
            await asyncio.wait([self._starting])
        if self._starting.cancelled():
            raise RuntimeError("the Prefetcher was closed while its workers were starting")
        self._starting.result()

    async def _start(self) -> None:
        began = self.loop.time()
        try:
            facts = await self._pool.start()
            self._sizes = Sizes(self._config.window_bytes(self._pool.memory))
            if self._facts.kind == "factory":
                await self._learn(facts)
            if self._split == "parent" and not self.cursor.reset:
                self.cursor.reset = True
                await self._here("the source's reset_state()", reset, self._source)
            self._settle()
        except BaseException:
            self._pool.kill()
            await self._pool.close()
            raise
        self.started = True
        log.info("ready to read %s after %.2f s", self._facts.name, self.loop.time() - began)

    def _settle(self) -> None:
        """Tell the workers how the source is read."""
        config, split = self._config, self._split
        if split is not None:
            self._num_streams = self.cursor.num_streams or config.num_streams(self._facts, split)
        hold = config.hold(is_async=self._is_async)
        window = config.window(split, is_async=self._is_async)
        self._pool.settle(split, self._num_streams, hold, window, is_async=self._is_async)
        self.meter.learn(config.setting(window, is_async=self._is_async), hold)
        if self.meter.trace is not None:
            self.meter.trace.overlap = self._is_async

    async def _learn(self, facts: Facts | None) -> None:
        """What the source is that a function made, here or in the workers."""
        if facts is not None:
            self._facts = facts
            self._config.check_facts(facts)
            self._split = None if facts.kind == "map" else self._config.split_of(facts)
        if self._split == "parent":
            self._source = await self._here("the function given as the source", self._source)
            self._facts = describe(self._source)
            self._config.check_facts(self._facts)
            self.cursor.spent = self.cursor.reset = False

    async def _here(self, what: str, function: Any, *args: Any) -> Any:
        """Call a function of the user's in this process."""
        try:
            if is_async_function(function):
                return await function(*args)
            return await self._pool.helper().call(function, *args)
        except BaseException as error:
            if was_cancelled(error):
                raise
            raise WorkerStartError(f"{what} failed: {describe_error(error)}") from error

    @property
    def _is_async(self) -> bool:
        terms = self._config.terms(self._split, self._seed)
        return terms.is_async or (self._split != "parent" and self._facts.is_async)

    # Passes

    def length(self) -> int | None:
        return self._facts.length

    @property
    def facts(self) -> Facts:
        return self._facts

    def layout(self) -> Layout:
        """What positions of the plan mean."""
        return self._config.layout(self._facts, self._split, self._num_streams or None)

    def begin(self, iteration: Iteration, record: Record) -> Window:
        """The window of an iteration that begins now.

        Raises
        ------
        ValueError
            A state was loaded that does not fit.
        """
        self._check_loaded()
        self._live = iteration
        if self._split == "replicate":
            window = self._begin_replicas(iteration, record)
        else:
            window = self._window(self._plan(record), partial(self._following, iteration))
        self._live_window = window
        self.meter.begin(window)
        window.refill()
        return window

    def _check_loaded(self) -> None:
        cursor = self.cursor
        if self._split in ("shard", "worker") and cursor.num_streams not in (
            None,
            self._num_streams,
        ):
            self._settle()
        cursor.layout.check(self.layout())
        if cursor.seed is not None and cursor.seed != self._seed:
            raise ValueError(
                f"the state has seed {cursor.seed}, and the workers were started with "
                f"{self._seed}: load it before they are, or give seed={cursor.seed}"
            )

    def _window(self, plan: Plan, following: Callable[[], Plan | None]) -> Window:
        config = self._config
        limit = config.window(self._split, is_async=self._is_async)
        return Window(
            plan,
            following,
            self._pool,
            limit,
            sizes=self._sizes,
            probe=2 * config.num_proc,
            ordered=config.ordered,
            prepare=None if self._transfer is None else self._transfer.begin,
            meter=self.meter,
        )

    def _following(self, iteration: Iteration) -> Plan | None:
        record = iteration.next_record()
        return None if record is None else self._plan(record)

    def _plan(self, record: Record) -> Plan:
        config = self._config
        pass_ = Pass(next(self._runs), record.epoch, self._seed)
        keys = config.batch_sampler if config.batch_sampler is not None else config.sampler
        if self._split == "parent" or keys is not None:
            return self._read_here(pass_, record, self._source if keys is None else keys)
        if self._split is None:
            assert self._facts.length is not None
            return IndexPlan(
                pass_,
                record,
                self._facts.length,
                config.batch_size,
                drop_last=config.drop_last,
                shuffle=config.shuffle,
            )
        return StreamPlan(
            pass_, record, self._own_streams(), config.batch_size, ordered=config.ordered
        )

    def _own_streams(self) -> int:
        """How many streams this host has."""
        share, streams = self._config.share, self._num_streams
        own = len(range(share.rank, streams, share.world_size))
        if own == 0:
            raise ValueError(
                f"{self._facts.name} is read as {streams} streams, too few for "
                f"world_size={share.world_size}: rank {share.rank} has none. Give num_shards"
            )
        return own

    def _read_here(self, pass_: Pass, record: Record, iterable: Any) -> Feed:
        config = self._config
        feed = Feed(
            pass_,
            record,
            iterable,
            batch_size=config.batch_size,
            drop_last=config.drop_last,
            grouped=config.batch_sampler is not None,
            fetches=self._split != "parent",
            pack=self._pool.pack,
            store=self._pool.store,
            helper=self._pool.helper(),
            meter=self.meter,
        )
        feed.notify = self._hear
        self._feeds.append(feed)
        return feed

    def _hear(self) -> None:
        """What is read in this process has come."""
        if self._live_window is not None:
            self._live_window.plan_has_more()

    def _begin_replicas(self, iteration: Iteration, record: Record) -> Window:
        """Replicas run on: what they made and was not delivered is there for the next pass."""
        config = self._config
        record.exact = False
        limit = None
        if self._facts.length is not None:
            own = config.share.count(self._facts.length)
            iteration.quota = num_batches(own, config.batch_size, config.drop_last)
            limit = iteration.quota_left(record)
        if self._carried is None:
            pass_ = Pass(next(self._runs), record.epoch, self._seed)
            plan = StreamPlan(pass_, record, self._own_streams(), config.batch_size, ordered=False)
            self._carried = pass_.run, plan, self._window(plan, lambda: None)
        run, plan, window = self._carried
        rest = None if limit is None else max(0, limit - window.in_flight)
        plan.begin(Pass(run, record.epoch, self._seed), record, rest)
        window.reopen()
        return window

    def turned(self, run: int) -> None:
        """A pass has been delivered whole, and the iteration goes on to the next."""
        for feed in [feed for feed in self._feeds if feed.run == run]:
            self._feeds.remove(feed)
            self._do(feed.close(), f"a read of {self._facts.name}", self._pool.helper())
        self._pool.forget(run)

    def end_pass(self, iteration: Iteration, window: Window) -> None:
        """An iteration is over, read to its end or left."""
        if self._live is iteration:
            self._live = self._live_window = None
            self.meter.end()
        window.close()
        if self._split == "replicate":
            return
        window.drop()
        for run in window.runs:
            self.turned(run)

    def _do(self, work: Any, what: str, thread: _Thread) -> None:
        chore = self.loop.create_task(work)
        self._chores[chore] = what, thread
        chore.add_done_callback(self._chores.pop)

    # Closing

    def close(self) -> asyncio.Future[None]:
        """Begin to close; the future is done within the shutdown time-out."""
        if self._closing is None:
            self._leave_pass("closed")
            self._closing = self.loop.create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        try:
            await self._end()
        except asyncio.CancelledError:  # the loop is being torn down
            self._pool.kill()
            raise

    async def _end(self) -> None:
        if not self._starting.done():
            self._pool.kill()
            self._starting.cancel()
        if self._transfer is not None:
            self._transfer.stop()
            self._do(self._transfer.finish(), "a transfer", self._transfer)
        waits = {*self._chores, self._pool.close(), self._starting}
        _, late = await asyncio.wait(waits, timeout=self._config.shutdown_timeout)
        for chore, (what, thread) in list(self._chores.items()):
            if chore not in late:
                continue
            chore.cancel()
            warnings.warn(
                f"closing left {what} behind, in {thread.where()}, after "
                f"{self._config.shutdown_timeout} s",
                ResourceWarning,
                stacklevel=2,
            )
        await asyncio.wait([self._pool.close(), self._starting])
        self._pool.release()
        if self.meter.trace is not None:
            await self.meter.trace.finished(self._config.shutdown_timeout)
        log.info("closed the workers that read %s", self._facts.name)

    def _leave_pass(self, reason: Reason) -> None:
        if self._live is not None:
            self._live.stop(reason)
        self._ledger.close(self.meter)

    def kill(self) -> None:
        """End the workers now; any thread."""
        self._pool.kill()
        self._stop_helpers()
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._leave_pass, "killed")

    def _stop_helpers(self) -> None:
        if self._transfer is not None:
            self._transfer.stop()
        if self.meter.trace is not None:
            self.meter.trace.finish()

    def abandon(self) -> None:
        """As a finalizer may, in any thread and inside any lock: nobody will close this."""
        if os.getpid() != self._pid or self._closing is not None:
            return
        busy = self._pool.busy
        self._pool.abandon()
        self._stop_helpers()
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._leave_pass, "abandoned")
        if busy:
            warnings.warn(
                f"a Prefetcher of {self._facts.name} was dropped with work in flight; its workers "
                "are ended. Use `async with`, or await its aclose()",
                ResourceWarning,
                stacklevel=2,
            )


def _retrieve(task: asyncio.Task[None]) -> None:
    # Whoever asked for the start may have gone; its error is then nobody's.
    if not task.cancelled():
        task.exception()


def length_of_epoch(config: Config, facts: Facts) -> int | None:
    """Batches in an epoch, or None when it cannot be known."""
    if facts.kind == "map":
        keys = keys_length(config, facts.length)
        if keys is None:
            return None
        own = config.share.count(keys)
        if config.batch_sampler is not None:
            return own
        return num_batches(own, config.batch_size, config.drop_last)
    split = config.split_of(facts)
    if facts.length is None or (split != "replicate" and config.num_streams(facts, split) != 1):
        return None
    own = config.share.count(facts.length)
    return num_batches(own, config.batch_size, config.drop_last)
