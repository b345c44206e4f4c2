"""Estimates on two devices, with the batch split between them: run by `test_devices.py`."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import curvax

jax.config.update("jax_enable_x64", True)
DRAWN = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(DRAWN.standard_normal((3, 4))),
    "b": jnp.asarray(DRAWN.standard_normal(4)),
    "v": jnp.asarray(DRAWN.standard_normal((4, 2))),
    "scale": jnp.asarray(DRAWN.standard_normal(2)),
}
X = jnp.asarray(DRAWN.standard_normal((6, 3)))


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    curvax.register_categorical_predictive_distribution(hidden @ params["v"] * params["scale"])


def precondition(estimator, state, mode, axis_name, params, x):
    """The inverse of an estimate, times a vector, and the estimate."""
    new = (0.0, 1.0, len(x), jax.random.key(1), (params, x), axis_name, mode)
    state = estimator.update_curvature_matrix_estimate(state, *new)
    state = estimator.update_cache(state, 0.1, -0.5, -1, True, axis_name)
    vector = jax.tree.map(jnp.ones_like, params)
    products = [
        estimator.multiply_inverse(state, vector, 0.1, False, True, axis_name),
        estimator.multiply_matpower(state, vector, 0.1, -0.5, True, True, axis_name),
    ]
    return state, products


def tied(params, x):
    """Weights that are used both ways round."""
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    curvax.register_categorical_predictive_distribution(hidden @ params["w"].T)
    curvax.register_categorical_predictive_distribution(hidden @ params["v"] * params["scale"])


def check(mode, check_vma, distributed, fun=loss, **options):
    options |= {"distributed_multiplies": distributed, "distributed_cache_updates": distributed}
    estimator = curvax.BlockDiagonalCurvature(fun, **options)
    state = jax.jit(lambda: estimator.init(jax.random.key(0), (PARAMS, X), -0.5, -1, True))()
    run = functools.partial(precondition, estimator, state, mode)
    expected = jax.jit(functools.partial(run, None))(PARAMS, X)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    split = jax.shard_map(
        functools.partial(run, "d"),
        mesh=mesh,
        in_specs=(P(), P("d")),
        out_specs=P(),
        check_vma=check_vma,
    )
    found = jax.jit(split)(PARAMS, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-8, 1e-10)


def check_own_keys(check_vma):
    """With a key for each device, too, squares of sums over all examples are right on average."""

    def generic(params, x):
        curvax.register_normal_predictive_distribution(x * jnp.exp(params), variance=1.0)

    params, x = jnp.zeros(1), jnp.ones((6, 1))
    estimator = curvax.BlockDiagonalCurvature(generic)
    state = jax.jit(lambda: estimator.init(jax.random.key(0), (params, x), None, None))()

    def update(params, x, key):
        new = (0.0, 1.0, 3, key[0], (params, x), "d", "fisher_curvature_prop")
        found = estimator.update_curvature_matrix_estimate(state, *new)
        return found.blocks_states[0].diagonal_factors[0].value

    mesh = Mesh(np.array(jax.devices()), ("d",))
    split = jax.shard_map(
        update, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=check_vma
    )
    draw = lambda key: split(params, x, jax.random.split(key, 2))
    values = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(5), 4000))
    assert abs(jnp.mean(values) - 1) < 0.1, jnp.mean(values)


def check_whole(mode, check_vma):
    """The whole matrix, from gradients of single examples."""
    estimator = curvax.ExplicitExactCurvature(loss, default_estimation_mode=mode)
    state = jax.jit(lambda: estimator.init(jax.random.key(0), (PARAMS, X), None, None))()

    def update(axis_name, params, x):
        new = (0.0, 1.0, len(x), jax.random.key(1), (params, x), axis_name)
        return estimator.update_curvature_matrix_estimate(state, *new).blocks_states[0].matrix.value

    mesh = Mesh(np.array(jax.devices()), ("d",))
    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
    split = jax.shard_map(functools.partial(update, "d"), mesh=mesh, **specs)
    expected = jax.jit(functools.partial(update, None))(PARAMS, X)
    np.testing.assert_allclose(jax.jit(split)(PARAMS, X), expected, 1e-8, 1e-10)


for check_vma in (False, True):
    check_own_keys(check_vma)
    check_whole("fisher_exact", check_vma)
    check_whole("fisher_gradients", check_vma)
    check("fisher_exact", check_vma, distributed=True)
    # One key for all: what is drawn belongs to an example of the whole batch.
    check("fisher_gradients", check_vma, distributed=True)
    check("ggn_curvature_prop", check_vma, distributed=True, register_only_generic=True)
    check("fisher_exact", check_vma, distributed=False, fun=tied)
check("ggn_exact", check_vma=False, distributed=False)
sys.stdout.write("estimates agree\n")
