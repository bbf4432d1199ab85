"""What of a machine and a dataset is in the way of prefetching, and the way out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from . import __version__, _codec, _guards, _memory
from ._config import Config, default_start_method
from ._errors import SerializationError
from ._stats import size
from ._sweep import usable_cpus
from ._target import Target

Level = Literal["ok", "note", "warning", "problem"]

_SCARCE = 1 << 30  # bytes available, below which a window is small
_TOO_SCARCE = 128 << 20
_LARGE_PICKLE = 50_000_000  # bytes that each worker has to unpickle
_LARGE_SHIPMENT = 0.25  # of the memory that there is
_MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    level: Level
    subject: str
    found: str
    way_out: str = ""

    def __str__(self) -> str:
        text = f"{_MARKS[self.level]:<8} {self.subject:<17} {self.found}"
        return f"{text}\n{'':<26} → {self.way_out}" if self.way_out else text


def examine(target: Target | None) -> list[Finding]:
    """All findings about this machine, and about the dataset if there is one."""
    config = None if target is None else target.config
    findings = [*_dataset(config)] if config is not None else []
    return [
        *_platform(),
        *_event_loop(),
        *_start_methods(config),
        *_shared_memory(),
        *_memory_limits(),
        *_cpus(),
        *_blas(config),
        *_forks(config),
        *_descriptors(config),
        *findings,
    ]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings, as JSON keeps them."""
    return {"aioprefetch": __version__, "findings": [asdict(finding) for finding in findings]}


# The machine


def _platform() -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.platform()}, aioprefetch {__version__}"
    if sys.platform.startswith("linux"):
        yield Finding("ok", "Python", found)
    else:
        yield Finding(
            "note", "Python", found, "Linux is where it is tested: report what fails here"
        )


def _event_loop() -> Iterator[Finding]:
    if importlib.util.find_spec("uvloop") is not None:
        yield Finding("ok", "event loop", f"uvloop {importlib.metadata.version('uvloop')} is there")
        return
    way_out = "" if sys.platform == "win32" else "pip install uvloop: loops in workers are quicker"
    yield Finding("note", "event loop", "uvloop is not installed, asyncio's own is used", way_out)


def _start_methods(config: Config | None) -> Iterator[Finding]:
    methods = ", ".join(multiprocessing.get_all_start_methods())
    if config is not None and config.num_proc and _method(config) == "fork":
        yield Finding(
            "warning",
            "start methods",
            "mp_context='fork' copies a process that has threads",
            "leave mp_context out: forkserver and spawn are safe",
        )
    else:
        found = f"{methods}; {default_start_method()} by default"
        yield Finding("ok", "start methods", found)


def _method(config: Config) -> str:
    return config.staff.context().get_start_method() or default_start_method()


def _shared_memory() -> Iterator[Finding]:
    try:
        os.close(_memory.memory_file("aioprefetch-doctor"))
    except OSError as error:
        way_out = "set TMPDIR to a folder that can be written, or allow memfd_create"
        yield Finding("problem", "shared memory", f"none can be had: {error}", way_out)
        return
    if hasattr(os, "memfd_create"):
        yield Finding("ok", "shared memory", "memfd: anonymous, without a name or a folder")
    else:
        yield Finding("note", "shared memory", "there is no memfd: unlinked temporary files serve")
    yield from _dev_shm()


def _dev_shm() -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        if sys.platform.startswith("linux"):
            way_out = "batches do not need it, but multiprocessing's locks in your dataset do"
            yield Finding("note", "/dev/shm", "it is not there", way_out)
        return
    found = f"{size(usage.free)} of {size(usage.total)} free; batches do not lie there"
    yield Finding("ok", "/dev/shm", found)


def _memory_limits() -> Iterator[Finding]:
    total, available = _memory.total(), _memory.available()
    if total is None or available is None:
        found = "how much there is cannot be told"
        yield Finding("note", "memory", found, "give max_bytes, which bounds the window")
        return
    limited = _memory.group_limited()
    where = "the limit of the control group" if limited else "of the machine"
    found = f"{size(available)} available of {size(total)}, {where}"
    yield memory_finding(available, found)


def memory_finding(available: int, found: str) -> Finding:
    """Whether so many bytes are enough."""
    way_out = "free some, raise the limit, or lower batch_size and num_prefetch"
    if available < _TOO_SCARCE:
        return Finding("problem", "memory", found, way_out)
    return (
        Finding("warning", "memory", found, way_out)
        if available < _SCARCE
        else Finding("ok", "memory", f"{found}; a window takes a quarter at most")
    )


def _cpus() -> Iterator[Finding]:
    usable, there, quota = usable_cpus(), os.cpu_count() or 1, _cpu_quota()
    found = f"{usable} of {there} may be used"
    if quota is not None and quota < usable:
        way_out = f"num_proc above {max(1, round(quota))} gains nothing unless workers wait for I/O"
        yield Finding(
            "note", "CPUs", f"{found}; the control group limits them to {quota:g}", way_out
        )
    elif usable < there:
        yield Finding("note", "CPUs", found, f"num_proc above {usable} helps only with I/O")
    else:
        yield Finding("ok", "CPUs", found)


