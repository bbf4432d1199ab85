"""The workloads, in the order in which they run."""

from __future__ import annotations

from . import batches, crowd, items, latency, memory, plan, start, work
from .base import Figures, Goal, Metric, Workload

_MODULES = (batches, items, start, latency, work, memory, crowd, plan)
WORKLOADS: dict[str, Workload] = {
    workload.name: workload for module in _MODULES for workload in module.WORKLOADS
}

__all__ = ["WORKLOADS", "Figures", "Goal", "Metric", "Workload"]
