"""An estimate within a memory budget: the bound holds, and the result is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvature.cases import normal

pytestmark = pytest.mark.optimised

BATCH = 96
PARAMS = {"kernel": normal(0, 3, 3, 3, 8) / 5, "w": normal(1, 8, 4) / 3}
X = normal(2, BATCH, 12, 12, 3)
ARGS = (PARAMS, X)


def loss(params, x):
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=layout)
    x = jnp.tanh(x)
    curvax.register_categorical_predictive_distribution(x.mean((1, 2)) @ params["w"])


def updated(**options):
    """A function for the state after an update, and the state before."""
    estimator = curvax.BlockDiagonalCurvature(loss, **options)
    state = estimator.init(jax.random.key(0), ARGS, None, None)

    def update(state, params, x):
        new = (0.0, 1.0, BATCH, jax.random.key(1), (params, x), None)
        return estimator.update_curvature_matrix_estimate(state, *new)

    return update, state


def test_the_memory_of_a_convolutional_network_is_within_the_budget():
    whole, state = updated()
    at_once = curvax.memory_usage(whole, state, *ARGS).temp_bytes
    budget = at_once // 3
    within, _ = updated(memory_budget=budget)
    with curvax.recorded_plans() as plans:
        found = within(state, *ARGS)
    assert plans[0].usage.added_bytes <= budget
    assert 1 < plans[0].batch_size < BATCH
    assert curvax.memory_usage(within, state, *ARGS).temp_bytes <= 1.05 * budget
    expected = jax.jit(whole)(state, *ARGS)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-8, 1e-10)
