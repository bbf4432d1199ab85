"""The public handle: a Prefetcher, its configuration and its place."""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Generic, Literal

from ._config import Config
from ._cursor import Cursor
from ._delivered import Tail
from ._iteration import Iteration, outlast
from ._iterators import Batch, NumberedIterator, PrefetchIterator
from ._meter import Ledger
from ._session import Session, length_of_epoch
from ._shared_pool import SharedPool
from ._source import Facts, Split
from ._state import Layout
from ._stats import Stats


class Prefetcher(Generic[Batch]):
    """Read, transform and batch a dataset in worker processes, and iterate it with ``async for``.

    One ``async for`` is one epoch. Opened with ``async with``, its workers live until the
    block ends; not opened, they belong to the iteration and end with it.

    Parameters
    ----------
    source
        A map-style dataset, an iterable or async iterable, a generator function, or a
        function without arguments that returns one of these.
    map_fn
        Called with each item after it is fetched; may be ``async def``.
    batch_size
        Items a batch; None delivers each item as it is.
    drop_last
        Leave out a last batch that is short; of iterable sources, each stream's.
    collate_fn
        Makes a batch of a list of items, in the worker; by default arrays are stacked. With
        ``batch_size=None`` it is called on each item.
    shuffle
        Deliver the indices of a map-style source in an order drawn from seed and epoch.
    sampler
        Iterable or async iterable of keys, read in this process off the event loop.
    batch_sampler
        The same of lists of keys, one list a batch.
    seed
        Of all that is random, 0 to 2**64 - 1; None draws one, or takes that of a state.
    epochs
        Epochs that one iteration runs over, the next being prefetched while the last batches
        of one are consumed; None for ever.
    split
        Who iterates an iterable source: "parent", "shard", "worker" or "replicate"; None
        chooses by the source.
    num_shards
        Streams that a source with ``shard`` is read as by all hosts together; by default as
        many as workers.
    rank
        Which of the hosts that share one plan this is, from 0.
    world_size
        How many there are. Each takes every ``world_size``-th position or stream, so that the
        order of all depends neither on it nor on ``num_proc``.
    tail
        What hosts do where the items do not divide evenly: "exact" leaves some one item more,
        "pad" repeats the first items until all have as many, "drop" leaves the last ones out.
    num_proc
        Worker processes; 0 works on one background thread of this process.
    mp_context
        Start method or multiprocessing context; by default "forkserver", else "spawn".
    worker_init_fn
        Called once in each worker with its id before its first task; may be async, or a
        generator whose second half runs at the end. Its value is ``worker_info().state``.
    worker_threads
        Threads of BLAS and OpenMP libraries in each worker; None leaves them alone.
    concurrency
        Items that a worker has in flight at once where functions are async.
    pool
        An open pool to work on, a `ProcessPool` say; then ``num_proc``, ``mp_context``,
        ``worker_init_fn`` and ``worker_threads`` are its own.
    num_prefetch
        Batches requested and not yet delivered, at most; by default four a worker, and more
        where items are delivered alone or awaited.
    max_bytes
        Bytes requested and not yet delivered, at most, each batch taken for as large as the
        largest seen; one batch is always let in. By default a quarter of the memory of the
        machine, or of the control group that this process is in. What you hold is yours and
        does not count.
    ordered
        Deliver in the order of the plan; False delivers as completed.
    transfer
        Called with each batch in this process, on a thread of its own and one batch ahead of
        the consumer, who gets what it returns: `jax.device_put`, or a copy to a GPU.
    trace
        File for a timeline of the run, which ui.perfetto.dev opens; complete once this is closed,
        and written anew by each start. docs/seeing.md says what it shows.
    on_error
        "raise", "skip", or a function that is given the TaskError in the worker and returns
        what takes the item's place.
    retries
        Times that an item is tried again after the worker that had it in hand has died, or
        was killed for want of an answer; everything else that it held is done by its
        successor in any case. So functions must bear being run again.
    task_timeout
        Seconds that the fetch and map of one item, or the collate of one batch, may take
        before its worker is killed and replaced.
    shutdown_timeout
        Seconds that closing waits for what is in hand before workers are killed.

    Raises
    ------
    TypeError, ValueError
        An argument, or a combination, that cannot be meant.
    """

    def __init__(
        self,
        source: Any,
        *,
        map_fn: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        shuffle: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        seed: int | None = 0,
        epochs: int | None = 1,
        split: Split | None = None,
        num_shards: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        tail: Tail = "exact",
        num_proc: int = 1,
        mp_context: str | BaseContext | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        worker_threads: int | None = 1,
        concurrency: int = 16,
        pool: SharedPool | None = None,
        num_prefetch: int | None = None,
        max_bytes: int | None = None,
        ordered: bool = True,
        transfer: Callable[[Any], Any] | None = None,
        trace: str | os.PathLike[str] | None = None,
        on_error: Literal["raise", "skip"] | Callable[..., Any] = "raise",
        retries: int = 2,
        task_timeout: float | None = None,
        shutdown_timeout: float = 5.0,
    ) -> None:
        self._config = Config(
            source=source,
            map_fn=map_fn,
            batch_size=batch_size,
            drop_last=drop_last,
            collate_fn=collate_fn,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            seed=seed,
            epochs=epochs,
            split=split,
            num_shards=num_shards,
            rank=rank,
            world_size=world_size,
            tail=tail,
            num_proc=num_proc,
            mp_context=mp_context,
            worker_init_fn=worker_init_fn,
            worker_threads=worker_threads,
            concurrency=concurrency,
            pool=pool,
            num_prefetch=num_prefetch,
            max_bytes=max_bytes,
            ordered=ordered,
            transfer=transfer,
            trace=trace,
            on_error=on_error,
            retries=retries,
            task_timeout=task_timeout,
            shutdown_timeout=shutdown_timeout,
        )
        self._cursor = Cursor(self._config.share)
        self._ledger = Ledger()
        self._session: Session | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._live: Iteration | None = None

    # Iterating

    def __aiter__(self) -> PrefetchIterator[Batch]:
        """Begin the next epoch; an iteration that is still open is superseded by it.

        Raises
        ------
        RuntimeError
            The source is an iterator and has been read.
        ValueError
            A state was loaded that does not fit.
        """
        return PrefetchIterator(self, self._begin())

    def numbered(self) -> NumberedIterator[Batch]:
        """The same, each batch with its number: for consumers that keep batches for a while.

        Numbers go up by one a batch, failed and empty ones included, over the epochs of one
        iteration. `state_dict` is told those of batches that are not used yet.

        Raises
        ------
        RuntimeError, ValueError
            As `__aiter__` does.
        """
        return NumberedIterator(self, self._begin())

    def _begin(self) -> Iteration:
        facts = self._facts()
        if facts.one_shot:
            if self._cursor.spent:
                raise RuntimeError(
                    f"{facts.name} is an iterator and has been read: give an iterable "
                    "that can be read again, or the function that makes it"
                )
            self._cursor.spent = True
        if self._live is not None:
            self._live.supersede()
        session = self._session if self._session is not None and self._session.started else None
        make_session = None if session is not None else self._make_session
        self._live = Iteration(self._cursor, self._config.epochs, session, make_session)
        return self._live

    def _facts(self) -> Facts:
        """What is known of the source."""
        session = self._session
        if session is not None and session.started:
            return session.facts
        return self._config.facts_now()

    @property
    def _make_session(self) -> Callable[[], Session]:
        # Bound to the configuration, not to the handle: an iteration must not keep it alive.
        config, cursor, ledger = self._config, self._cursor, self._ledger
        return lambda: Session(config, cursor, ledger)

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises
        ------
        TypeError
            The length is not known: the source or sampler has none, a function makes the
            source, or it is read as several streams.
        """
        facts = self._facts()
        length = None if facts.kind == "factory" else length_of_epoch(self._config, facts)
        if length is None:
            raise TypeError(f"an epoch of {facts.name} has no known length")
        return length

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; an open iteration goes on as it is.

        Raises
        ------
        ValueError
            It is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, not {epoch}")
        self._cursor.choose(epoch)

    @property
    def epoch(self) -> int:
        """The epoch that is open or was left unfinished, else the next one."""
        return self._cursor.epoch

    @property
    def delivered(self) -> int:
        """Batches handed over in the open pass, or in the last one."""
        return self._cursor.record.batches

    @property
    def skipped(self) -> int:
        """Items that ``on_error`` left out in the open pass, or in the last one."""
        return self._cursor.record.skipped

    def stats(self) -> Stats:
        """What has happened since this Prefetcher was made, and what it waits for; any thread."""
        return self._ledger.stats()

    # State

    def state_dict(self, *, pending: Iterable[int] | None = None) -> dict[str, Any]:
        """Where this Prefetcher stands, as a dict that JSON keeps as it is.

        It counts what was delivered, never what was prefetched; batches that failed or were
        left out count as delivered. After the last batch it says that nothing of the epoch is
        left, and once the iteration has ended, that the next epoch is next. The workers need
        not be started. docs/guide.md has the layout.

        Parameters
        ----------
        pending
            Numbers of batches that `numbered` has handed over and that are not used yet: they
            are left out, and delivered again. Those not named are used for good.

        Raises
        ------
        ValueError
            A number that was not handed over, or was not pending the last time.
        """
        config, cursor = self._config, self._cursor
        seed = cursor.draw_seed() if config.seed is None else config.seed
        return cursor.state(seed, self._layout(), pending)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a state was taken; the next iteration begins there.

        It fits under any ``num_proc``, ``num_prefetch``, ``batch_size`` and ``ordered``.

        Parameters
        ----------
        state
            What `state_dict` gave, of the same rank of the same ``world_size``, or a list of
            what it gave on all ranks, in any order.

        Raises
        ------
        TypeError
            It is no state.
        ValueError
            It does not fit: the message says what differs.
        """
        config = self._config
        self._cursor.load(state, config.seed, self._layout(fixed=True))

    def _layout(self, *, fixed: bool = False) -> Layout:
        """What positions mean; ``fixed`` without what a state may change."""
        session, config = self._session, self._config
        if session is not None and session.started and not fixed:
            return session.layout()
        facts = self._facts()
        if facts.kind == "factory":
            return config.layout(facts, config.split, config.num_shards)
        split = None if facts.kind == "map" else config.split_of(facts)
        streams = config.num_shards
        if split is not None and not fixed:
            streams = self._cursor.num_streams or config.num_streams(facts, split)
        return config.layout(facts, split, streams)

    # Opening and closing

    async def start(self) -> None:
        """Start the workers, and keep them until `aclose`.

        Cancelled, it ends what it has started before it lets the cancellation through.

        Raises
        ------
        SerializationError
            The source or a function cannot be sent to a worker.
        WorkerStartError
            A worker did not come up.
        """
        if self._session is None:
            self._session = self._make_session()
            self._finalizer = weakref.finalize(self, self._session.abandon)
            self._finalizer.atexit = False
        session = self._session
        try:
            await session.start()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                session.kill()
            if self._session is session:
                self._forget_session()
            await outlast(session.close())
            raise

    async def aclose(self) -> None:
        """End the workers; done within ``shutdown_timeout``, cancelled or not.

        What is not started is dropped, an item in hand is finished. An open iteration gets a
        RuntimeError. May be called again, and the Prefetcher may be opened again.
        """
        session = self._forget_session()
        if session is not None:
            await outlast(session.close())
        elif self._live is not None:
            await self._live.close_from_outside()

    def kill(self) -> None:
        """End the workers at once, whatever they do. Needs no event loop; any thread."""
        session = self._forget_session()
        if session is not None:
            session.kill()
        elif self._live is not None:
            self._live.kill()

    def _forget_session(self) -> Session | None:
        session, self._session = self._session, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        return session

    async def __aenter__(self) -> Prefetcher[Batch]:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # As a source of another

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"{name} of a Prefetcher cannot be set: make another with other arguments"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "shard" and callable(getattr(self.__dict__["_config"].source, "shard", None)):
            return self._shard
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _shard(self, num_shards: int, index: int) -> Prefetcher[Batch]:
        arguments = self._copied()
        source = arguments.pop("source").shard(num_shards=num_shards, index=index)
        with _quiet():
            return Prefetcher(source, **arguments)

    def _become_replica(self, key: int) -> None:
        # Called in the worker that this copy lives in: its own random choices begin here.
        seed = None if self._config.seed is None else (self._config.seed + key) % 2**64
        with _quiet():
            self._config = replace(self._config, seed=seed)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._session is not None:
            raise TypeError("a Prefetcher that is open cannot be pickled: close it first")
        return _rebuild, (self._copied(),)

    def _copied(self) -> dict[str, Any]:
        # A copy lives in another process, most often, and the timeline's file is this one's.
        return {**self._config.arguments(), "trace": None}

    def __repr__(self) -> str:
        state = "open" if self._session is not None else "not open"
        return f"<Prefetcher of {self._config.facts.name}, {state}, epoch {self.epoch}>"


def _rebuild(arguments: dict[str, Any]) -> Prefetcher[Any]:
    with _quiet():
        return Prefetcher(arguments.pop("source"), **arguments)


@contextmanager
def _quiet() -> Iterator[None]:
    # Around what makes another of the same: its warnings were given with the original.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
