import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import settings

# Worker processes on a busy machine make the time of one example meaningless.
settings.register_profile("aioprefetch", deadline=None)
settings.load_profile("aioprefetch")


@pytest.fixture(autouse=True)
def nothing_of_ours_blocks_a_loop() -> Iterator[BlockBuster]:
    """A call from this package that blocks a running event loop raises."""
    with blockbuster_ctx("aioprefetch") as blockbuster:
        yield blockbuster


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test once on each event loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
