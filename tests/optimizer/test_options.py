"""Options of the optimizer, each against a naive program or the plain spelling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax

BATCH = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3), jnp.linspace(0.0, 1.0, 16).reshape(8, 2)
PARAMS = {"w": jnp.linspace(-0.5, 0.5, 6).reshape(3, 2), "b": jnp.array([0.1, -0.2])}


def predict(params, x):
    return jnp.tanh(jnp.matmul(x, params["w"]) + params["b"][None])


def loss(params, batch):
    x, y = batch
    prediction = curvax.register_squared_error_loss(predict(params, x), y)
    return jnp.mean(jnp.sum((prediction - y) ** 2, axis=1))


OPTIONS = {"l2_reg": 0.0, "estimation_mode": "fisher_exact", "num_burnin_steps": 0}
GIVEN = {"learning_rate": 0.2, "momentum": 0.5, "damping": 0.1}


def train(steps=3, given=GIVEN, func=loss, **options):
    optimizer = curvax.Optimizer(jax.value_and_grad(func), **(OPTIONS | options))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = optimizer.init(params, jax.random.key(0), BATCH)
    stats = []
    for index in range(steps):
        key = jax.random.key(index)
        params, state, found = optimizer.step(params, state, key, batch=BATCH, **given)
        stats.append(found)
    return params, state, stats


def assert_equal(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), one, other)


def test_precon_damping_mult_multiplies_the_damping_of_the_preconditioner():
    """Without a quadratic model that is all of the damping."""
    multiplied, _, stats = train(precon_damping_mult=3.0)
    expected, _, _ = train(given=GIVEN | {"damping": 0.3})
    assert_equal(multiplied, expected)
    np.testing.assert_allclose(stats[-1]["precon_damping"], 0.3)
    np.testing.assert_allclose(stats[-1]["damping"], 0.1)


def test_precon_damping_schedule_replaces_the_damping_of_the_preconditioner():
    schedule = lambda step: 0.1 / (1 + step.astype(float))
    scheduled, _, _ = train(precon_damping_schedule=schedule)
    given = {name: value for name, value in GIVEN.items() if name != "damping"}
    expected, _, _ = train(given=given, damping_schedule=schedule)
    assert_equal(scheduled, expected)


def test_schedules_may_depend_on_data_seen():
    given = {name: value for name, value in GIVEN.items() if name != "learning_rate"}
    of_data = lambda _, data_seen: 1 / (8 + data_seen.astype(float))
    of_steps = lambda step: 1 / (8 + 8 * step.astype(float))
    seen, _, _ = train(given=given, learning_rate_schedule=of_data)
    steps, _, _ = train(given=given, learning_rate_schedule=of_steps)
    assert_equal(seen, steps)


def test_invalid_metric_value_replaces_nan():
    _, _, stats = train(
        given={"learning_rate": 0.2, "momentum": 0.5},
        use_adaptive_damping=True,
        initial_damping=1.0,
        damping_adaptation_interval=2,
        invalid_metric_value=-1.0,
    )
    first, second, _ = stats
    for name in ("rho", "new_loss", "quad_model_change"):
        assert first[name] == -1
        assert second[name] != -1
        assert jnp.isfinite(second[name])


def test_calibrated_damping_is_kept_by_the_first_step():
    """The rule, applied by hand: a fresh optimizer for each damping, until it keeps it."""
    given = {"learning_rate": 0.2, "momentum": 0.5}
    options = {
        "given": given,
        "steps": 1,
        "num_burnin_steps": 1,
        "use_adaptive_damping": True,
        "damping_adaptation_interval": 1,
        "damping_adaptation_decay": 0.1,
    }
    damping = 4.0
    while True:
        _, state, _ = train(initial_damping=damping, **options)
        if float(state.damping) == damping:
            break
        damping = float(state.damping)
    assert damping != 4.0
    _, _, stats = train(initial_damping=4.0, use_initial_damping_calibration=True, **options)
    np.testing.assert_allclose(stats[0]["damping"], damping)


def test_calibration_needs_an_adaptive_damping_and_burn_in():
    for options in ({}, {"use_adaptive_damping": True, "initial_damping": 1.0}):
        with pytest.raises(ValueError, match="use_initial_damping_calibration=True finds"):
            train(use_initial_damping_calibration=True, **options)


def test_exact_quad_model_matrix_type_is_that_of_another_mode():
    """The Fisher and the Gauss-Newton matrix of a squared error are equal; others may have one."""
    given = {"damping": 0.1}
    adaptive = {"use_adaptive_learning_rate": True, "use_adaptive_momentum": True}
    one, _, _ = train(given=given, exact_quad_model_matrix_type="ggn", **adaptive)
    other, _, _ = train(given=given, **adaptive)
    assert_equal(one, other)
    with pytest.raises(ValueError, match="must be 'fisher', 'ggn'"):
        train(exact_quad_model_matrix_type="hessian")


def test_custom_estimator_is_the_one_that_preconditions():
    class Halving(curvax.BlockDiagonalCurvature):
        def multiply_matpower(self, *args, **kwargs):
            return jax.tree.map(lambda x: x / 2, super().multiply_matpower(*args, **kwargs))

    halved, _, _ = train(custom_estimator_ctor=Halving)
    expected, _, _ = train(given=GIVEN | {"learning_rate": 0.1})
    assert_equal(halved, expected)


def test_without_automatic_registration_the_function_tags_its_layers():
    def tagged(params, batch):
        x, y = batch
        output = jnp.matmul(x, params["w"]) + params["b"][None]
        output = curvax.register_dense(output, x, params["w"], params["b"])
        prediction = curvax.register_squared_error_loss(jnp.tanh(output), y)
        return jnp.mean(jnp.sum((prediction - y) ** 2, axis=1))

    by_hand, _, _ = train(func=tagged, use_automatic_registration=False)
    expected, _, _ = train()
    assert_equal(by_hand, expected)


def test_vmapped_samples_are_those_of_the_loop():
    options = {"estimation_mode": "fisher_gradients", "num_estimator_samples": 3}
    one, _, _ = train(should_vmap_estimator_samples=True, **options)
    other, _, _ = train(**options)
    assert_equal(one, other)


def test_damping_is_scaled_by_the_norm_of_each_block():
    """Of one dense block with exact inverses: the mean of its diagonal."""
    scaled, state, _ = train(
        steps=1, norm_to_scale_identity_weight_per_block="avg_diag", use_exact_inverses=True
    )
    (block,) = state.estimator_state.blocks_states
    factors = block.inputs_factor.value, block.outputs_factor.value
    mean = np.prod([np.mean(np.diagonal(factor)) for factor in factors])
    expected, _, _ = train(steps=1, given=GIVEN | {"damping": 0.1 * mean}, use_exact_inverses=True)
    assert_equal(scaled, expected)
    with pytest.raises(ValueError, match="must be the name of a norm"):
        train(norm_to_scale_identity_weight_per_block="largest")
