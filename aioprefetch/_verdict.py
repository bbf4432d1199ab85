"""What a worker's death means for the work that it held.

The item in hand pays for it, everything else runs again free of charge. An item that has
caused more deaths than ``retries`` is given up: it fails its batch, or is replaced in it, as
``on_error`` says.
"""

from __future__ import annotations

from typing import Any

from ._errors import TaskError, TaskTimeout, WorkerDied
from ._lane import Lane
from ._messages import Failed
from ._page import BATCH, GROUP, READING
from ._request import Request

_STAGES = {BATCH: "collate", GROUP: "fetch"}


def describe_death(lane: Lane) -> WorkerDied | TaskTimeout:
    """A death in words, as the error of nothing in particular."""
    who = lane.who
    stacks = lane.stacks or None
    if lane.hang is not None:
        kind = TaskTimeout if lane.hang.item is not None else WorkerDied
        error = kind(f"{who} {lane.hang.text} and {lane.parting}", worker=lane.number)
    else:
        error = WorkerDied(f"{who} {lane.ended}")
        error.worker = lane.number
    error.pid, error.stack = lane.pid, stacks
    if isinstance(error, WorkerDied):
        error.exitcode = lane.exitcode
    return error


def guilty(lane: Lane, held: dict[int, Request]) -> dict[int, list[int]]:
    """What a dead worker had in hand, or what it hung in: positions by ticket."""
    if lane.hang is not None:
        item = lane.hang.item
        return {} if item is None else {item.ticket: [item.position]}
    found: dict[int, list[int]] = {}
    for item in lane.hand:
        found.setdefault(item.ticket, []).append(item.position)
    if found:
        return found
    # Between two items, or where nothing is noted: then it was at the task that it began last.
    begun = [ticket for ticket in held if lane.begun(ticket)]
    if not begun:
        return {}
    if len(begun) > 1 and not lane.answers_singly:  # any of them: next time each is by itself
        for ticket in begun:
            held[ticket].alone = True
        return {}
    return {max(begun) if lane.knows_hand else min(begun): [BATCH]}


def charge(
    request: Request, positions: list[int], death: WorkerDied | TaskTimeout
) -> Failed | None:
    """Make a request pay for a death; gives its failure if that was once too often."""
    rules = request.line.rules
    forgiven = rules.late if isinstance(death, TaskTimeout) else rules.retries
    for position in positions:
        charges = request.charges = request.charges or {}
        charges[position] = charges.get(position, 0) + 1
        if charges[position] > forgiven:
            failure = _given_up(request, position, death)
            if failure is not None:
                return failure
    return None


def _given_up(request: Request, position: int, death: WorkerDied | TaskTimeout) -> Failed | None:
    is_item = position < READING
    if request.line.rules.on_error != "raise":
        if is_item and position not in (request.lost or {}):
            request.lost = {**(request.lost or {}), position: _error(request, position, death)}
            return None
        if position == GROUP and not request.singly:
            request.singly = True
            return None
    return Failed(_error(request, position, death), ends=READING <= position < GROUP)


def _error(request: Request, position: int, death: WorkerDied | TaskTimeout) -> TaskError:
    """The death as the error of an item, or of the batch."""
    task = request.task
    reading = READING <= position < GROUP
    index = None
    if position < GROUP:
        index = position - READING if reading else request.key_at(position)
    deaths = (request.charges or {}).get(position, 1)
    again = "" if deaths == 1 else f", as {deaths - 1} before it were with this"
    stage: Any = "iterate" if reading else _STAGES.get(position, "fetch")
    error = type(death)(
        request.complaint(index, stage, f"{death}{again}"),
        index=index,
        indices=request.item_keys(),
        seq=task.seq,
        epoch=task.epoch,
        worker=death.worker,
        stage=stage,
    )
    error.pid, error.stack = death.pid, death.stack
    if isinstance(error, WorkerDied) and isinstance(death, WorkerDied):
        error.exitcode = death.exitcode
    return error
