"""A regression trained with JAX."""

from __future__ import annotations

import asyncio

import numpy as np

from tests.edge.run import load_example, run_example

example = load_example("jax_loop", "jax")


def test_the_example_runs() -> None:
    learnt = run_example("jax_loop").splitlines()[-2].split()
    assert learnt[0] == "weights"
    assert np.allclose([float(weight) for weight in learnt[1:]], example.WEIGHTS, atol=0.02)


def test_it_learns_the_same_from_any_number_of_workers() -> None:
    one, two = (asyncio.run(example.train(example.Measurements(1024), 2, n)) for n in (1, 2))
    assert np.array_equal(one, two)
