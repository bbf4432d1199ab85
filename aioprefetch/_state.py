"""Where a Prefetcher stands, as a value and as JSON.

A state speaks of places in the plan, never of workers or of what was prefetched. Positions
are those of the whole plan, whichever host delivered them.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ._codec import plain_dumps
from ._delivered import ALL, Run, Share
from ._messages import Progress

VERSION = 1


@dataclass(frozen=True)
class Part:
    """A sequence of the plan: the positions delivered, and how to read on."""

    runs: tuple[Run, ...] = ()
    progress: Progress | None = None
    ended: bool = False


@dataclass(frozen=True)
class Passed:
    """What has been delivered of one epoch."""

    epoch: int
    settled: int = 0  # batches delivered, failed or left empty
    batches: int = 0
    skipped: int = 0
    whole: Part = Part()
    streams: Mapping[int, Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """What positions mean: states of different layouts do not fit. None is not known yet."""

    kind: str | None = None
    length: int | None = None
    shuffle: bool | None = None
    num_streams: int | None = None

    def check(self, here: Layout) -> None:
        """Refuse a state of this layout where another holds.

        Raises
        ------
        ValueError
            They differ; the message says in what.
        """
        for name, there, now in (
            ("kind of plan", self.kind, here.kind),
            ("length of the source", self.length, here.length),
            ("shuffle", self.shuffle, here.shuffle),
            ("num_shards", self.num_streams, here.num_streams),
        ):
            if there is not None and now is not None and there != now:
                raise ValueError(
                    f"the state does not fit: its {name} is {there!r}, and here it is {now!r}"
                )


@dataclass(frozen=True)
class State:
    """One host's state."""

    seed: int
    layout: Layout
    share: Share
    first_epoch: int  # of the iteration, which may run over several
    passes: tuple[Passed, ...]  # in their order; more than one when batches of two are pending


# JSON


def to_json(state: State) -> dict[str, Any]:
    layout = state.layout
    first, *more = map(_pass_to_json, state.passes)
    document = {
        "version": VERSION,
        "seed": state.seed,
        "kind": layout.kind,
        "length": layout.length,
        "shuffle": layout.shuffle,
        "num_streams": layout.num_streams,
        "rank": state.share.rank,
        "world_size": state.share.world_size,
        "first_epoch": state.first_epoch,
        **first,
    }
    if more:
        document["next"] = more
    return document


def _pass_to_json(passed: Passed) -> dict[str, Any]:
    document = {
        "epoch": passed.epoch,
        "settled": passed.settled,
        "batches": passed.batches,
        "skipped": passed.skipped,
        **_part_to_json(passed.whole),
    }
    if passed.streams:
        document["streams"] = [
            {"stream": number, **_part_to_json(part)} for number, part in passed.streams.items()
        ]
    return document


def _part_to_json(part: Part) -> dict[str, Any]:
    document: dict[str, Any] = {"delivered": [list(run) for run in part.runs]}
    progress = part.progress
    if progress is not None:
        document["read"] = progress.position
        if progress.items is not None:
            document["items"] = progress.items
        if progress.state is not None:
            document["state"] = _own_to_json(progress.state)
        else:
            document["digest"] = progress.digest.hex()
    if part.ended:
        document["ended"] = True
    return document


def _own_to_json(pickled: bytes) -> dict[str, Any]:
    """A stream's or sampler's own state: as it is, where JSON keeps it so."""
    value = pickle.loads(pickled)
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return {"json": value}
    except (TypeError, ValueError):
        pass
    return {"pickle": base64.b64encode(pickled).decode()}


