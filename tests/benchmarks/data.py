"""The datasets. Workers import this module, so it needs nothing but numpy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

ENDLESS = 1_000_000_000  # longer than any measurement


class Arrays:
    """Arrays of one shape out of 64 prepared ones: an item is no work, its transport all."""

    def __init__(self, shape: tuple[int, ...], length: int = ENDLESS) -> None:
        self._shape = shape
        self._length = length
        self._made: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes of one item."""
        return int(np.prod(self._shape)) * 4

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not self._made:  # made in the worker, so that starting ships nothing
            self._made = [np.full(self._shape, value, np.float32) for value in range(64)]
        return self._made[index % 64]


class Dicts(Arrays):
    """Images with what comes with them: arrays of several types and sizes in a dict."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = super().__getitem__(index)
        return {
            "image": image,
            "mask": (image[0] > index % 64).view(np.uint8),
            "boxes": np.full((10, 4), index % 64, np.float32),
            "label": np.int64(index % 64),
        }


class Numbers:
    """The index itself: all cost is overhead."""

    def __init__(self, length: int = ENDLESS) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(index)


class Table:
    """Rows of one array held in memory, as a numpy dataset mostly is."""

    def __init__(self, rows: int, columns: int) -> None:
        self._rows = np.ones((rows, columns), np.float32)

    @property
    def nbytes(self) -> int:
        return int(self._rows.nbytes)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


class Sums(Table):
    """Reads every byte of a row and gives back a number."""

    def __getitem__(self, index: int) -> float:
        return float(self._rows[index].sum())


class Records:
    """Many small Python objects in a list."""

    def __init__(self, length: int) -> None:
        self._records = make_records(length)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._records[index]


def make_records(length: int) -> list[dict[str, Any]]:
    return [{"id": k, "name": f"record {k}", "score": k / 2, "tags": [k]} for k in range(length)]


class Sleeps:
    """Each item takes a while, some take long; an item is the (start, end) of its work."""

    def __init__(self, length: int, seconds: float, slow: float = 0, every: int = 0) -> None:
        self._length = length
        self._seconds = seconds
        self._slow = slow
        self._every = every

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[float, float]:
        start = time.monotonic()  # one clock for all processes
        slow = self._every and index % self._every == self._every // 2
        time.sleep(self._slow if slow else self._seconds)
        return start, time.monotonic()


class Waits:
    """Each item is awaited, as a request over a network is."""

    def __init__(self, seconds: float, length: int = ENDLESS) -> None:
        self._seconds = seconds
        self._length = length

    def __len__(self) -> int:
        return self._length

    async def __getitem__(self, index: int) -> int:
        import asyncio

        await asyncio.sleep(self._seconds)
        return int(index)


class ThreadedWaits:
    """The same for loaders without asyncio: a batch is fetched by threads inside the worker."""

    def __init__(self, seconds: float, threads: int = 16, length: int = ENDLESS) -> None:
        self._seconds = seconds
        self._threads = threads
        self._length = length
        self._pool: Any = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        return int(index)

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(self._threads)
        return list(self._pool.map(self.__getitem__, indices))


class Photos:
    """scikit-image's photographs as JPEG bytes; an item is decoded, cropped, flipped, scaled."""

    SIZE = 224

    def __init__(self, length: int = ENDLESS) -> None:
        self._files = list(_photographs())
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        import io

        from PIL import Image

        rng = np.random.default_rng(index)
        image = Image.open(io.BytesIO(self._files[index % len(self._files)])).convert("RGB")
        side = int(min(image.size) * rng.uniform(0.5, 1))
        left, top = (int(rng.integers(extent - side + 1)) for extent in image.size)
        box = (left, top, left + side, top + side)
        small = image.resize((self.SIZE, self.SIZE), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(small, np.float32).transpose(2, 0, 1)
        pixels = pixels[:, :, ::-1] if rng.random() < 0.5 else pixels
        return np.ascontiguousarray((pixels - 128) / 64)


def _photographs() -> Iterator[bytes]:
    import io

    from PIL import Image
    from skimage import data

    for name in ("astronaut", "coffee", "chelsea", "rocket"):
        file = io.BytesIO()
        Image.fromarray(getattr(data, name)()).save(file, "JPEG", quality=90)
        yield file.getvalue()


class Indices:
    """Batches of consecutive indices, for peers that are handed their batches."""

    def __init__(self, length: int, batch_size: int | None) -> None:
        self._length = length
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        if self._batch_size is None:
            yield from range(self._length)
            return
        for start in range(0, self._length, self._batch_size):
            yield range(start, min(start + self._batch_size, self._length))


class Fetch:
    """Indices to a batch, or an index to an item."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, indices: Any) -> Any:
        if isinstance(indices, int):
            return self._dataset[indices]
        return collate(fetch(self._dataset, indices))


def fetch(dataset: Any, indices: Sequence[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def collate(items: list[Any], out: Any = None) -> Any:
    """Items to a batch with one `np.stack` a leaf; into ``out`` where it is given."""
    first = items[0]
    if isinstance(first, dict):
        return {
            key: collate([item[key] for item in items], None if out is None else out[key])
            for key in first
        }
    if isinstance(first, np.ndarray):
        return np.stack(items, out=out)
    return np.array(items)
