"""What the constructor and `step` are given: contradictions, and what each argument does."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from helpers import assert_same, key
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_batch, make_params, train

WRONG = {
    "norm_constraint.*use_adaptive_learning_rate": {
        "norm_constraint": 1e-3,
        "use_adaptive_learning_rate": True,
    },
    "use_adaptive_learning_rate.*learning_rate_schedule": {
        "use_adaptive_learning_rate": True,
        "learning_rate_schedule": abs,
    },
    "use_adaptive_momentum.*momentum_schedule": {
        "use_adaptive_momentum": True,
        "momentum_schedule": abs,
    },
    "use_adaptive_damping.*damping_schedule": {
        "use_adaptive_damping": True,
        "initial_damping": 1.0,
        "damping_schedule": abs,
    },
    "use_adaptive_damping.*initial_damping": {"use_adaptive_damping": True},
    "initial_damping.*use_adaptive_damping": {"initial_damping": 1.0},
    "min_damping.*max_damping": {"min_damping": 1.0, "max_damping": 0.5},
    "initial_damping.*min_damping": {
        "use_adaptive_damping": True,
        "initial_damping": 0.1,
        "min_damping": 0.5,
    },
    "damping_lower_threshold.*damping_upper_threshold": {"damping_lower_threshold": 0.9},
    "microbatch_size.*memory_budget": {"microbatch_size": 2, "memory_budget": "1MB"},
    "register_only_generic.*strict_registration": {
        "register_only_generic": True,
        "strict_registration": True,
    },
    "l2_reg must be zero or more": {"l2_reg": -1.0},
    "curvature_ema must be between": {"curvature_ema": 1.5},
    "norm_constraint must be positive": {"norm_constraint": 0.0},
    "num_burnin_steps must be a number": {"num_burnin_steps": -1},
    "inverse_update_period must be at least 1": {"inverse_update_period": 0},
    "damping_adaptation_decay must be above zero": {"damping_adaptation_decay": 0.0},
    "reject_damping_increase_factor must be at least one": {"reject_damping_increase_factor": 0.5},
    "mode 'fisher' is not known": {"estimation_mode": "fisher"},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_make_no_sense_are_named(message):
    with pytest.raises(ValueError, match=message):
        make(**WRONG[message])


def test_the_function_must_be_one(unchecked):
    with pytest.raises(TypeError, match=r"got float 1\.0\. Give jax\.value_and_grad\(loss\)"):
        curvax.Optimizer(1.0, 0.0)


@pytest.fixture(scope="module")
def started():
    optimizer = make(donate_buffers=False)
    params = make_params()
    return optimizer, params, optimizer.init(params, key(0), make_batch())


@pytest.mark.parametrize("name", VALUES)
def test_values_are_given_to_step_unless_the_constructor_has_them(started, name):
    optimizer, params, state = started
    missing = {k: v for k, v in VALUES.items() if k != name}
    with pytest.raises(ValueError, match=f"give {name}= to step"):
        optimizer.step(params, state, key(0), batch=make_batch(), **missing)
    scheduled = make(**{f"{name}_schedule": lambda step: 0.1})
    with pytest.raises(ValueError, match=f"{name}=.*but {name}_schedule was given"):
        scheduled.step(params, state, key(0), batch=make_batch(), **VALUES)
    adaptive = {k: v for k, v in ADAPTIVE.items() if name in k}
    with pytest.raises(ValueError, match=f"{name}=.*use_adaptive_{name}=True"):
        make(**adaptive).step(params, state, key(0), batch=make_batch(), **VALUES)


def test_step_takes_one_of_batch_and_iterator(started):
    optimizer, params, state = started
    for given in ({}, {"batch": make_batch(), "data_iterator": iter([make_batch()])}):
        with pytest.raises(ValueError, match="either batch= or data_iterator="):
            optimizer.step(params, state, key(0), **given, **VALUES)
    with pytest.raises(ValueError, match="inside a traced function, give step a batch"):
        jax.jit(lambda p: optimizer.step(p, state, key(0), iter([make_batch()]), **VALUES)[0])(
            params
        )


def test_the_number_of_the_step_must_be_that_of_the_state(started):
    optimizer, params, state = started
    step = functools.partial(optimizer.step, params, state, key(0), batch=make_batch(), **VALUES)
    with pytest.raises(ValueError, match=r"global_step_int=3.*step 0"):
        step(global_step_int=3)
    _, state, _ = step(global_step_int=0)
    assert optimizer.verify_args_and_get_step_counter(state.step_counter, **VALUES) == 1


def test_the_state_of_a_function_is_asked_for_and_not_expected(started):
    optimizer, params, state = started
    with pytest.raises(ValueError, match="func_state was given, but value_func_has_state=False"):
        optimizer.step(params, state, key(0), batch=make_batch(), func_state=1.0, **VALUES)
    with pytest.raises(ValueError, match="value_func_has_state=True, but func_state was not"):
        make(value_func_has_state=True).init(params, key(0), make_batch())


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda p, b: loss(p, b), {}, "a pair of its value and its gradient"),
        (jax.value_and_grad(lambda p, b: (loss(p, b), 1.0), has_aux=True), {}, "a loss alone"),
        (jax.value_and_grad(loss), {"value_func_has_aux": True}, "2 values"),
        (lambda p, b: (jnp.ones(3), p), {}, r"one real number, got float64\[3\]"),
        (lambda p, b: (loss(p, b), p["in"]), {}, "must be like the parameters"),
    ],
)
def test_the_outputs_of_the_function_are_checked(function, options, message):
    optimizer = make(function, value_func_for_estimator=loss, **options)
    params = make_params()
    state = optimizer.init(params, key(0), make_batch())
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step(params, state, key(0), batch=make_batch(), **VALUES)


def test_before_the_first_use_there_is_no_estimator():
    with pytest.raises(ValueError, match=r"not known before it is traced\. Call init or step"):
        make().estimator  # noqa: B018


def test_all_forms_of_the_function_give_the_same():
    """With and without state, random key and further results, and in both ways to return them."""

    def full(params, func_state, rng, batch):
        assert rng.shape == ()
        return loss(params, batch), (func_state + 1, {"seen": func_state})

    def flat(params, func_state, rng, batch):
        (value, (new, aux)), gradient = jax.value_and_grad(full, has_aux=True)(
            params, func_state, rng, batch
        )
        return (value, new, aux), gradient

    plain, _, _ = train(make(), 3, **VALUES)
    for function in (jax.value_and_grad(full, has_aux=True), flat):
        has = {f"value_func_has_{name}": True for name in ("aux", "state", "rng")}
        optimizer = make(function, **has, value_func_for_estimator=full)
        params, func_state = make_params(), jnp.zeros(())
        state = optimizer.init(params, key(0), make_batch(), func_state)
        for number in range(3):
            batch = make_batch(number)
            params, state, func_state, stats = optimizer.step(
                params, state, key(number), batch=batch, func_state=func_state, **VALUES
            )
        assert_same(params, plain)
        assert float(func_state) == 3
        assert float(stats["aux"]["seen"]) == 2


def test_schedules_are_functions_of_the_step():
    schedules = {
        f"{k}_schedule": lambda step, v=v: v / (1 + step.astype(float)) for k, v in VALUES.items()
    }
    _, _, history = train(make(**schedules), 3)
    for number, stats in enumerate(history):
        for name, value in VALUES.items():
            assert float(stats[name]) == pytest.approx(value / (1 + number))


def test_burn_in_takes_batches_of_the_iterator_or_the_one_there_is():
    batch = make_batch()
    burnt = make(num_burnin_steps=3, curvature_ema=1.0)
    _, from_batch, _ = train(burnt, 1, batches=lambda _: batch, **VALUES)
    taken = []
    iterator = (taken.append(n) or batch for n in itertools.count())
    params = make_params()
    state = burnt.init(params, key(0), batch)
    _, from_iterator, _ = burnt.step(params, state, key(0), data_iterator=iterator, **VALUES)
    assert taken == [0, 1, 2, 3]
    for state in (from_batch, from_iterator):
        assert float(state.estimator_state.blocks_states[0].inputs_factor.weight) == 4
    assert_same(from_batch.velocities, from_iterator.velocities)
    state, func_state = burnt.burnin(2, make_params(), from_batch, key(0), itertools.repeat(batch))
    assert float(state.estimator_state.blocks_states[0].inputs_factor.weight) == 6
    assert func_state is None
    with pytest.raises(ValueError, match="ended after 1 of 2 updates"):
        burnt.burnin(2, make_params(), from_iterator, key(0), iter([batch]))


def test_batches_are_processed_before_they_are_used():
    doubled = lambda batch: jax.tree.map(lambda x: 2 * x, batch)
    found, _, _ = train(make(batch_process_func=doubled), 2, **VALUES)
    expected, _, _ = train(make(), 2, batches=lambda n: doubled(make_batch(n)), **VALUES)
    assert_same(found, expected)


def test_debug_runs_the_same_without_compiling():
    calls = []

    def noted(params, batch):
        calls.append(isinstance(jax.tree.leaves(params)[0], jax.core.Tracer))
        return jax.value_and_grad(loss)(params, batch)

    options = {"value_func_for_estimator": loss, "inverse_update_period": 2, **ADAPTIVE}
    optimizer = make(noted, debug=True, multi_device=True, **options)
    found, _, _ = train(optimizer, 5)
    assert calls.count(False) >= 5
    expected, _, _ = train(make(noted, **options), 5)
    assert_same(found, expected, 1e-9, 1e-10)


def test_the_batch_size_is_what_the_extractor_says():
    transposed = lambda batch: tuple(x.T for x in batch)
    by_columns = lambda params, batch: loss(params, transposed(batch))
    size = lambda batch: batch[0].shape[1]
    optimizer = make(jax.value_and_grad(by_columns), batch_size_extractor=size)
    params = make_params()
    batch = transposed(make_batch())
    state = optimizer.init(params, key(0), batch)
    found, state, stats = optimizer.step(params, state, key(0), batch=batch, **VALUES)
    assert int(stats["batch_size"]) == int(stats["data_seen"]) == 12
    assert_same(found, train(make(), 1, **VALUES)[0])


def test_attributes_cannot_be_set_any_more_once_they_are_used():
    optimizer = make(modifiable_attribute_exceptions=("norm_constraint", "note"))
    optimizer.curvature_ema = 0.5
    assert optimizer.curvature_ema == 0.5
    params, state, history = train(optimizer, 1, **VALUES)
    with pytest.raises(AttributeError, match="curvature_ema cannot be set any more"):
        optimizer.curvature_ema = 0.9
    with pytest.raises(AttributeError, match="something cannot be set any more"):
        optimizer.something = 1
    optimizer.note = "fine"
    optimizer.norm_constraint = 1e-6  # It is picked up, though the step was compiled before.
    _, state, history = train(optimizer, 1, params, state, **VALUES)
    assert float(history[0]["scaled_grad_norm_sq"]) > 1e-6
    squared = sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(state.velocities))
    assert squared < 1.0
    free = make(forbid_setting_attributes_after_finalize=False)
    train(free, 1, **VALUES)
    free.curvature_ema = 0.9
    with pytest.raises(ValueError, match="curvature_ema must be between"):
        free.curvature_ema = 2.0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        free.nothing  # noqa: B018


def test_properties_say_what_was_given():
    optimizer = make(num_burnin_steps=7, l2_reg=0.25, damping_adaptation_interval=2)
    assert optimizer.num_burnin_steps == 7
    assert float(optimizer.l2_reg) == 0.25
    assert optimizer.damping_decay_factor == pytest.approx(0.81)
    state = optimizer.init(make_params(), key(0), make_batch())
    assert not optimizer.should_update_damping(state)
    _, state, _ = train(make(), 1, **VALUES)
    assert optimizer.should_update_damping(state)
    assert float(optimizer.compute_loss_value((make_params(), make_batch()))) == pytest.approx(
        float(loss(make_params(), make_batch()))
    )


def test_statistics_are_what_they_are_called():
    optimizer = make(
        include_norms_in_stats=True,
        include_per_param_norms_in_stats=True,
        include_registered_loss_in_stats=True,
        donate_buffers=False,
    )
    params, batch = make_params(), make_batch()
    state = optimizer.init(params, key(0), batch)
    after, new, stats = optimizer.step(params, state, key(0), batch=batch, **VALUES)
    length = lambda tree: float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))
    gradient = jax.grad(loss)(params, batch)
    update = jax.tree.map(jnp.subtract, after, params)
    direction = jax.tree.map(lambda x: -x / 0.2, new.velocities)
    expected = {"param": params, "grad": gradient, "precon_grad": direction, "update": update}
    for name, tree in expected.items():
        assert float(stats[f"{name}_norm"]) == pytest.approx(length(tree))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found = stats[f"{name}_norms"][jax.tree_util.keystr(path)]
            assert float(found) == pytest.approx(length(leaf))
    dot = sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), gradient, direction)))
    assert float(stats["scaled_grad_norm_sq"]) == pytest.approx(0.04 * float(dot))
    constant = np.log(2 * np.pi * 0.5) / 2  # Two outputs, weight one half, variance one half.
    assert float(stats["registered_loss"]) == pytest.approx(float(stats["loss"]) + constant)
    assert {"loss", "step", "batch_size", "data_seen", "rho", "new_loss"} < set(stats)
    assert "aux" not in stats


def test_a_power_and_several_samples():
    half = make(precon_power=-0.5, use_exact_inverses=True)
    state = train(half, 1, **VALUES)[1]
    gradient = jax.grad(loss)(make_params(), make_batch())
    curvature = half.estimator.multiply_matpower(
        state.estimator_state, gradient, 0.05, -0.5, True, False, None
    )
    assert_same(state.velocities, jax.tree.map(lambda x: -0.2 * x, curvature), 1e-8)
    several = make(estimation_mode="fisher_gradients", num_estimator_samples=1000)
    estimate = lambda state: state.estimator_state.blocks_states[0].outputs_factor.value
    found = estimate(train(several, 1, **VALUES)[1])
    exact = estimate(train(make(), 1, **VALUES)[1])
    assert float(jnp.linalg.norm(found - exact)) < 0.1 * float(jnp.linalg.norm(exact))
    weight = train(several, 2, **VALUES)[1].estimator_state.blocks_states[0].inputs_factor.weight
    assert float(weight) == pytest.approx(1.95)
