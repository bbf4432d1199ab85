"""Train on real digits, be killed, and go on to the very same weights.

After every few batches the weights and the place in the data are saved together. Started again,
with as many workers as you like, it goes on from there: end it with Ctrl-C or `kill -9` wherever
you want, the last line it prints will be that of a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from digits import Net, load
from threadpoolctl import threadpool_limits

from aioprefetch import Prefetcher


def save(path: Path, net: Net, state: dict[str, Any]) -> None:
    """All in one file, which is replaced in one step: there is never half of it."""
    values = net.weights + net.biases + net.speeds
    fresh = path.with_suffix(".new.npz")
    np.savez(fresh, *values, state=json.dumps(state))
    os.replace(fresh, path)


def restore(path: Path, net: Net, batches: Prefetcher) -> None:
    with np.load(path) as saved:
        values = net.weights + net.biases + net.speeds
        for number, value in enumerate(values):
            value[:] = saved[f"arr_{number}"]
        batches.load_state_dict(json.loads(str(saved["state"])))


def fingerprint(net: Net) -> str:
    return hashlib.sha256(b"".join(value.tobytes() for value in net.weights)).hexdigest()[:16]


async def main(args: argparse.Namespace) -> None:
    threadpool_limits(1)
    dataset, images, labels = load()
    net = Net()
    batches = Prefetcher(
        dataset, shuffle=True, batch_size=64, epochs=args.epochs, num_proc=args.num_proc
    )
    if args.checkpoint.exists():
        restore(args.checkpoint, net, batches)
        print(f"going on in epoch {batches.epoch}, after {batches.delivered} batches", flush=True)
    done = 0
    async for batch in batches:
        net.step(*batch, rate=0.1)
        done += 1
        if done % args.every == 0:
            save(args.checkpoint, net, batches.state_dict())
            print(f"epoch {batches.epoch}, batch {batches.delivered}", flush=True)
    print(f"test accuracy {(net.predict(images) == labels).mean():.1%}")
    print(f"weights {fingerprint(net)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/digits.npz"))
    parser.add_argument("--every", type=int, default=5, help="batches between two checkpoints")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    asyncio.run(main(parser.parse_args()))
