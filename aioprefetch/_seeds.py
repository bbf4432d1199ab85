"""Randomness that depends on the place in the plan alone, never on who does the work.

Every item and every batch has a key, a hash of (seed, domain, place). From it come the
generator that `rng` gives and, in worker processes, the seeds of the global generators.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import struct
import sys
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.random  # numpy loads it when it is first used, which would be the first item

Domain = Literal[
    "item", "group", "batch", "stream", "replica", "reading", "shuffle", "worker", "sampler"
]

SEED_BITS = 64


def draw_seed() -> int:
    """A seed for a run that was given none."""
    return secrets.randbits(SEED_BITS)


def key_of(seed: int, domain: Domain, *place: int) -> int:
    """128 bits of hash of a place in the plan."""
    state = _hash(seed, domain, place[:-1]).copy()
    state.update(place[-1].to_bytes(8, "little"))
    return int.from_bytes(state.digest(), "little")


@lru_cache(maxsize=64)
def _hash(seed: int, domain: Domain, place: tuple[int, ...]) -> hashlib.blake2b:
    # What neighbours have in common, which is all but the last number.
    text = domain.encode() + struct.pack(f"<{len(place)}Q", *place)
    return hashlib.blake2b(text, digest_size=16, key=seed.to_bytes(8, "little"))


def seed_globals(key: int) -> None:
    """Seed the process's own generators; for worker processes alone."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.manual_seed(key >> 65)
