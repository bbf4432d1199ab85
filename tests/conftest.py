import asyncio
import gc
import os
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import settings

# Worker processes on a busy machine make the time of one example meaningless.
settings.register_profile("aioprefetch", deadline=None)
settings.load_profile("aioprefetch")


# What is called from here is the user's, who may block the loop.
_USERS = [
    ("aioprefetch/_config.py", {"__post_init__"}),  # a constructor, which may look at paths
    ("aioprefetch/_inline.py", {"_hop"}),
    ("aioprefetch/_iteration.py", {"_opened"}),  # its __setstate__
    ("aioprefetch/_program.py", {"call_async"}),
    ("aioprefetch/_reading.py", {"_take_async"}),
    ("aioprefetch/_session.py", {"_here"}),
    ("aioprefetch/_thread_lane.py", {"run"}),  # a worker's loop
    ("aioprefetch/_visit.py", {"visit"}),  # the same
    ("aioprefetch/_worker.py", {"_first_half", "close"}),
]
_active: list[BlockBuster] = []


def _leave_workers_alone() -> None:
    for blockbuster in _active:
        blockbuster.deactivate()


# A worker's loop is its own, and may be blocked.
os.register_at_fork(after_in_child=_leave_workers_alone)


@pytest.fixture(autouse=True)
def nothing_of_ours_blocks_a_loop() -> Iterator[BlockBuster]:
    """A call from this package that blocks a running event loop raises."""
    with blockbuster_ctx("aioprefetch") as blockbuster:
        for function in blockbuster.functions.values():
            function.can_block_functions.extend(_USERS)
        _active.append(blockbuster)
        yield blockbuster
        _active.clear()


_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--loop",
        choices=list(_LOOPS),
        help="run the tests that are for both event loops on this one alone",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--loop") is None:
        return
    loop = _LOOPS[config.getoption("--loop")]
    dropped = [item for item in items if _is_for_both(item) and _loop_of(item) is not loop]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]


def pytest_collection_finish() -> None:
    # Many tests collect garbage; what is there before all of them is not theirs.
    gc.collect()
    gc.freeze()


def _loop_of(item: pytest.Item) -> object:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("_asyncio_loop_factory")


def _is_for_both(item: pytest.Item) -> bool:
    marked = item.get_closest_marker("asyncio")
    return _loop_of(item) is not None and marked is not None and not marked.kwargs


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test once on each event loop."""
    return _LOOPS
