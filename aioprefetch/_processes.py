"""Workers that are processes: with a socket and shared memory where they can be had."""

from __future__ import annotations

import asyncio
from multiprocessing.context import BaseContext
from typing import Any

from . import _codec
from ._channel_lane import ChannelLane
from ._guards import check_descriptors
from ._lane import Lane, LaneEvents
from ._memory import Shipment
from ._payload import Store
from ._plain import Copies
from ._process_lane import watches_descriptors
from ._program import Program
from ._submit_lane import SubmitLane
from ._threads import Helper


class Processes:
    """Processes of a multiprocessing context."""

    frees = True
    in_process = False

    def __init__(self, context: BaseContext, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._has_channels = watches_descriptors(loop)

    def lane(self, number: int, keeper: Helper, events: LaneEvents, incarnation: int) -> Lane:
        kind = ChannelLane if self._has_channels else SubmitLane
        return kind(number, self._context, keeper, events, incarnation)

    def check(self, num_proc: int) -> None:
        check_descriptors(num_proc)

    def ship(self, program: Program) -> Any:
        segments = _codec.encode_source(program)
        return Shipment(segments) if self._has_channels else Copies(segments)

    def store(self) -> Store | None:
        return Store() if self._has_channels else None
