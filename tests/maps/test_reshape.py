"""`reshape_batch_axis` lays a batch out by microbatches, in column-major order."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

import curvax


@given(st.integers(0, 5), st.integers(1, 5), st.integers(-3, 2))
def test_microbatch_i_holds_every_mth_example_from_i(number, size, axis):
    x = np.moveaxis(np.arange(number * size * 6).reshape(number * size, 2, 3), 0, axis)
    reshaped = np.asarray(curvax.reshape_batch_axis({"x": x}, size, axis)["x"])
    place = axis % 3
    assert reshaped.shape == (*x.shape[:place], number, size, *x.shape[place + 1 :])
    for i in range(number):
        expected = np.take(x, np.arange(number * size)[i::number], axis=axis)
        np.testing.assert_array_equal(np.take(reshaped, i, axis=place), expected)


def test_it_is_the_order_in_which_microbatch_sees_examples():
    x = jnp.arange(1.0, 7.0)
    by_hand = jnp.sum(jnp.prod(curvax.reshape_batch_axis(x, 2), axis=1))
    assert curvax.microbatch(jnp.prod, 0, 2)(x) == by_hand
