"""On a quadratic function one step reaches the minimum; coefficients are those of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.flatten_util import ravel_pytree

import curvax
from curvax.optimizer.quadratic_model import QuadraticModel
from helpers import assert_same, key, random_like
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_batch, make_params, train


def linear_loss(params, batch):
    x, y = batch
    output = curvax.register_squared_error_loss(x @ params["w"] + params["b"][None], y)
    return jnp.mean(jnp.sum((output - y) ** 2, axis=1))


def least_squares(x, y):
    ones = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return np.linalg.lstsq(ones, y, rcond=None)[0]


@pytest.mark.parametrize("mode", ["ggn_exact", "fisher_exact"])
@pytest.mark.parametrize("exact_inverses", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
def test_one_step_reaches_the_minimum_of_least_squares(mode, exact_inverses, adaptive):
    x, y = make_batch(size=20)
    rules = {k: v for k, v in ADAPTIVE.items() if "damping" not in k} if adaptive else {}
    values = {} if adaptive else {"learning_rate": 1.0, "momentum": 0.0}
    optimizer = curvax.Optimizer(
        jax.value_and_grad(linear_loss),
        0.0,
        num_burnin_steps=0,
        estimation_mode=mode,
        use_exact_inverses=exact_inverses,
        **rules,
    )
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    state = optimizer.init(params, key(0), (x, y))
    params, _, stats = optimizer.step(params, state, key(1), batch=(x, y), damping=1e-13, **values)
    best = least_squares(np.asarray(x), np.asarray(y))
    np.testing.assert_allclose(params["w"], best[:-1], 1e-5, 1e-6)
    np.testing.assert_allclose(params["b"], best[-1], 1e-5, 1e-6)
    np.testing.assert_allclose(stats["learning_rate"], 1.0, 1e-5)


numbers = st.floats(-1, 1, allow_subnormal=False)


@given(
    st.lists(numbers, min_size=6, max_size=6),
    st.lists(numbers, min_size=2, max_size=2),
    st.floats(1e-3, 10.0),
    st.tuples(st.sampled_from([None, -0.5]), st.sampled_from([None, 0.9])),
)
def test_coefficients_are_the_closed_form_minimiser(entries, slope, damping, fixed):
    root = np.reshape(entries, (3, 2))
    vectors = np.array([[1.0, 0.2], [0.3, 1.0], [0.5, -0.4]])
    matrix, identity, b = root.T @ root, vectors.T @ vectors, np.array(slope)
    model = QuadraticModel(*map(jnp.asarray, (matrix, identity, b)))
    found = model.minimiser(damping, fixed)
    whole = matrix + damping * identity
    free = [k for k in range(2) if fixed[k] is None]
    expected = np.array([0.0 if c is None else c for c in fixed])
    if free:
        rest = (b + whole @ expected)[free]
        expected[free] = np.linalg.solve(whole[np.ix_(free, free)], -rest)
    np.testing.assert_allclose(found, expected, 1e-9, 1e-12)
    change = expected @ whole @ expected / 2 + b @ expected
    np.testing.assert_allclose(model.change(found, damping), change, 1e-9, 1e-12)


def test_vectors_that_tell_nothing_get_nothing():
    one = jnp.asarray(1.0)
    zero_second = QuadraticModel(
        *map(jnp.asarray, ([[2.0, 0], [0, 0]], [[1.0, 0], [0, 0]], [3.0, 0]))
    )
    np.testing.assert_allclose(zero_second.minimiser(0.0, (None, None)), [-1.5, 0])
    alike = QuadraticModel(2 * jnp.ones((2, 2)), jnp.ones((2, 2)), 3 * jnp.ones(2))
    np.testing.assert_allclose(alike.minimiser(0.0, (None, None)), [-1.5, 0])
    nothing = QuadraticModel(jnp.zeros((2, 2)), jnp.zeros((2, 2)), jnp.zeros(2))
    np.testing.assert_allclose(nothing.minimiser(one, (None, None)), [0, 0])


@pytest.fixture(scope="module")
def trained():
    optimizer = make(l2_reg=0.1, donate_buffers=False)
    params, state, _ = train(optimizer, 3, **VALUES)
    return optimizer, params, state


def vectors_and_gradient(params):
    batch = make_batch()
    return [random_like(params, 1), random_like(params, 2)], jax.grad(loss)(params, batch), batch


def test_the_exact_quadratic_model_is_that_of_the_dense_matrix(trained):
    optimizer, params, _ = trained
    vectors, gradient, batch = vectors_and_gradient(params)
    flat = jnp.stack([ravel_pytree(v)[0] for v in vectors], axis=1)
    estimator = curvax.ExplicitExactCurvature(loss, default_estimation_mode="ggn_exact")
    state = estimator.init(key(0), (params, batch), None, None)
    state = estimator.update_curvature_matrix_estimate(
        state, 0.0, 1.0, 12, key(0), (params, batch), None
    )
    curvature = estimator.to_dense_matrix(state)
    found = optimizer.compute_exact_quad_model(vectors, gradient, (params, batch))
    expected = flat.T @ curvature @ flat + 0.1 * flat.T @ flat, flat.T @ flat
    assert_same(found, QuadraticModel(*expected, flat.T @ ravel_pytree(gradient)[0]), 1e-9)
    assert_same(optimizer.compute_l2_quad_matrix(vectors), 0.1 * flat.T @ flat)


def test_the_approximate_quadratic_model_is_that_of_the_estimate(trained):
    optimizer, params, state = trained
    vectors, gradient, _ = vectors_and_gradient(params)
    flat = jnp.stack([ravel_pytree(v)[0] for v in vectors], axis=1)
    curvature = optimizer.estimator.to_dense_matrix(state.estimator_state)
    found = optimizer.compute_approx_quad_model(state, vectors, gradient)
    expected = flat.T @ curvature @ flat + 0.1 * flat.T @ flat, flat.T @ flat
    assert_same(found, QuadraticModel(*expected, flat.T @ ravel_pytree(gradient)[0]), 1e-9)


def test_the_exact_model_needs_the_arguments_of_the_function(trained):
    optimizer, params, _ = trained
    vectors, gradient, _ = vectors_and_gradient(params)
    with pytest.raises(ValueError, match="needs func_args"):
        optimizer.compute_exact_quad_model(vectors, gradient)


def test_excluded_parameters_are_not_regularised():
    optimizer = make(l2_reg=0.1, regularized_parameters_path_exclusions=[r"\['b'\]$"])
    ones = jax.tree.map(jnp.ones_like, make_params())
    assert_same(optimizer.compute_l2_quad_matrix([ones]), jnp.array([[0.1 * (18 + 12)]]))
    whole = make(l2_reg=0.1, regularized_parameters_path_exclusions=["out"])
    weights = whole.finalize(make_params(), key(0), make_batch()).preconditioner.weights(0.05)
    assert [float(w) for w in weights] == pytest.approx([0.15, 0.05])
