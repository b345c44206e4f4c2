"""Moving averages: the quotient of two sums, and nothing that is not finite in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvature.linalg.matrices import normal
from curvax.curvature.linalg.moving_average import WeightedMovingAverage

PARTS = st.integers(0, 8).map(lambda k: k / 8)  # Numbers near zero would be flushed to it.
WEIGHTS = st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=5)


@given(weights=WEIGHTS, shape=st.sampled_from([(), (3,), (2, 2)]))
def test_the_average_is_the_weighted_sum_over_the_sum_of_weights(weights, shape):
    average = WeightedMovingAverage.zeros_array(shape, jnp.float64)
    total, weight = np.zeros(shape), 0.0
    for k, (old, new) in enumerate(weights):
        value = normal(shape, k)
        average.update(jnp.asarray(value), old, new)
        total, weight = old * total + new * value, old * weight + new
    np.testing.assert_allclose(average.weight, weight)
    np.testing.assert_allclose(average.raw_value, total, atol=1e-12)
    expected = total / weight if weight else total
    np.testing.assert_allclose(average.value, expected, atol=1e-12)


def test_an_average_of_nothing_is_zero():
    average = WeightedMovingAverage.zeros_array((2,))
    assert average.value.dtype == jnp.float32
    np.testing.assert_array_equal(average.value, 0)
    average.update(jnp.ones(2), 0.9, 0.0)
    np.testing.assert_array_equal(average.value, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_skipped_and_counted(bad):
    average = WeightedMovingAverage.zeros_like({"a": jnp.ones(2), "b": jnp.ones(())})
    average.update({"a": jnp.ones(2), "b": jnp.array(3.0)}, 0.9, 0.1)
    before = jax.tree.map(np.asarray, (average.raw_value, average.weight))
    average.update({"a": jnp.array([1.0, bad]), "b": jnp.array(1.0)}, 0.9, 0.1)
    jax.tree.map(np.testing.assert_array_equal, (average.raw_value, average.weight), before)
    assert int(average.refused) == 1
    average.update({"a": jnp.zeros(2), "b": jnp.zeros(())}, 0.0, 1.0)
    assert int(average.refused) == 1
    np.testing.assert_array_equal(average.value["a"], 0)


def test_an_update_is_in_place_and_a_copy_is_not_changed_by_it():
    average = WeightedMovingAverage.zeros_array((2,))
    copy = average.copy()
    assert average.update(jnp.ones(2), 1.0, 1.0) is average
    np.testing.assert_array_equal(average.value, 1)
    np.testing.assert_array_equal(copy.value, 0)
    assert average.sync(None) is average


def test_updated_is_as_update_and_leaves_the_average_alone():
    average = WeightedMovingAverage.zeros_array((2,), jnp.float64)
    average.update(jnp.ones(2), 1.0, 1.0)
    leaves = jax.tree.leaves(average)
    for value in (jnp.array([1.0, 3.0]), jnp.array([1.0, jnp.nan])):
        new = average.updated(value, 0.5, 0.25)
        assert all(x is y for x, y in zip(leaves, jax.tree.leaves(average), strict=True))
        expected = average.copy().update(value, 0.5, 0.25)
        jax.tree.map(np.testing.assert_array_equal, new, expected)


def test_it_is_a_pytree_that_a_scan_can_carry():
    average = WeightedMovingAverage.zeros_array((2,), jnp.float64)
    step = lambda average, x: (average.update(x, 0.5, 1.0), None)
    carried, _ = jax.jit(lambda a, xs: jax.lax.scan(step, a, xs))(
        average, jnp.arange(6.0).reshape(3, 2)
    )
    np.testing.assert_allclose(carried.value, np.array([1 + 4, 0.25 + 1.5 + 5]) / 1.75)
    assert len(jax.tree.leaves(average)) == 3


def test_averages_are_over_all_devices():
    values = jnp.array([[1.0, 2.0], [3.0, jnp.nan]])

    def local(value):
        average = WeightedMovingAverage.zeros_array((2,), value.dtype)
        average.update(jnp.ones_like(value), 1.0, 1.0)
        return average.update(value, 1.0, 1.0).sync("devices")

    synced = jax.vmap(local, axis_name="devices")(values)
    # The second device refused its value and has the ones only.
    np.testing.assert_allclose(synced.weight, [1.5, 1.5])
    np.testing.assert_allclose(synced.raw_value, [[1.5, 2.0]] * 2)
    np.testing.assert_array_equal(synced.refused, [1, 1])


@pytest.mark.parametrize("value", [jnp.ones(3), (jnp.ones(2),), jnp.ones((1, 2))])
def test_another_kind_of_value_is_an_error(value):
    with pytest.raises(ValueError, match=r"curvax\.WeightedMovingAverage: the average is one of"):
        WeightedMovingAverage.zeros_array((2,)).update(value, 1.0, 1.0)
