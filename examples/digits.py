"""Train a small classifier on real handwritten digits while worker processes augment them.

The 1,797 digits ship with scikit-learn. Two workers turn and shift each training digit anew in
every epoch; the event loop takes the batches, trains the net, and stays free for others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import numpy as np
from scipy import ndimage
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from aioprefetch import Prefetcher, rng

try:
    from uvloop import run
except ImportError:
    from asyncio import run

# scikit-learn and matplotlib are imported by the functions that use them: a worker imports
# this file too, and needs neither.


class AugmentedDigits:
    """A map-style dataset: digit i, a little different each time."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return augment(self.images[index], rng()), self.labels[index]


def augment(image: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Turn and shift a little, three digits in four, and add noise."""
    noise = random.normal(0, 0.05, image.shape).astype(image.dtype)
    if random.random() < 0.25:
        return image + noise
    angle = np.radians(random.normal(0, 7))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = (np.array(image.shape) - 1) / 2
    offset = centre - turn @ centre + random.normal(0, 0.3, size=2)
    return ndimage.affine_transform(image, turn, offset, order=1) + noise


def load() -> tuple[AugmentedDigits, np.ndarray, np.ndarray]:
    """Four digits in five to train on, the rest, as they are, to test with."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = np.split(order, [len(order) * 4 // 5])
    return AugmentedDigits(images[train], labels[train]), images[test], labels[test]


class Net:
    """One hidden layer, trained by gradient descent with momentum."""

    def __init__(self, hidden: int = 256) -> None:
        random = np.random.default_rng(0)
        sizes = [(64, hidden), (hidden, 10)]
        self.weights = [random.normal(0, (2 / i) ** 0.5, (i, o)).astype("f4") for i, o in sizes]
        self.biases = [np.zeros(o, "f4") for _, o in sizes]
        self.speeds = [np.zeros_like(value) for value in self.weights + self.biases]

    def forward(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hidden = np.maximum(0, images.reshape(-1, 64) @ self.weights[0] + self.biases[0])
        return hidden, hidden @ self.weights[1] + self.biases[1]

    def predict(self, images: np.ndarray) -> np.ndarray:
        return self.forward(images)[1].argmax(axis=1)

    def gradients(self, images: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
        """Of the mean cross entropy, by the weights and the biases."""
        hidden, scores = self.forward(images)
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        back = error @ self.weights[1].T * (hidden > 0)
        return [images.reshape(-1, 64).T @ back, hidden.T @ error, back.sum(0), error.sum(0)]

    def step(self, images: np.ndarray, labels: np.ndarray, rate: float) -> None:
        gradients = self.gradients(images, labels)
        values = self.weights + self.biases
        for value, speed, gradient in zip(values, self.speeds, gradients, strict=True):
            speed[:] = 0.9 * speed - rate * gradient
            value[:] += speed


async def train(
    net: Net, batches: Prefetcher, epochs: int, images: np.ndarray, labels: np.ndarray
) -> None:
    print("epoch   test accuracy")
    with tqdm(total=epochs * len(batches), unit="batch", leave=False, disable=None) as bar:
        for epoch in range(epochs):
            rate = 0.2 * (1 - epoch / epochs)
            async for batch_images, batch_labels in batches:
                net.step(batch_images, batch_labels, rate)
                bar.update()
            accuracy = (net.predict(images) == labels).mean()
            bar.write(f"{epoch + 1:5}   {accuracy:13.1%}")


async def heartbeat(late: list[float], every: float = 0.005) -> None:
    """Note by how much each wake-up comes late: what any other task of this loop would feel."""
    while True:
        due = time.perf_counter() + every
        await asyncio.sleep(every)
        late.append(max(0.0, time.perf_counter() - due))


def save_picture(path: Path, images: np.ndarray, labels: np.ndarray, guesses: np.ndarray) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(8, 8, figsize=(7, 8.2), layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, label, guess in zip(axes.flat, images, labels, guesses, strict=False):
        axis.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        right = label == guess
        title = f"{label}" if right else f"{label}, not {guess}"
        axis.set_title(title, fontsize=10, color="black" if right else "crimson")
    figure.suptitle("One augmented batch and its labels (red: the net reads another digit)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def tell_lateness(late: list[float], workers: int) -> None:
    median, p99, worst = np.percentile(late, [50, 99, 100]) * 1000
    print(
        f"event loop late by {median:.1f} ms at the median, {p99:.1f} ms at p99, "
        f"{worst:.1f} ms at worst\n"
        f"  (training steps included; {workers} workers on {os.cpu_count()} cores)"
    )


async def main(args: argparse.Namespace) -> None:
    threadpool_limits(1)  # BLAS threads here would take the cores from the workers
    dataset, images, labels = load()
    print(f"{len(dataset)} digits to train on, {len(images)} to test with")
    net = Net()
    late: list[float] = []
    async with Prefetcher(
        dataset, shuffle=True, batch_size=64, num_proc=args.num_proc, seed=0
    ) as batches:
        pulse = asyncio.create_task(heartbeat(late))
        began = time.perf_counter()
        await train(net, batches, args.epochs, images, labels)
        seconds = time.perf_counter() - began
        pulse.cancel()
        one_batch = await anext(aiter(batches))
    print(f"{args.epochs * len(dataset)} augmented digits in {seconds:.1f} s")
    tell_lateness(late, args.num_proc)
    guesses = net.predict(one_batch[0])
    await asyncio.to_thread(save_picture, args.picture, *one_batch, guesses)
    print(f"picture of one augmented batch: {args.picture}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    parser.add_argument("--picture", type=Path, default=Path("digits.png"), help="where to save it")
    run(main(parser.parse_args()))
