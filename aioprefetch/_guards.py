"""What is checked before a worker is started, so that a mistake is an error and not a hang."""

from __future__ import annotations

import sys
from multiprocessing import process
from types import FrameType

from . import _serve
from ._errors import WorkerStartError

GUARD_HINT = (
    "If the script starts workers when it is imported, put that under "
    "`if __name__ == '__main__':`, since each worker imports the main module"
)


def descriptors_needed(num_proc: int) -> int:
    """File descriptors that a process with so many workers may come to have."""
    return 16 * num_proc + 64


def descriptor_limit() -> int | None:
    """File descriptors that this process may have; None where that is not limited."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def check_descriptors(num_proc: int) -> None:
    """Fail before the first worker, not at the one that meets the limit."""
    limit, needed = descriptor_limit(), descriptors_needed(num_proc)
    if limit is not None and limit < needed:
        raise WorkerStartError(
            f"{num_proc} workers need up to {needed} file descriptors and this process may have "
            f"{limit}: raise it (ulimit -n {needed}) or lower num_proc"
        )


def refuse_to_start_in_a_starting_worker() -> None:
    """A worker that imports the script which starts workers must not start its own."""
    starting = getattr(process.current_process(), "_inheriting", False)
    if starting or _serve.loading:
        raise RuntimeError(
            "a worker was about to start workers of its own while it imported the program. "
            + GUARD_HINT
        )
    module = _module_being_imported()
    if module is not None:
        raise WorkerStartError(
            f"workers were to be started by the body of module {module}, while it is imported, and "
            "each of them would import it again. Start them from a function that is called later, "
            "or from the main module under `if __name__ == '__main__':`"
        )
    if _serve.depth >= _serve.MAX_DEPTH:
        raise RuntimeError(
            f"workers inside of workers, {_serve.depth} deep: a source that starts its own "
            "Prefetcher contains itself"
        )


def _module_being_imported() -> str | None:
    """Name of the module whose body is running up the stack, other than the main one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        if frame.f_code.co_name == "<module>" and getattr(spec, "_initializing", False):
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return None
