"""Runs that are interrupted, and go on under other terms: what they deliver in all.

A journey is one epoch in several legs. Each leg has other workers, delays, batches and hosts;
the states between them have been through JSON.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from aioprefetch import Prefetcher, worker_info

SHARDS = 5


class Indexed:
    """Items 0…, by index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Repeating(Indexed):
    """The same, one after another."""

    __getitem__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class AsyncRepeating(Indexed):
    __getitem__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for item in range(self.length):
            yield item


class Walker:
    """An iterator that says where it is."""

    def __init__(self, items: range | list[Any]) -> None:
        self._items = items
        self._at = 0

    def __iter__(self) -> Walker:
        return self

    def __next__(self) -> Any:
        if self._at >= len(self._items):
            raise StopIteration
        self._at += 1
        return self._items[self._at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class Stateful(Repeating):
    """Its iterators say where they are."""

    def __iter__(self) -> Walker:
        return Walker(range(self.length))


class Sharded:
    """Items 0… in shards of uneven length; read one after another without their states."""

    def __init__(self, items: list[int], *, stateful: bool) -> None:
        self.items = items
        self.stateful = stateful

    def shard(self, num_shards: int, index: int) -> Sharded:
        length = len(self.items)
        start = length * index**2 // num_shards**2
        stop = length * (index + 1) ** 2 // num_shards**2
        return Sharded(self.items[start:stop], stateful=self.stateful)

    def __iter__(self) -> Iterator[int]:
        return Walker(self.items) if self.stateful else iter(self.items)


class Dividing(Repeating):
    """Copies that divide the items among themselves."""

    def __iter__(self) -> Iterator[int]:
        info = worker_info()
        assert info is not None
        return iter(range(info.id, self.length, info.num_proc))


class Keys:
    """A sampler with a state."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Walker:
        return Walker(self.keys)


@dataclass(frozen=True)
class Dawdle:
    """Takes a while over each item, and another while under another salt."""

    salt: int

    def __call__(self, item: int) -> int:
        time.sleep(random.Random(item * 1000 + self.salt).choice((0, 0, 0, 0.0005, 0.002)))
        return item


def _mixed(length: int) -> list[int]:
    return random.Random(length).sample(range(length), length)


def _groups(length: int) -> list[list[int]]:
    keys, groups = _mixed(length), []
    while keys:
        size = 1 + len(keys) % 4
        groups.append(keys[:size])
        keys = keys[size:]
    return groups


# What a plan is made of: the arguments that say it.
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "in order": lambda n: {"source": Indexed(n)},
    "shuffled": lambda n: {"source": Indexed(n), "shuffle": True},
    "sampler": lambda n: {"source": Indexed(n), "sampler": _mixed(n)},
    "sampler with state": lambda n: {"source": Indexed(n), "sampler": Keys(_mixed(n))},
    "batch sampler": lambda n: {"source": Indexed(n), "batch_sampler": _groups(n)},
    "batch sampler with state": lambda n: {
        "source": Indexed(n),
        "batch_sampler": Keys(_groups(n)),
    },
    "read here": lambda n: {"source": Repeating(n), "split": "parent"},
    "read here with state": lambda n: {"source": Stateful(n), "split": "parent"},
    "read here, async": lambda n: {"source": AsyncRepeating(n), "split": "parent"},
    "shards": lambda n: {
        "source": Sharded(list(range(n)), stateful=False),
        "num_shards": SHARDS,
    },
    "shards with state": lambda n: {
        "source": Sharded(list(range(n)), stateful=True),
        "num_shards": SHARDS,
    },
    "divided": lambda n: {"source": Dividing(n), "split": "worker"},
}


@dataclass(frozen=True)
class Terms:
    """What may differ from one leg to the next."""

    num_proc: int = 1
    batch_size: int | None = 3
    ordered: bool = True
    num_prefetch: int | None = None
    world_size: int = 1
    salt: int = 0

    def prefetcher(self, kind: str, length: int, rank: int) -> Prefetcher:
        arguments = KINDS[kind](length)
        if "batch_sampler" not in arguments:
            arguments["batch_size"] = self.batch_size
        return Prefetcher(
            **arguments,
            collate_fn=list if "batch_sampler" in arguments or self.batch_size else None,
            map_fn=Dawdle(self.salt),
            ordered=self.ordered,
            num_proc=self.num_proc,
            num_prefetch=self.num_prefetch,
            rank=rank,
            world_size=self.world_size,
        )


def _items(batch: Any) -> list[int]:
    return batch if isinstance(batch, list) else [batch]


async def leg(
    p: Prefetcher, stop: int | None, unused: Callable[[list[int]], list[int]]
) -> tuple[list[list[int]], Any]:
    """Take so many batches, or all; gives those that were used, and the state then."""
    used: dict[int, list[int]] = {}
    ended = True
    async with p.numbered() as numbered:
        async for number, batch in numbered:
            used[number] = _items(batch)
            if len(used) == stop:
                ended = False
                break
    pending = [] if ended else unused(sorted(used))
    state = p.state_dict(pending=pending)
    return [items for number, items in used.items() if number not in pending], state


async def journey(
    kind: str, length: int, legs: list[Terms], dice: random.Random, *, keeps: bool = True
) -> list[int]:
    """One epoch in several legs, the last to the end; all that was delivered and used.

    ``keeps`` some of the last batches unused in each leg.
    """
    delivered: list[int] = []
    states: list[Any] = []
    for terms in legs:
        last = terms is legs[-1]
        after = []
        for rank in range(terms.world_size):
            p = terms.prefetcher(kind, length, rank)
            if states:
                p.load_state_dict(json.loads(json.dumps(states)))
                if p.epoch > 0:
                    return delivered
            stop = None if last else dice.randrange(1, 2 + length // (terms.batch_size or 1))

            def unused(numbers: list[int]) -> list[int]:
                return dice.sample(numbers[-6:], dice.choice((0, 0, min(3, len(numbers)))) * keeps)

            batches, state = await leg(p, stop, unused)
            delivered += [item for batch in batches for item in batch]
            after.append(state)
        states = after
    return delivered


def random_terms(dice: random.Random, *, most_procs: int) -> Terms:
    return Terms(
        num_proc=dice.randrange(most_procs + 1),
        batch_size=dice.choice((None, 1, 3, 4, 7)),
        ordered=dice.random() < 0.5,
        num_prefetch=dice.choice((None, 1, 2, 5)),
        salt=dice.randrange(1000),
    )


def random_journey(
    dice: random.Random, *, most_procs: int, most_hosts: int = 1
) -> tuple[str, int, list[Terms]]:
    kind = dice.choice(list(KINDS))
    length = dice.choice((0, 1, 2, 5, 17, 40))
    legs = [random_terms(dice, most_procs=most_procs) for _ in range(dice.choice((2, 2, 3)))]
    hosts = range(1, 2 if kind == "divided" else most_hosts + 1)
    return kind, length, [replace(leg, world_size=dice.choice(hosts)) for leg in legs]
