"""Interrupted at random and gone on with under other terms: none lost, none twice."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tests.resume.journeys import KINDS, Terms, journey, random_journey

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
LEG_SECONDS = 30


async def travel(seed: int, **limits: int) -> None:
    dice = random.Random(seed)
    kind, length, legs = random_journey(dice, **limits)
    async with asyncio.timeout(LEG_SECONDS * len(legs)):
        delivered = await journey(kind, length, legs, dice)
    assert sorted(delivered) == list(range(length)), f"journey {seed}: {kind}, {legs}"


@one_loop
@pytest.mark.parametrize("block", range(3))
async def test_on_a_thread(block: int) -> None:
    for seed in range(100 * block, 100 * (block + 1)):
        await travel(seed, most_procs=0)


@one_loop
@pytest.mark.parametrize("block", range(3))
async def test_on_other_hosts(block: int) -> None:
    for seed in range(100 * block, 100 * block + 50):
        await travel(seed, most_procs=0, most_hosts=4)


@one_loop
@pytest.mark.parametrize("block", range(10))
async def test_in_processes(block: int) -> None:
    for seed in range(10_000 + 10 * block, 10_000 + 10 * (block + 1)):
        await travel(seed, most_procs=2)


@pytest.mark.resume
@one_loop
@pytest.mark.parametrize("block", range(90))
async def test_many_on_a_thread(block: int) -> None:
    for seed in range(20_000 + 100 * block, 20_000 + 100 * (block + 1)):
        await travel(seed, most_procs=0, most_hosts=1 + block % 4)


@pytest.mark.resume
@one_loop
@pytest.mark.parametrize("block", range(100))
async def test_many_in_processes(block: int) -> None:
    for seed in range(40_000 + 10 * block, 40_000 + 10 * (block + 1)):
        await travel(seed, most_procs=3, most_hosts=1 + block % 4)


@one_loop
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [None, 4])
async def test_in_order_it_is_the_run_that_was_never_interrupted(
    kind: str, batch_size: int | None
) -> None:
    terms = Terms(num_proc=0, batch_size=batch_size)
    dice = random.Random(0)
    whole = await journey(kind, 23, [terms], dice)
    for number in range(8):
        legs = [replace(terms, num_proc=n % 2 * (number % 4 == 0), salt=n) for n in range(3)]
        assert await journey(kind, 23, legs, dice, keeps=False) == whole