def from_json(document: Any) -> State:
    """A state from what `to_json` made.

    Raises
    ------
    TypeError, ValueError
        It is no such thing, or one of a newer version.
    """
    if not isinstance(document, Mapping):
        raise TypeError(f"a state is a dict, as state_dict() gives it, not {document!r:.100}")
    version = document.get("version")
    if version != VERSION:
        raise ValueError(f"the state has version {version!r}, and this release reads {VERSION}")
    try:
        return State(
            document["seed"],
            Layout(
                document["kind"],
                document["length"],
                document["shuffle"],
                document["num_streams"],
            ),
            Share(document["rank"], document["world_size"]),
            document["first_epoch"],
            tuple(map(_pass_from_json, [document, *document.get("next", ())])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the state is damaged: {type(error).__name__} at {error}; give what state_dict() "
            "returned, or what json made of it"
        ) from error


def _pass_from_json(document: Mapping[str, Any]) -> Passed:
    return Passed(
        document["epoch"],
        document["settled"],
        document["batches"],
        document["skipped"],
        _part_from_json(document),
        {part["stream"]: _part_from_json(part) for part in document.get("streams", ())},
    )


def _part_from_json(document: Mapping[str, Any]) -> Part:
    progress = None
    if "read" in document:
        state = None
        if "state" in document:
            own = document["state"]
            pickled = own.get("pickle")
            state = plain_dumps(own["json"]) if pickled is None else base64.b64decode(pickled)
        progress = Progress(
            document["read"],
            bytes.fromhex(document.get("digest", "")),
            state,
            document.get("items"),
        )
    runs = tuple(Run(*run) for run in document["delivered"])
    return Part(runs, progress, document.get("ended", False))


# Hosts


def joined(states: Sequence[State], share: Share) -> State:
    """What one host goes on from: its own state, or those of all hosts of another world.

    Raises
    ------
    ValueError
        They are not of one run, or not all of them are there.
    """
    first = states[0]
    for state in states:
        if (state.seed, state.layout) != (first.seed, first.layout):
            raise ValueError("the states are of different runs: their seeds or sources differ")
        if state.share.world_size != first.share.world_size:
            raise ValueError("the states are of different runs: their world_size differs")
    world = first.share.world_size
    ranks = sorted(state.share.rank for state in states)
    if ranks == list(range(world)):
        return _united(states)
    same = [state for state in states if state.share[:2] == share[:2]]
    if len(states) == len(same) == 1:
        return first
    raise ValueError(
        f"the states are of ranks {ranks} of world_size={world}, and this is rank {share.rank} "
        f"of world_size={share.world_size}: give this rank's own state of the same world_size, or "
        "the list of the states of all ranks"
    )


def _united(states: Sequence[State]) -> State:
    first = states[0]
    if len(states) == 1:
        return first
    epochs = sorted({passed.epoch for state in states for passed in state.passes})
    passes = tuple(_united_pass(states, epoch) for epoch in epochs)
    return replace(
        first,
        share=Share(),
        first_epoch=min(state.first_epoch for state in states),
        passes=passes,
    )


def _united_pass(states: Sequence[State], epoch: int) -> Passed:
    """All that the hosts have delivered of an epoch; those in a later one have all of theirs."""
    found = [_of_epoch(state, epoch) for state in states]
    known = [passed for passed in found if passed is not None]
    whole = Part(
        tuple(run for passed in known for run in passed.whole.runs),
        least_read(passed.whole.progress for passed in known if not _is_whole(passed)),
    )
    streams = {number: part for passed in known for number, part in passed.streams.items()}
    return Passed(epoch, whole=whole, streams=streams)


def _of_epoch(state: State, epoch: int) -> Passed | None:
    for passed in state.passes:
        if passed.epoch == epoch:
            return passed
    if epoch > state.passes[-1].epoch:
        return None
    rank, world_size, _ = state.share
    all_of_it = Part((Run(rank, ALL, world_size),), ended=True)
    count = state.layout.num_streams or 0
    streams = dict.fromkeys(range(rank, count, world_size), all_of_it)
    return Passed(epoch, whole=all_of_it, streams=streams)


def _is_whole(passed: Passed) -> bool:
    return passed.whole.ended


def least_read(progresses: Iterable[Progress | None]) -> Progress | None:
    # What any of them has not read is to be read; what others delivered of it is passed over.
    known = list(progresses)
    there = [progress for progress in known if progress is not None]
    if len(there) < len(known):
        return None
    return min(there, key=lambda progress: progress.position, default=None)
