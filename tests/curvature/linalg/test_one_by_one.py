"""Matrices are factorised one by one on CPUs, whatever stacks they are in."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.curvature.linalg.psd import psd_power


@pytest.mark.parametrize("power", [-1, -0.5])
def test_no_call_of_a_library_gets_a_stack(power):
    """Several such calls in one program can wait for each other for ever."""
    stack = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 20, 20)))
    stack = stack @ jnp.matrix_transpose(stack)
    invert = lambda x: psd_power(x, 0.1, power)
    compiled = jax.jit(invert).lower(stack).compile()
    calls = [line for line in compiled.as_text().splitlines() if "lapack" in line]
    assert calls
    assert not [line for line in calls if re.search(r"f64\[\d+,\d+,\d+", line)]
    found = compiled(stack)
    expected = jnp.stack([jnp.stack([invert(x) for x in row]) for row in stack])
    np.testing.assert_allclose(found, expected, 1e-9, 1e-10)
