"""What is not finite changes nothing; what makes the loss rise is not done; training recovers."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, key
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_batch, make_params, train

SCHEDULES = {
    "learning_rate_schedule": lambda step: 0.2,
    "momentum_schedule": lambda step: 0.5,
    "damping_schedule": lambda step: 0.05,
}
RULES = {"fixed": ({}, VALUES), "scheduled": (SCHEDULES, {}), "adaptive": (ADAPTIVE, {})}


def broken(batch):
    x, y = batch
    return x.at[0, 0].set(jnp.nan), y


def averages(state):
    """All that the estimator knows, but for the number of batches that it refused."""
    blocks = state.estimator_state.blocks_states
    return [(b.inputs_factor.value, b.outputs_factor.value) for b in blocks]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("update_period", [1, 2])
def test_a_batch_that_is_not_finite_changes_neither_parameters_nor_curvature(rule, update_period):
    options, values = RULES[rule]
    optimizer = make(**options, curvature_update_period=update_period, donate_buffers=False)
    params, state, _ = train(optimizer, 4, **values)
    bad = broken(make_batch())
    after, skipped, stats = optimizer.step(params, state, key(9), batch=bad, **values)
    assert_same(after, params)
    assert_same(averages(skipped), averages(state))
    assert_same(skipped.velocities, state.velocities)
    assert int(stats["skipped"]) == int(skipped.skipped) == 1
    assert int(skipped.step_counter) == 5
    assert int(skipped.data_seen) == 60
    assert np.isnan(stats["loss"])
    if rule == "adaptive":
        assert skipped.damping > state.damping
    _, _, history = train(optimizer, 12, after, skipped, first=5, **values)
    dampings = [float(stats["damping"]) for stats in history]
    if rule != "adaptive":  # It has risen, and comes back.
        assert dampings[0] == pytest.approx(0.1)
        assert all(a >= b for a, b in itertools.pairwise(dampings))
        assert dampings[-1] == pytest.approx(0.05)
    assert all(np.isfinite(float(stats["loss"])) for stats in history)
    assert history[-1]["skipped"] == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_first_batch_that_is_not_finite_leaves_nothing_behind(rule):
    """Inverses of an estimate that knows nothing must not be used until their next turn."""
    options, values = RULES[rule]
    optimizer = make(**options, inverse_update_period=10, curvature_update_period=10)
    batches = lambda number: broken(make_batch()) if number == 0 else make_batch()
    params, _, history = train(optimizer, 8, batches=batches, **values)
    assert float(loss(params, make_batch())) < 0.7 * float(history[1]["loss"])


def test_a_gradient_that_is_not_finite_is_noticed_though_the_loss_is():
    def value_and_grad(params, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        gradient["out"]["b"] = gradient["out"]["b"].at[1].set(jnp.inf)
        return value, gradient

    optimizer = make(value_and_grad, value_func_for_estimator=loss, donate_buffers=False)
    params, state, history = train(optimizer, 2, **VALUES)
    assert_same(params, make_params())
    assert int(state.skipped) == 2
    assert np.isfinite(float(history[0]["loss"]))


def test_the_state_of_the_function_is_kept_too():
    def with_state(params, func_state, batch):
        value = loss(params, batch)
        return value, {
            "mean": 0.9 * func_state["mean"] + 0.1 * value,
            "count": func_state["count"] + 1,
        }

    optimizer = make(jax.value_and_grad(with_state, has_aux=True), value_func_has_state=True)
    params, func_state = make_params(), {"mean": jnp.zeros(()), "count": jnp.zeros((), int)}
    state = optimizer.init(params, key(0), make_batch(), func_state)
    for number, batch in enumerate([make_batch(), broken(make_batch()), make_batch()]):
        params, state, func_state, _ = optimizer.step(
            params, state, key(number), batch=batch, func_state=func_state, **VALUES
        )
    assert np.isfinite(float(func_state["mean"]))
    assert int(func_state["count"]) == 2


@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_rejected_that_makes_the_loss_rise_and_a_later_one_is_taken(rule):
    """Steps ten times too long; with a damping that is given, some implementations reject all."""
    options, values = RULES[rule]
    if rule == "fixed":
        values = {**values, "learning_rate": 20.0}
    elif rule == "scheduled":
        options = {**options, "learning_rate_schedule": lambda step: 20.0}
    else:
        options = {k: v for k, v in options.items() if "learning_rate" not in k}
        values = {"learning_rate": 20.0}
    optimizer = make(**options, use_step_rejection=True, inverse_update_period=50)
    start = float(loss(make_params(), make_batch()))
    params, state, history = train(optimizer, 60, batches=lambda _: make_batch(), **values)
    losses = [float(stats["loss"]) for stats in history]
    assert all(a >= b for a, b in itertools.pairwise(losses))
    assert 0 < int(state.rejected) < 60
    assert int(history[-1]["rejected"]) == int(state.rejected)
    assert float(loss(params, make_batch())) < 0.5 * start


def test_a_new_loss_that_is_not_a_number_is_rejected():
    def value_and_grad(params, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return jnp.where(value < 0.6, jnp.nan, value), gradient

    optimizer = make(value_and_grad, value_func_for_estimator=loss, use_step_rejection=True)
    params, state, _ = train(optimizer, 30, batches=lambda _: make_batch(), **VALUES)
    assert int(state.skipped) == 0 < int(state.rejected)
    assert float(loss(params, make_batch())) >= 0.6


def test_damping_that_is_given_does_not_rise_without_end():
    optimizer = make()
    _, state, _ = train(optimizer, 40, batches=lambda _: broken(make_batch()), **VALUES)
    assert float(state.damping_factor) == 1e4
    optimizer = make(**ADAPTIVE)
    _, state, _ = train(optimizer, 40, batches=lambda _: broken(make_batch()))
    assert float(state.damping) == pytest.approx(0.5e4)


def soak(num_steps, **options):
    """Random batches, of which one in ten is not finite, in one way or another."""
    random = np.random.default_rng(0)
    optimizer = make(estimation_mode="fisher_gradients", stagger_inverses=True, **options)
    worst = [jnp.nan, jnp.inf, -jnp.inf, 1e200]

    def batches(number):
        x, y = make_batch(number % 7)
        if random.random() > 0.1:
            return x, y
        value = worst[random.integers(4)]
        return (x.at[0].set(value), y) if random.random() > 0.5 else (x, y.at[1].set(value))

    start = float(loss(make_params(), make_batch()))
    params, state, _ = train(optimizer, num_steps, batches=batches, **VALUES)
    assert 0 < int(state.skipped) < num_steps / 4
    assert int(state.step_counter) == num_steps
    leaves = jax.tree.leaves((params, state))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in leaves if x.dtype == jnp.float64)
    ends = [float(loss(params, make_batch(seed))) for seed in range(7)]
    assert np.mean(ends) < 0.5 * start


def test_a_soak_of_100_steps():
    soak(100)


@pytest.mark.slow
def test_a_soak_of_1000_steps():
    soak(1000)


def test_an_update_that_is_too_large_for_the_dtype_of_parameters_is_not_done():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float16), make_params())
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float16), make_batch())
    optimizer = make(donate_buffers=False)
    state = optimizer.init(params, key(0), batch)
    given = {"learning_rate": 1e6, "momentum": 0.0, "damping": 0.1}
    after, state, stats = optimizer.step(params, state, key(1), batch=batch, **given)
    assert_same(after, params)
    assert int(stats["skipped"]) == 1
    given["learning_rate"] = 1e-3
    after, _, stats = optimizer.step(params, state, key(2), batch=batch, **given)
    assert int(stats["skipped"]) == 1
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after))


def test_a_rejected_step_forgets_velocities_that_are_not_finite():
    optimizer = make(use_step_rejection=True, donate_buffers=False)
    params, batch = make_params(), make_batch()
    state = optimizer.init(params, key(0), batch)
    endless = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), state.velocities)
    state = replace(state, velocities=endless)
    after, state, stats = optimizer.step(params, state, key(1), batch=batch, **VALUES)
    assert_same(after, params)
    assert int(stats["rejected"]) == 1
    assert all(np.all(x == 0) for x in jax.tree.leaves(state.velocities))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_velocities_that_were_restored_and_are_not_finite_are_forgotten(rule, value):
    options, values = RULES[rule]
    optimizer = make(**options, donate_buffers=False)
    params, state, _ = train(optimizer, 2, **values)
    velocities = dict(state.velocities, out=dict(state.velocities["out"]))
    velocities["out"]["w"] = velocities["out"]["w"].at[0, 0].set(value)
    state = replace(state, velocities=velocities)
    after, state, stats = optimizer.step(params, state, key(1), batch=make_batch(), **values)
    assert_same(after, params)
    assert int(stats["skipped"]) == 1
    assert all(np.all(x == 0) for x in jax.tree.leaves(state.velocities))
    after, state, stats = optimizer.step(params, state, key(2), batch=make_batch(), **values)
    assert int(stats["skipped"]) == 1
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((after, state.velocities)))
    assert any(np.any(x != 0) for x in jax.tree.leaves(state.velocities))


def test_an_update_that_is_not_finite_is_not_taken_though_the_loss_falls():
    """Infinite weights saturate the hidden units, so that the new loss is finite, and less."""
    optimizer = make(use_step_rejection=True, donate_buffers=False)
    params, batch = make_params(), make_batch()
    params["out"]["w"] = 100 * jnp.ones_like(params["out"]["w"])
    state = optimizer.init(params, key(0), batch)
    velocities = jax.tree.map(jnp.zeros_like, params)
    velocities["in"]["b"] = jnp.asarray([jnp.inf, -jnp.inf] * 3)
    state = replace(state, velocities=velocities)
    given = {"learning_rate": 1e-9, "momentum": 0.5, "damping": 0.1}
    after, state, stats = optimizer.step(params, state, key(1), batch=batch, **given)
    assert float(stats["new_loss"]) < float(stats["loss"])
    assert_same(after, params)
    assert int(stats["rejected"]) == 1
    assert all(np.all(x == 0) for x in jax.tree.leaves(state.velocities))


@pytest.mark.parametrize("rule", RULES)
def test_a_curvature_that_was_restored_and_is_not_finite_changes_no_parameters(rule):
    options, values = RULES[rule]
    optimizer = make(**options, donate_buffers=False)
    params, state, _ = train(optimizer, 2, **values)
    spoil = lambda x: x * jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else x
    state = replace(state, estimator_state=jax.tree.map(spoil, state.estimator_state))
    after, state, history = train(optimizer, 2, params, state, **values)
    assert_same(after, params)
    assert int(history[-1]["skipped"]) == 2
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.velocities))
