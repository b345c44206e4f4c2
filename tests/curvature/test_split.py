"""A state that is split among devices is the whole one, and each device has its share of work.

JAX fixes its number of devices when it starts, so `split_programs.py` runs in a process of its own,
which has eight.
"""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import curvax
from curvax.curvature.state_sharding import ShardedCurvature
from helpers import assert_same, run_on_devices

PROGRAMS = Path(__file__).with_name("split_programs.py")


@pytest.mark.parametrize(
    ("mode", "counts"),
    [
        ("fisher_gradients", ["2"]),
        pytest.param("fisher_exact", ["1", "2", "3", "8"], marks=pytest.mark.slow),
        pytest.param("fisher_empirical", ["2", "8"], marks=pytest.mark.slow),
    ],
)
def test_a_split_state_is_the_whole_one(mode, counts):
    """Estimates, powers and products, with stacks and heads; a batch is refused."""
    assert "programs agree" in run_on_devices(PROGRAMS, 8, mode, *counts)


def estimator_of(widths, count):
    """Curvature of a network with dense layers of these widths, shared out among devices."""

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        curvax.register_squared_error_loss(x, jnp.zeros_like(x))

    params = [jnp.ones(pair) for pair in itertools.pairwise(widths)]
    estimator = ShardedCurvature(loss, num_devices=count)
    estimator.finalize((params, jnp.ones((2, widths[0]))))
    return estimator


@given(widths=st.lists(st.sampled_from([2, 3, 5]), min_size=2, max_size=9), count=st.integers(1, 5))
def test_every_pair_of_factors_is_on_one_device(widths, count):
    shards = estimator_of(widths, count).shards
    assert sorted(n for shard in shards for n in shard.block_indices) == list(
        range(len(widths) - 1)
    )
    for shard in shards:
        units = sum(shard.lengths)
        assert sorted(unit for own in shard.units_of_device for unit in own) == list(range(units))
        assert max(map(len, shard.units_of_device)) <= shard.rows == -(-units // count)
        values = jnp.arange(1.0, units + 1)
        rows = shard.to_rows(values)
        assert rows.shape == (shard.num_rows,)
        np.testing.assert_array_equal(shard.from_rows(rows), values)
        assert float(rows.sum()) == float(values.sum())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_no_device_has_much_more_work_than_is_necessary(count):
    """At most 4/3 of the larger of the mean and the most that a single pair takes."""
    shards = estimator_of([9, 16, 16, 16, 8, 8, 16, 16, 3, 8, 8, 16], count).shards
    loads, largest = np.zeros(count), 0.0
    for shard in shards:
        work = sum(side.work for side in shard.sides)
        loads += [work * len(own) for own in shard.units_of_device]
        largest = max(largest, work)
    assert loads.max() <= 4 / 3 * max(loads.mean(), largest)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_units_are_summed_where_their_row_is_and_sent_to_all(count):
    """By rows, or all units at once where most rows have none; here on devices of a `vmap`."""
    shards = estimator_of([4, 4, 4, 4, 3], count).shards
    assert [shard.is_sparse for shard in shards] == [count == 8, count > 2]
    for shard in shards:
        shape = (count, sum(shard.lengths), 2)
        units = jnp.asarray(np.random.default_rng(0).standard_normal(shape))
        rows = jax.vmap(lambda x, s=shard: s.local_rows_of_sum(x, "d"), axis_name="d")(units)
        expected = shard.to_rows(units.sum(0))
        np.testing.assert_allclose(rows.reshape(expected.shape), expected, 1e-12)
        found = jax.vmap(lambda x, s=shard: s.gathered_units(x, "d"), axis_name="d")(rows)
        np.testing.assert_allclose(found, jnp.broadcast_to(units.sum(0), shape), 1e-12)


class OwnUpdate(curvax.DenseTwoKroneckerFactored):
    def update_curvature_matrix_estimate(self, state, *args):
        return state


def test_blocks_with_an_update_of_their_own_are_refused():
    def loss(w, x):
        curvax.register_squared_error_loss(x @ w, jnp.zeros((2, 3)))

    ctors = {"dense": OwnUpdate}
    estimator = ShardedCurvature(loss, num_devices=2, layer_tag_to_block_ctor=ctors)
    with pytest.raises(ValueError, match="a sharded state requires blocks of curvax"):
        estimator.finalize((jnp.ones((4, 3)), jnp.ones((2, 4))))


def test_eigenvalues_are_not_cached():
    estimator = estimator_of([2, 3], 2)
    args = ([jnp.ones((2, 3))], jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="no eigenvalues in its cache"):
        estimator.init(jax.random.key(0), args, None, -1, True)
    state = estimator.init(jax.random.key(0), args, None, -1)
    with pytest.raises(ValueError, match="use_cached=False"):
        estimator.update_cache(state, 0.1, None, -1, True, None)


def test_entries_that_were_not_announced_are_made():
    """For all blocks of a shape, also if only some of them are asked for."""
    estimator, args = estimator_of([3, 3, 3], 2), ([jnp.eye(3), jnp.ones((3, 3))], jnp.ones((2, 3)))
    key, vector = jax.random.key(0), [jnp.ones((3, 3)), jnp.eye(3)]
    bare, told = (estimator.init(key, args, powers, powers) for powers in (None, -1))
    inverse = lambda state, exact, use_cached: estimator.multiply_inverse(
        state, vector, 0.1, exact, use_cached, None
    )
    with pytest.raises(ValueError, match=r"'-1' is not in the cache.* Call update_cache"):
        inverse(bare, False, True)
    first = estimator.multiply(bare, vector, 0.1, True, True, None)
    assert_same(first, estimator.multiply(bare, vector, 0.1, True, False, None), 0, 0)

    def updated(state, blocks):
        update = (0.0, 1.0, 2, key, args, None, "fisher_exact")
        state = estimator.update_curvature_matrix_estimate(state, *update)
        return estimator.update_cache(state, 0.1, -1, -1, False, None, blocks=blocks)

    found = updated(bare, [0])
    assert_same(found, updated(told, None), 0, 0)
    for exact in (True, False):
        assert_same(inverse(found, exact, True), inverse(found, exact, False), 1e-9, 1e-9)
