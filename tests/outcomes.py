"""What a pass gave, told in short."""

from __future__ import annotations

import asyncio
from typing import Any

from aioprefetch import PoolBroken, TaskError, TaskTimeout, WorkerDied
from tests import faulty

POLICIES: dict[str, Any] = {"raise": "raise", "skip": "skip", "call": faulty.mend}


async def outcomes(p: Any, limit: int = 60) -> list[Any]:
    """What each ``anext`` gives or raises, to the end or to PoolBroken."""
    seen: list[Any] = []
    async with aiter(p) as iterator:
        while len(seen) < limit:
            try:
                async with asyncio.timeout(15):
                    seen.append(await anext(iterator))
            except TaskError as error:
                seen.append(error)
            except PoolBroken as error:
                return [*seen, error]
            except StopAsyncIteration:
                break
    return seen


def told(outcome: Any) -> Any:
    """An outcome in short: an error by its stage, and its index or its indices."""
    if isinstance(outcome, PoolBroken):
        return "broken"
    if not isinstance(outcome, TaskError):
        return outcome
    stage: str = outcome.stage
    if isinstance(outcome, WorkerDied):
        stage = "died"
    elif isinstance(outcome, TaskTimeout):
        stage = "late"
    return f"{stage} {list(outcome.indices) if outcome.index is None else outcome.index}"


async def tell(p: Any) -> list[Any]:
    return [told(outcome) for outcome in await outcomes(p)]


async def error_of(p: Any) -> TaskError:
    """Its only error."""
    (error,) = [outcome for outcome in await outcomes(p) if isinstance(outcome, TaskError)]
    return error
