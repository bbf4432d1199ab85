"""Train a small regression with JAX from `async for`.

Workers make the batches; the loop hands their arrays to a compiled step. Steps are dispatched,
not waited for, so JAX computes while the next batch is on its way.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np

from aioprefetch import Prefetcher, rng

# JAX is imported by the function that uses it: a worker imports this file too, and does not
# need it.

WEIGHTS = np.array([1.5, -2.0, 0.5, 0.0, 3.0], np.float32)
NOISE = 0.1


class Measurements:
    """Map-style: what was measured, and what it came to, with noise of its own each time."""

    def __init__(self, length: int) -> None:
        random = np.random.default_rng(0)
        self.features = random.normal(size=(length, len(WEIGHTS))).astype(np.float32)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.float32]:
        features = self.features[index]
        return features, np.float32(features @ WEIGHTS + rng().normal(0, NOISE))


def make_step(rate: float) -> Any:
    """The compiled step: weights and a batch to better weights and the loss before."""
    import jax

    def loss(weights: Any, features: Any, values: Any) -> Any:
        return ((features @ weights - values) ** 2).mean()

    @jax.jit
    def step(weights: Any, features: Any, values: Any) -> Any:
        error, slope = jax.value_and_grad(loss)(weights, features, values)
        return weights - rate * slope, error

    return step


async def train(data: Measurements, epochs: int, num_proc: int) -> np.ndarray:
    step = make_step(rate=0.1)
    weights: Any = np.zeros_like(WEIGHTS)
    async with Prefetcher(
        data, batch_size=64, drop_last=True, shuffle=True, num_proc=num_proc
    ) as batches:
        for epoch in range(epochs):
            errors = []
            async for features, values in batches:
                weights, error = step(weights, features, values)
                errors.append(error)
            print(f"epoch {epoch}  loss {np.mean(errors):.4f}")
    return np.asarray(weights)


async def main(args: argparse.Namespace) -> None:
    weights = await train(Measurements(args.length), args.epochs, args.num_proc)
    print("weights  " + " ".join(f"{weight:6.2f}" for weight in weights))
    print("of data  " + " ".join(f"{weight:6.2f}" for weight in WEIGHTS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096, help="of the data")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    asyncio.run(main(parser.parse_args()))
