"""A worker that is a process of its own.

    keeper thread        launch ──> process: serve()
    event loop           channel ◄──────── frames ────────────► channel
                         pidfd   ◄──────── readable: dead
    keeper thread        bury: join the process, read the exit code, close the descriptors

It is dead when its pidfd is readable, and only then. The end of `serve` or of the channel
without it means: kill the process group, and wait for the pidfd.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any

from . import _serve
from ._lane import Lane, LaneEvents
from ._logs import wanted_level
from ._memory import oom_kills
from ._payload import Store
from ._process import WorkerProcess
from ._program import Terms
from ._stack import is_stopped
from ._threads import Helper

OOM_SCORE_ADJ = "AIOPREFETCH_OOM_SCORE_ADJ"
_MANAGER_GRACE = 1.0  # seconds that the thread of a dead worker's executor may take to end


class ProcessLane(Lane):
    """What both ways of talking to a process have in common."""

    def __init__(
        self,
        number: int,
        context: BaseContext,
        keeper: Helper,
        events: LaneEvents,
        incarnation: int = 0,
    ) -> None:
        super().__init__(number, keeper, events, incarnation)
        self._process = WorkerProcess(context)
        self._oom_kills: int | None = None  # that the kernel had made before it was started
        self._out_of_memory = False  # whether it was probably one of them

    @property
    def pid(self) -> int | None:
        return self._process.pid

    # On the keeper thread

    def launch(
        self,
        terms: Terms,
        worker_threads: int | None,
        shipment: Any,
        store: Store | None,
        *,
        shared: bool,
    ) -> None:
        """Start the process; what fails is raised, with nothing left behind."""
        self._oom_kills = oom_kills()
        try:
            post = _serve.Post(
                self.number,
                self.incarnation,
                terms,
                worker_threads,
                shared,
                _serve.depth + 1,
                oom_score_adj(),
                wanted_level(),
            )
            self._launch(post, shipment, store)
        except BaseException:
            self.kill()
            self._process.join()
            self._close()
            self.close_watched()
            raise

    def _launch(self, post: _serve.Post, shipment: Any, store: Store | None) -> None:
        raise NotImplementedError

    def bury(self) -> None:
        """After the worker's death: join the process, read the exit code, close everything.

        All of it on the keeper, whether the loop runs or not, but for the descriptors that the
        loop watches: it lets go of them first.
        """
        if self.buried:
            return
        try:
            self.exitcode = self._process.join()
            self._out_of_memory = self.exitcode == -9 and self._kernel_has_killed()
            self._close()
        finally:  # whatever failed, others wait for this
            self.buried = True
            try:
                if self._loop is None:
                    raise RuntimeError("never attached")
                self._loop.call_soon_threadsafe(self._let_go)
            except RuntimeError:  # no loop, or closed
                self.close_watched()

    def _kernel_has_killed(self) -> bool:
        """SIGKILL has no return address, but the kernel counts what it kills for want of memory."""
        before, now = self._oom_kills, oom_kills()
        return before is not None and now is not None and now > before

    @property
    def ended(self) -> str:
        if not self._out_of_memory:
            return super().ended
        return (
            f"{super().ended}, probably by the kernel, which has run out of memory (the OOM "
            "killer; see dmesg)"
        )

    def _close(self) -> None:
        """Close what the loop does not watch."""

    def close_watched(self) -> None:
        """Close what the loop watched, which is closed or has let go of it."""
        self._process.close()

    # On the loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch and to listen."""
        self._loop = loop
        if self._process.pidfd is not None and watches_descriptors(loop):
            loop.add_reader(self._process.pidfd, self._exited)
        else:
            threading.Thread(target=self._watch, name="aioprefetch-watch", daemon=True).start()

    def is_stopped(self) -> bool:
        """Whether the worker's process has been stopped."""
        return is_stopped(self.pid)

    def _exited(self) -> None:
        """The process is dead."""
        if not self.dead:
            self._detach()
            self._process.kill_group()
            self._keeper.post(self.bury)

    def _detach(self) -> None:
        """Read what the dead has written, and leave the loop."""
        self.dead = True
        if self._process.pidfd is not None and self._loop is not None:
            with suppress(NotImplementedError):
                self._loop.remove_reader(self._process.pidfd)

    def _watch(self) -> None:
        self._process.wait(None)
        self._call_on_loop(self._exited)

    # Anywhere

    def kill(self) -> None:
        """SIGKILL the worker and its group; returns at once, and does nothing to the dead."""
        if not self.dead:
            self._process.kill()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the death, off the loop."""
        return self.buried or self._process.wait(timeout)

    def free_at_exit(self) -> None:
        """At interpreter exit: nothing may keep the executor's manager waiting."""
        self._process.end_manager(_MANAGER_GRACE)


def oom_score_adj() -> int | None:
    """What the environment asks workers to add to their chance of being killed first.

    Raises
    ------
    ValueError
        It is not a whole number from -1000 to 1000.
    """
    score = os.environ.get(OOM_SCORE_ADJ)
    if not score:
        return None
    try:
        number = int(score)
    except ValueError:
        number = 1001
    if not -1000 <= number <= 1000:
        raise ValueError(
            f"{OOM_SCORE_ADJ} must be a whole number from -1000 to 1000, not {score!r}"
        )
    return number


def watches_descriptors(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop has ``add_reader``; Windows' default one has not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            loop.add_reader(ours, lambda: None)
        except NotImplementedError:
            return False
        loop.remove_reader(ours)
    return True
