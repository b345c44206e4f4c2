"""A sharded state is the replicated one, and no device has much more work than necessary."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import curvax
from curvax.curvature.state_sharding import ShardedCurvature, state_specs, whole_state
from helpers import assert_same, mesh_of

GENERATOR = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(GENERATOR.standard_normal(shape))
# Four layers of one shape, of which three are a stack; one of another shape; heads; and a scale.
PARAMS = {
    "first": {"w": normal(4, 4), "b": normal(4)},
    "stack": {"w": normal(3, 4, 4) / 2, "b": normal(3, 4)},
    "heads": normal(2, 2, 3),
    "last": normal(6, 2),
    "scale": normal(2),
}
X = normal(24, 4)
WEIGHTS = [0.1, 0.2, 0.3, 0.4, 0.5]
VECTOR = jax.tree.map(lambda x: normal(*x.shape), PARAMS)


def deep(params, x):
    layer = lambda x, own: (jnp.tanh(x @ own["w"] + own["b"][None]), None)
    x, _ = layer(x, params["first"])
    x, _ = lax.scan(layer, x, params["stack"])
    x = jnp.einsum("nhi,hio->nho", x.reshape(-1, 2, 2), params["heads"]).reshape(-1, 6)
    mean = jnp.tanh(x) @ params["last"] * params["scale"][None]
    curvax.register_normal_predictive_distribution(mean, jnp.zeros_like(mean))


def updates_and_products(estimator, axis, mode, state, params, x):
    """Two updates, one more with an example that is not finite, and products with powers."""
    keys = jax.random.split(jax.random.key(1))
    update = lambda state, x, key, old: estimator.update_curvature_matrix_estimate(
        state, old, 1.0, len(x), key, (params, x), axis, mode
    )
    state = update(state, x, keys[0], 0.0)
    state = update(state, 2 * x, keys[1], 0.5)
    state = update(state, jnp.where(x == X[-1][None], jnp.nan, x), keys[1], 0.5)
    products = []
    for exact, approx in ((None, (-1, -0.5)), (-1, None)):
        state = estimator.update_cache(state, WEIGHTS, exact, approx, False, axis)
        # Of some blocks only, with another damping.
        state = estimator.update_cache(state, 1.0, exact, approx, False, axis, blocks=[0, 2])
        for power in (-1,) if exact else (-1, -0.5):
            how = (power, exact is not None, True, axis)
            products.append(estimator.multiply_matpower(state, VECTOR, WEIGHTS, *how))
    for power, is_exact in ((1, True), (-1, True), (-1, False)):
        how = (power, is_exact, False, axis)
        products.append(estimator.multiply_matpower(state, VECTOR, WEIGHTS, *how))
    return state, products


def initialised(kind, **options):
    estimator = kind(deep, default_estimation_mode="fisher_exact", **options)
    return estimator, estimator.init(jax.random.key(0), (PARAMS, X), -1, (-1, -0.5))


same = functools.partial(assert_same, rtol=1e-8, atol=1e-10)


def apart_from_eigenvectors(state):
    """Those of equal eigenvalues may differ."""
    return [
        (own.cache.get("-1"), {k: x for k, x in vars(own).items() if k != "cache"})
        for own in state.blocks_states
    ]


@functools.cache
def on_one_device(mode):
    """The estimator with a replicated state, its state after the updates, and products."""
    replicated, initial = initialised(curvax.BlockDiagonalCurvature)
    run = jax.jit(functools.partial(updates_and_products, replicated, None, mode))
    return replicated, *run(initial, PARAMS, X)


@pytest.fixture(
    scope="module",
    params=[
        ("fisher_gradients", 2),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in [
                *(("fisher_exact", count) for count in (1, 2, 3, 8)),
                *(("fisher_empirical", count) for count in (2, 8)),
            ]
        ),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def sharded(request):
    """A mode, an estimator with a sharded state, the first state, and what a mesh makes of it."""
    mode, count = request.param
    estimator, initial = initialised(ShardedCurvature, num_devices=count)
    specs = state_specs(initial, "data")
    mapped = jax.shard_map(
        functools.partial(updates_and_products, estimator, "data", mode),
        mesh=mesh_of(count),
        in_specs=(specs, P(), P("data")),
        out_specs=(specs, P()),
        check_vma=False,
    )
    return mode, estimator, initial, *jax.jit(mapped)(initial, PARAMS, X)


class TestShardedState:
    """With stacks and heads, after an update that is refused."""

    def test_blocks_of_one_shape_share_a_shard_and_the_rest_is_replicated(self, sharded):
        _, estimator, _, state, _ = sharded
        assert sorted(len(shard.blocks) for shard in estimator.shards) == [1, 1, 2]
        sharded_blocks = [id(block) for shard in estimator.shards for block in shard.blocks]
        others = [block for block in estimator.blocks if id(block) not in sharded_blocks]
        assert [type(block) for block in others] == [curvax.ScaleAndShiftDiagonal]
        count = estimator.num_devices
        factors = jax.tree.leaves([own.factors for own in state.shards])
        assert factors
        for x in factors:
            assert x.addressable_shards[0].data.shape[0] * count == x.shape[0]
        if count == 8:
            assert [shard.num_rows for shard in estimator.shards] == [8, 8, 8]

    def test_products_are_those_of_one_device(self, sharded):
        mode, *_, products = sharded
        same(products, on_one_device(mode)[2])

    def test_the_gathered_state_is_that_of_one_device(self, sharded):
        mode, estimator, _, state, _ = sharded
        expected = apart_from_eigenvectors(on_one_device(mode)[1])
        same(apart_from_eigenvectors(whole_state(estimator, state)), expected)

    def test_the_dense_matrix_is_that_of_one_device(self, sharded):
        mode, estimator, _, state, _ = sharded
        replicated, expected, _ = on_one_device(mode)
        same(estimator.to_dense_matrix(state), replicated.to_dense_matrix(expected))

    def test_eigenvalues_are_those_of_one_device(self, sharded):
        mode, estimator, _, state, _ = sharded
        replicated, expected, _ = on_one_device(mode)
        same(
            [jnp.sort(x) for x in estimator.block_eigenvalues(state, False)],
            [jnp.sort(x) for x in replicated.block_eigenvalues(expected, False)],
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("sharded", [("fisher_exact", 3)], indirect=True, ids=str)
    def test_one_device_may_hold_all_rows(self, sharded):
        mode, estimator, initial, _, _ = sharded
        run = jax.jit(functools.partial(updates_and_products, estimator, None, mode))
        alone, _ = run(initial, PARAMS, X)
        expected = apart_from_eigenvectors(on_one_device(mode)[1])
        same(apart_from_eigenvectors(whole_state(estimator, alone)), expected)


def estimator_of(widths, count):
    """Curvature of a network with dense layers of these widths, sharded over devices."""

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
def test_units_are_summed_on_the_device_of_their_row_and_gathered(count):
    """By rows, or all units at once where most rows are padding; over the axis of a `vmap`."""
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


def test_blocks_with_an_update_of_their_own_are_rejected():
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
