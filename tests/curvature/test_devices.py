"""Estimates on two devices, each with half of the batch, are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import curvax
from helpers import assert_same, mesh_of, random_like

SHAPES = {"w": (3, 4), "b": (4,), "v": (4, 2), "scale": (2,)}
PARAMS = random_like({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
X = random_like(jnp.zeros((6, 3)), 1)

each_check = pytest.mark.parametrize("check_vma", [False, True], ids="check_vma={}".format)


def hidden(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def loss(params, x):
    logits = hidden(params, x) @ params["v"] * params["scale"][None]
    curvax.register_categorical_predictive_distribution(logits)


def tied(params, x):
    """Weights that are used both as they are and transposed."""
    curvax.register_categorical_predictive_distribution(hidden(params, x) @ params["w"].T)
    loss(params, x)


def over_two_devices(fun, check_vma, *in_specs):
    specs = {"in_specs": in_specs or (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(fun, mesh=mesh_of(2), check_vma=check_vma, **specs))


def estimate_and_products(estimator, state, mode, axis_name, params, x):
    """The state after an update, and products with powers of it."""
    new = (0.0, 1.0, len(x), jax.random.key(1), (params, x), axis_name, mode)
    state = estimator.update_curvature_matrix_estimate(state, *new)
    state = estimator.update_cache(state, 0.1, -0.5, -1, True, axis_name)
    vector = jax.tree.map(jnp.ones_like, params)
    products = [
        estimator.multiply_inverse(state, vector, 0.1, False, True, axis_name),
        estimator.multiply_matpower(state, vector, 0.1, -0.5, True, True, axis_name),
    ]
    return state, products


def assert_estimates_agree(mode, check_vma, distributed, fun=loss, **options):
    options |= {"distributed_multiplies": distributed, "distributed_cache_updates": distributed}
    estimator = curvax.BlockDiagonalCurvature(fun, **options)
    state = jax.jit(lambda: estimator.init(jax.random.key(0), (PARAMS, X), -0.5, -1, True))()
    run = functools.partial(estimate_and_products, estimator, state, mode)
    expected = jax.jit(functools.partial(run, None))(PARAMS, X)
    found = over_two_devices(functools.partial(run, "data"), check_vma)(PARAMS, X)
    assert_same(found, expected, 1e-8, 1e-10)


@each_check
@pytest.mark.parametrize("mode", ["fisher_exact", "fisher_gradients"])
def test_blocks_and_products_are_those_of_one_device(mode, check_vma):
    """Devices with one key sample what one device samples: the sample belongs to the example."""
    assert_estimates_agree(mode, check_vma, distributed=True)


@each_check
def test_generic_blocks_are_those_of_one_device(check_vma):
    mode = "ggn_curvature_prop"
    assert_estimates_agree(mode, check_vma, distributed=True, register_only_generic=True)


@each_check
def test_blocks_of_tied_weights_are_those_of_one_device(check_vma):
    assert_estimates_agree("fisher_exact", check_vma, distributed=False, fun=tied)


def test_each_device_may_compute_everything():
    assert_estimates_agree("ggn_exact", check_vma=False, distributed=False)


@each_check
def test_a_key_for_each_device_is_right_on_average(check_vma):
    """For squares of sums over all examples, too."""

    def generic(params, x):
        mean = x * jnp.exp(params)[None]
        curvax.register_normal_predictive_distribution(mean, variance=1.0)

    params, x = jnp.zeros(1), jnp.ones((6, 1))
    estimator = curvax.BlockDiagonalCurvature(generic)
    state = jax.jit(lambda: estimator.init(jax.random.key(0), (params, x), None, None))()

    def update(params, x, key):
        new = (0.0, 1.0, 3, key[0], (params, x), "data", "fisher_curvature_prop")
        found = estimator.update_curvature_matrix_estimate(state, *new)
        return found.blocks_states[0].diagonal_factors[0].value

    sharded = over_two_devices(update, check_vma, P(), P("data"), P("data"))
    sample = lambda key: sharded(params, x, jax.random.split(key, 2))
    values = jax.jit(jax.vmap(sample))(jax.random.split(jax.random.key(5), 4000))
    assert abs(np.mean(values) - 1) < 0.1


@each_check
@pytest.mark.parametrize("mode", ["fisher_exact", "fisher_gradients"])
def test_the_explicit_matrix_is_that_of_one_device(mode, check_vma):
    """Computed from gradients of single examples."""
    estimator = curvax.ExplicitExactCurvature(loss, default_estimation_mode=mode)
    state = jax.jit(lambda: estimator.init(jax.random.key(0), (PARAMS, X), None, None))()

    def update(axis_name, params, x):
        new = (0.0, 1.0, len(x), jax.random.key(1), (params, x), axis_name)
        return estimator.update_curvature_matrix_estimate(state, *new).blocks_states[0].matrix.value

    expected = jax.jit(functools.partial(update, None))(PARAMS, X)
    found = over_two_devices(functools.partial(update, "data"), check_vma)(PARAMS, X)
    assert_same(found, expected, 1e-8, 1e-10)
