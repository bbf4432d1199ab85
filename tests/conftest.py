import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import settings

# Worker processes on a busy machine make the time of one example meaningless.
settings.register_profile("aioprefetch", deadline=None)
settings.load_profile("aioprefetch")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test once on each event loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
