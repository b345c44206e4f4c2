"""A state that is split among devices, compared with a whole one. Run by `test_split.py`."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import curvax
from curvax.curvature.state_sharding import ShardedCurvature, state_specs, whole_state

jax.config.update("jax_enable_x64", True)
DRAWN = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(DRAWN.standard_normal(shape))
# Four layers of one shape, of which three are a stack; one of its own; heads; and a scale.
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


def loss(params, x):
    layer = lambda x, own: (jnp.tanh(x @ own["w"] + own["b"]), None)
    x, _ = layer(x, params["first"])
    x, _ = lax.scan(layer, x, params["stack"])
    x = jnp.einsum("nhi,hio->nho", x.reshape(-1, 2, 2), params["heads"]).reshape(-1, 6)
    mean = jnp.tanh(x) @ params["last"] * params["scale"]
    curvax.register_normal_predictive_distribution(mean, jnp.zeros_like(mean))


def run(estimator, axis, mode, state, params, x):
    """Two updates and one more, with an example that is not finite; and what is made of them."""
    keys = jax.random.split(jax.random.key(1))
    update = lambda state, x, key, old: estimator.update_curvature_matrix_estimate(
        state, old, 1.0, len(x), key, (params, x), axis, mode
    )
    state = update(state, x, keys[0], 0.0)
    state = update(state, 2 * x, keys[1], 0.5)
    state = update(state, jnp.where(x == X[-1], jnp.nan, x), keys[1], 0.5)
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


def of_kind(kind, **options):
    estimator = kind(loss, default_estimation_mode="fisher_exact", **options)
    state = estimator.init(jax.random.key(0), (PARAMS, X), -1, (-1, -0.5))
    return estimator, state


def on_devices(count, estimator, state, specs, mode):
    mesh = Mesh(np.array(jax.devices()[:count]), ("d",))
    mapped = jax.shard_map(
        functools.partial(run, estimator, "d", mode),
        mesh=mesh,
        in_specs=(specs, P(), P("d")),
        out_specs=(specs, P()),
        check_vma=False,
    )
    return jax.jit(mapped).lower(state, PARAMS, X).compile()


def agree(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-8, 1e-10)


def check(count, mode):
    whole, initial = of_kind(curvax.BlockDiagonalCurvature)
    split, split_state = of_kind(ShardedCurvature, num_devices=count)
    assert sorted(len(shard.blocks) for shard in split.shards) == [1, 1, 2]
    assert {type(split.blocks[k]) for k in split._replicated} == {curvax.ScaleAndShiftDiagonal}
    specs = state_specs(split_state, "d")
    program = on_devices(count, split, split_state, specs, mode)
    state, products = program(split_state, PARAMS, X)
    once = jax.jit(functools.partial(run, whole, None, mode))
    expected_state, expected = once(initial, PARAMS, X)
    agree(products, expected)
    eigen_apart = lambda state: [
        (own.cache.get("-1"), {k: x for k, x in vars(own).items() if k != "cache"})
        for own in state.blocks_states
    ]
    agree(eigen_apart(whole_state(split, state)), eigen_apart(expected_state))
    agree(split.to_dense_matrix(state), whole.to_dense_matrix(expected_state))
    agree(
        [jnp.sort(x) for x in split.block_eigenvalues(state, False)],
        [jnp.sort(x) for x in whole.block_eigenvalues(expected_state, False)],
    )
    if count == 3:  # All rows in one place are as good.
        alone, _ = jax.jit(functools.partial(run, split, None, mode))(split_state, PARAMS, X)
        agree(eigen_apart(whole_state(split, alone)), eigen_apart(expected_state))
    if count == 8:
        rows = [shard.num_rows for shard in split.shards]
        assert rows == [8, 8, 8], rows
        factors = jax.tree.leaves([own.factors for own in state.shards])
        assert all(x.addressable_shards[0].data.shape[0] == 1 for x in factors)


if __name__ == "__main__":
    for number in map(int, sys.argv[2:]):
        check(number, sys.argv[1])
    print("programs agree")  # noqa: T201