def _cpu_quota() -> float | None:
    """CPUs' worth of time that the control group grants."""
    with suppress(OSError, ValueError, ZeroDivisionError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()
        return int(quota) / int(period)
    folder = "/sys/fs/cgroup/cpu"
    with suppress(OSError, ValueError, ZeroDivisionError):
        with open(f"{folder}/cpu.cfs_quota_us") as quota_file:
            allowed = int(quota_file.read())
        with open(f"{folder}/cpu.cfs_period_us") as period_file:
            return allowed / int(period_file.read()) if allowed > 0 else None
    return None


def _blas(config: Config | None) -> Iterator[Finding]:
    import threadpoolctl

    pools = {f"{p['internal_api']} {p['num_threads']}" for p in threadpoolctl.threadpool_info()}
    found = f"threads in this process: {', '.join(sorted(pools)) or 'no such library is loaded'}"
    if config is not None and config.num_proc > 1 and config.worker_threads is None:
        way_out = "worker_threads=1, unless one worker is to use all CPUs"
        yield Finding(
            "warning", "BLAS", f"{found}; worker_threads=None lets each worker start them", way_out
        )
    else:
        workers = 1 if config is None else config.worker_threads
        yield Finding("ok", "BLAS", f"{found}; in each worker {workers or 'as many'}")


def _forks(config: Config | None) -> Iterator[Finding]:
    forks = config is not None and config.num_proc > 0 and _method(config) == "fork"
    if _cuda_is_used():
        yield Finding(
            "problem" if forks else "warning",
            "CUDA",
            "it is initialised in this process when the dataset is imported: a forked worker "
            "cannot use it, and one that imports the module takes memory of the GPU",
            "have the dataset return CPU arrays, and copy batches with transfer=",
        )
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if threads:
        yield Finding(
            "warning" if forks else "note",
            "threads",
            f"importing the dataset started {len(threads)}: {', '.join(threads[:4])}",
            "keep to forkserver or spawn, or start them on first use: a fork leaves locks held",
        )
    elif not _cuda_is_used():
        yield Finding("ok", "fork hazards", "no threads of Python, CUDA is not initialised")


def _cuda_is_used() -> bool:
    torch: Any = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())


def _descriptors(config: Config | None) -> Iterator[Finding]:
    limit = _guards.descriptor_limit()
    if limit is not None:
        workers = usable_cpus() if config is None else max(1, config.num_proc)
        yield descriptor_finding(limit, workers, asked=config is not None)


def descriptor_finding(limit: int, workers: int, *, asked: bool) -> Finding:
    """Whether so many file descriptors are enough for so many workers."""
    needed = _guards.descriptors_needed(workers)
    found = f"{limit} allowed; num_proc={workers} needs up to {needed}"
    if limit >= needed:
        return Finding("ok", "file descriptors", found)
    return Finding(
        "problem" if asked else "warning",
        "file descriptors",
        found,
        f"ulimit -n {needed}, or a lower num_proc",
    )


# The dataset


def _dataset(config: Config) -> Iterator[Finding]:
    yield _kind(config)
    if config.num_proc == 0:
        yield Finding("ok", "pickling", "num_proc=0 works in this process: nothing is shipped")
        return
    yield _shipping(config)


def _kind(config: Config) -> Finding:
    facts = config.facts
    kind = {
        "map": "map-style",
        "iterable": "iterable",
        "factory": "made by a function, in the worker",
    }
    count = "" if facts.length is None else f", {facts.length:,} items"
    found = f"{facts.name} is {kind[facts.kind]}{count}{', async' if facts.is_async else ''}"
    if facts.length == 0:
        return Finding(
            "problem", "dataset", found, "it has no items: look at the paths that it reads"
        )
    if facts.one_shot:
        way_out = "give the function that makes it: an iterator can be read once, by one process"
        return Finding("warning", "dataset", found, way_out)
    return Finding("ok", "dataset", found)


def _shipping(config: Config) -> Finding:
    split = "parent" if config.facts.one_shot else config.split
    try:
        segments = _codec.encode_source(config.program(split))
    except SerializationError as error:
        sentence, _, way_out = str(error).partition("). ")
        return Finding("problem", "pickling", f"{sentence})", way_out.strip() or "see above")
    pickled, *arrays = (memoryview(segment).nbytes for segment in segments)
    return shipping_finding(pickled, sum(arrays), _memory.total() or _memory.SOME_MEMORY)


def shipping_finding(pickled: int, arrays: int, memory: int) -> Finding:
    """Whether a dataset of this size travels well: a pickle, and arrays beside it."""
    found = f"it pickles: {size(pickled)}" + (f", and {size(arrays)} of arrays" if arrays else "")
    if pickled > _LARGE_PICKLE:
        return Finding(
            "warning",
            "pickling",
            f"{found}; each worker rebuilds the pickle, in memory of its own",
            "SharedList holds many small objects once for all workers; or ship paths, not contents",
        )
    if arrays > _LARGE_SHIPMENT * memory:
        way_out = "np.load(path, mmap_mode='r') in the worker reads it where it lies"
        return Finding("warning", "pickling", f"{found}, much of the {size(memory)} here", way_out)
    return Finding("ok", "pickling", f"{found}; shipped once, whatever num_proc")
