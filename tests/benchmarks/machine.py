"""What a result was measured on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from .contenders import CONTENDERS


def describe() -> dict[str, object]:
    return {
        "cpus": os.cpu_count(),
        "processor": _first_field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def versions() -> dict[str, str]:
    packages = {"numpy"} | {package for entry in CONTENDERS.values() for package in entry.packages}
    return {package: _version(package) for package in sorted(packages)}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _first_field(path: Path, name: str) -> str | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
