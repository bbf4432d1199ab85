"""``python -m tests.chaos.stage SCENE METHOD LOOP``: one fault in a process of its own.

Before and after it this process holds the same children, descriptors, threads and shared
memory, and while the fault is dealt with the loop is never held.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import sys
import tempfile
import time
import warnings
from pathlib import Path

import uvloop

from aioprefetch import Prefetcher
from tests.chaos.scenes import SCENES, Setting
from tests.heartbeat import heartbeat
from tests.processes import WATCHDOG, Leftovers, leftovers

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
GAP = 0.15  # seconds that the loop may be held: three times the goal, on a machine that is shared


async def warm_up(setting: Setting) -> None:
    """The stdlib's fork server and resource tracker stay, so they are there before."""
    async for _ in Prefetcher(range(2), mp_context=setting.method):
        pass


async def play(name: str, setting: Setting) -> None:
    scene = SCENES[name]
    async with heartbeat() as heart, asyncio.timeout(WATCHDOG - 4):
        await scene.play(setting)
    held = heart.longest
    assert scene.blocks or held < GAP, f"the loop was held for {held * 1000:.0f} ms"


def left_behind(before: Leftovers, runner: asyncio.Runner) -> dict[str, list[str]]:
    """What is still there when the loop has had time to let go of it.

    Looked at while the loop does not run: uvloop has sockets of its own while it does.
    """
    deadline = time.monotonic() + 3
    while (left := leftovers().beyond(before)) and time.monotonic() < deadline:
        runner.run(asyncio.sleep(0.01))
    return left


def main(name: str, method: str, loop: str) -> None:
    faulthandler.dump_traceback_later(WATCHDOG - 2, exit=True)
    warnings.simplefilter("error")
    if method == "fork":
        warnings.filterwarnings("ignore", "mp_context='fork'")
        warnings.filterwarnings("ignore", "This process.*multi-threaded")
    multiprocessing.set_start_method(method)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(method, Path(folder))
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(warm_up(setting))
            before = leftovers()
            runner.run(play(name, setting))
            left = left_behind(before, runner)
            assert not left, f"left behind: {left}"
    sys.stdout.write("survived\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
