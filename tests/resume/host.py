"""One host of several: reads digits, and prints which, and its state."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from aioprefetch import Prefetcher

SIZE = 1437


class Digits:
    """An index, and the digit that goes with it."""

    def __init__(self) -> None:
        self.images = load_digits().images[:SIZE]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        return index, self.images[index]


async def main(states: list[Any], world_size: int, rank: int, batches: int) -> None:
    p = Prefetcher(
        Digits(), shuffle=True, batch_size=16, num_proc=rank, rank=rank, world_size=world_size
    )
    if states:
        p.load_state_dict(states)
    indices: list[int] = []
    async with p, aiter(p) as iterator:
        async for batch, _ in iterator:
            indices += batch.tolist()
            if p.delivered == batches:
                break
    print(json.dumps({"indices": indices, "state": p.state_dict()}))  # noqa: T201


if __name__ == "__main__":
    path = Path(sys.argv[1])
    states = json.loads(path.read_text()) if path.exists() else []
    asyncio.run(main(states, *map(int, sys.argv[2:])))
