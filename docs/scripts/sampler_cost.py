"""What the samplers cost: memory, time to make, time a key, time to go to the middle."""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice

import numpy as np

from aioprefetch import RandomSampler, SubsetSampler, WeightedSampler

Sampler = RandomSampler | WeightedSampler | SubsetSampler
REPEATS = 5


def held(make: Callable[[], Sampler]) -> float:
    """Bytes that a sampler holds."""
    tracemalloc.start()
    sampler = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del sampler
    return size


def best(action: Callable[[], object]) -> float:
    """Seconds of the quickest of some repeats."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def go_to_the_middle(sampler: Sampler) -> int:
    keys = iter(sampler)
    keys.load_state_dict({"position": len(sampler) // 2})
    return next(keys)


def tell(name: str, make: Callable[[], Sampler], keys: int) -> None:
    sampler = make()
    size, to_make = held(make), best(make)
    a_key = best(lambda: sum(1 for _ in islice(sampler, keys))) / min(keys, len(sampler))
    middle = best(lambda: go_to_the_middle(sampler))
    print(
        f"{name:<39}{size / 1e6:7.1f} MB{to_make * 1e3:9.1f} ms"
        f"{a_key * 1e9:8.0f} ns{middle * 1e6:8.0f} µs"
    )


def main(args: argparse.Namespace) -> None:
    many, some = args.many, args.many // 100
    indices = np.arange(many)
    print(f"{'':<39}{'memory':>10}{'to make':>12}{'a key':>11}{'middle':>11}")
    tell(f"RandomSampler({10**12:,})", lambda: RandomSampler(10**12), args.keys)
    for size in (some, many):
        weights = np.random.default_rng(0).random(size)
        tell(
            f"WeightedSampler of {size:,} weights", lambda w=weights: WeightedSampler(w), args.keys
        )
    tell(f"SubsetSampler of {many:,} indices", lambda: SubsetSampler(indices), args.keys)
    tell(f"SubsetSampler(range({10**12:,}))", lambda: SubsetSampler(range(10**12)), args.keys)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--many", type=int, default=10_000_000, help="weights and indices")
    parser.add_argument("--keys", type=int, default=200_000, help="that are read")
    main(parser.parse_args())
