"""One host of several: prints which samples it got, and its state."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aioprefetch import Prefetcher

SIZE = 1437


class Images:
    """An index, and an image that goes with it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        return index, np.full((8, 8), index)


async def main(states: list[Any], world_size: int, rank: int, batches: int) -> None:
    p = Prefetcher(
        Images(), shuffle=True, batch_size=16, num_proc=rank, rank=rank, world_size=world_size
    )
    if states:
        p.load_state_dict(states)
    indices: list[int] = []
    async with p, aiter(p) as iterator:
        async for batch, images in iterator:
            assert (images[:, 0, 0] == batch).all()
            indices += batch.tolist()
            if p.delivered == batches:
                break
    print(json.dumps({"indices": indices, "state": p.state_dict()}))  # noqa: T201


if __name__ == "__main__":
    path = Path(sys.argv[1])
    states = json.loads(path.read_text()) if path.exists() else []
    asyncio.run(main(states, *map(int, sys.argv[2:])))
