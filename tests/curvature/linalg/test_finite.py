"""Anything that is not finite is found, wherever it is; large and small numbers are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvax._cpu import all_finite

DTYPES = [jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64]
BAD = [np.nan, np.inf, -np.inf]
CHECK = jax.jit(all_finite)


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    dtype=st.sampled_from(DTYPES),
    bad=st.sampled_from(BAD),
    place=st.integers(0, 10**6),
)
def test_one_element_is_enough(shape, dtype, bad, place):
    whole = np.ones(shape, np.float32)
    spoilt = whole.copy()
    spoilt.reshape(-1)[place % whole.size] = bad
    others = {"fine": jnp.zeros((3, 2)), "number": jnp.arange(3)}
    assert CHECK({**others, "x": jnp.asarray(whole, dtype)})
    assert not CHECK({**others, "x": jnp.asarray(spoilt, dtype)})


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize("what", ["max", "min", "smallest_subnormal"])
def test_the_largest_and_the_smallest_numbers_are_finite(dtype, what):
    """Also if there are many of them, whose sum is not."""
    number = getattr(jnp.finfo(dtype), what)
    assert CHECK(jnp.full((300, 500), number, dtype))


def test_opposite_infinities_do_not_cancel():
    assert not CHECK(jnp.asarray([np.inf, -np.inf]))
    assert not CHECK([jnp.asarray([[1.0, np.inf], [0.0, -np.inf]])])


def test_nothing_at_all_is_finite():
    assert CHECK([])
    assert CHECK([jnp.zeros((0, 3)), jnp.arange(4), jnp.asarray([True])])


def test_it_can_be_asked_of_many_at_once():
    x = jnp.asarray([[1.0, 2.0], [np.nan, 1.0], [3.0, np.inf]])
    np.testing.assert_array_equal(jax.vmap(all_finite)(x), [True, False, False])
