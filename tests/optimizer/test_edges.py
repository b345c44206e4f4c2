"""Where users slip, and where numbers run out: each of these was once wrong."""

import ast
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from helpers import assert_same, key
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_batch, make_params, train


def test_a_checkpoint_does_not_count_losses_twice():
    checkpointed = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))
    found, _, _ = train(make(checkpointed), 2, **VALUES)
    assert_same(found, train(make(), 2, **VALUES)[0], 1e-9, 1e-10)


def test_a_wrapped_function_with_other_arguments_is_passed_over():
    def raw(params, batch, scale):
        return scale * loss(params, batch)

    def value_and_grad(params, batch):
        return jax.value_and_grad(raw)(params, batch, 1.0)

    value_and_grad.__wrapped__ = raw
    found, _, _ = train(make(value_and_grad), 2, **VALUES)
    assert_same(found, train(make(), 2, **VALUES)[0], 1e-9, 1e-10)


def linear(params, batch):
    x, y = batch
    output = curvax.register_squared_error_loss(x @ params, y)
    return jnp.mean(jnp.sum((output - y) ** 2, axis=1))


def test_adaptive_damping_stays_put_where_there_is_nothing_to_learn_and_training_goes_on():
    optimizer = make(jax.value_and_grad(linear), **ADAPTIVE)
    x = make_batch(dtype=jnp.float32)[0]
    params = jnp.zeros((3, 1), jnp.float32)
    state = optimizer.init(params, key(0), (x, x[:, :1]))

    def body(carry, targets):
        *carry, stats = optimizer.step(*carry, key(0), batch=(x, targets))
        return tuple(carry), (stats["loss"], stats["damping"])

    first, second = (
        jnp.tile(t[None], (n, 1, 1)) for t, n in ((x[:, :1], 300), (3 * x[:, 1:2], 60))
    )
    run = jax.jit(lambda c, t: jax.lax.scan(body, c, t))
    carry, (_, dampings) = run((params, state), first)
    assert float(jnp.max(dampings)) <= 0.5
    carry, (losses, _) = run(carry, second)
    assert int(carry[1].skipped) == 0
    assert float(losses[-1]) < 1e-6


def test_damping_does_not_fall_while_the_loss_rises_as_expected():
    optimizer = make(
        jax.value_and_grad(linear),
        use_adaptive_damping=True,
        initial_damping=0.1,
        damping_adaptation_interval=1,
        always_use_exact_qmodel_for_damping_adjustment=True,
    )
    x = make_batch()[0]
    params, batch = jnp.zeros((3, 1)), (x, x[:, :1])
    state = optimizer.init(params, key(0), batch)
    for number in range(3):
        params, state, stats = optimizer.step(
            params, state, key(number), batch=batch, learning_rate=6.0, momentum=0.0
        )
        assert float(stats["quad_model_change"]) > 0
    assert float(state.damping) > 0.1


WRONG_TYPES = {
    "learning_rate_schedule must be a function, got float 0.1. For a constant": {
        "learning_rate_schedule": 0.1
    },
    "regularized_parameters_path_exclusions must be a sequence of strings": {
        "regularized_parameters_path_exclusions": "bias"
    },
    "patterns_to_skip must be a sequence": {"patterns_to_skip": "dense"},
    "l2_reg must be a number, got '0.1'": {"l2_reg": "0.1"},
    "curvature_ema must be a number, got None": {"curvature_ema": None},
    "inverse_update_period must be a Python integer, got None": {"inverse_update_period": None},
    "precon_power must be a number": {"precon_power": "x"},
    "batch_size_extractor must be a function": {"batch_size_extractor": None},
}


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_wrong_types_are_named_at_once(unchecked, message):
    with pytest.raises(TypeError, match=message):
        make(**WRONG_TYPES[message])


def test_wrong_sizes_are_errors_at_once(unchecked):
    with pytest.raises(ValueError, match="microbatch_size must be at least 1"):
        make(microbatch_size=0)
    with pytest.raises(ValueError, match="'foo'"):
        make(memory_budget="foo")
    with pytest.raises(ValueError, match="an integer of zero or more"):
        make(num_burnin_steps=2.0)


@pytest.fixture(scope="module")
def started():
    optimizer = make()
    params = make_params()
    return optimizer, params, optimizer.init(params, key(0), make_batch())


def test_values_are_single_numbers(started):
    optimizer, params, state = started
    values = {**VALUES, "damping": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"damping is one number, got an array of shape \(2,\)"):
        optimizer.step(params, state, key(0), batch=make_batch(), **values)


def test_an_iterator_may_be_a_list_and_must_not_be_empty(started):
    optimizer, params, state = started
    with pytest.raises(ValueError, match="data_iterator has no more batches"):
        optimizer.step(params, state, key(0), data_iterator=[], **VALUES)
    copies = jax.tree.map(jnp.array, (params, state))
    optimizer.step(*copies, key(0), data_iterator=[make_batch()], **VALUES)


def test_arrays_that_were_given_away_are_named():
    optimizer = make()
    params = make_params()
    state = optimizer.init(params, key(0), make_batch())
    optimizer.step(params, state, key(0), batch=make_batch(), **VALUES)
    with pytest.raises(ValueError, match=r"took over their buffers.*donate_buffers=False"):
        optimizer.step(params, state, key(0), batch=make_batch(), **VALUES)


@pytest.mark.usefixtures("unchecked")
def test_a_state_of_another_type_is_rejected(started):
    optimizer, params, _ = started
    message = r"state must be one that init returned, got NoneType.*optimizer\.init\("
    with pytest.raises(TypeError, match=message):
        optimizer.fit(params, None, key(0), [make_batch()], 1, progress=False, **VALUES)
    with pytest.raises(TypeError, match=message):
        optimizer.step(params, None, key(0), batch=make_batch(), **VALUES)
    with pytest.raises(TypeError, match=message):
        optimizer.burnin(1, params, None, key(0), [make_batch()])


def recommended(error):
    """The options of `Optimizer` that an error recommends."""
    (found,) = re.findall(r"curvax\.Optimizer: auto_register_kwargs=(\{.*?\})", str(error.value))
    return {"auto_register_kwargs": ast.literal_eval(found)}


def test_unused_parameters_can_be_allowed_as_the_error_says():
    params = {**make_params(), "unused": jnp.ones(2)}
    with pytest.raises(curvax.RegistrationError, match=r"depends on \['unused'\]") as error:
        make().init(params, key(0), make_batch())
    optimizer = make(**recommended(error))
    state = optimizer.init(params, key(0), make_batch())
    after, _, _ = optimizer.step(params, state, key(0), batch=make_batch(), **VALUES)
    assert_same(after["unused"], jnp.ones(2))


def test_microbatches_of_examples_that_interact_can_be_allowed_as_the_error_says():
    def normalised(params, batch):
        x, y = batch
        return loss(params, (x - jnp.mean(x @ params["in"]["w"]), y))

    def step(**options):
        optimizer = make(jax.value_and_grad(normalised), microbatch_size=4, **options)
        params = make_params()
        state = optimizer.init(params, key(0), make_batch())
        return optimizer.step(params, state, key(0), batch=make_batch(), **VALUES)

    with pytest.raises(ValueError, match="examples of a batch interact") as error:
        step()
    assert float(step(**recommended(error)).stats["loss"]) > 0


def test_a_value_that_is_rejected_leaves_the_optimizer_as_it_was():
    optimizer = make()
    with pytest.raises(ValueError, match="norm_constraint must be positive"):
        optimizer.norm_constraint = -1.0
    optimizer.curvature_ema = 0.5
    assert optimizer.norm_constraint is None


def test_a_class_that_extends_it_may_set_attributes_first():
    class Mine(curvax.Optimizer):
        def __init__(self):
            self.note = "mine"
            super().__init__(jax.value_and_grad(loss), 0.0)

    assert Mine().note == "mine"


def test_the_first_step_is_the_same_in_a_trace():
    optimizer = make(num_burnin_steps=3, estimation_mode="fisher_gradients")
    params = make_params()
    state = optimizer.init(params, key(0), make_batch())
    step = lambda p, s: optimizer.step(p, s, key(1), batch=make_batch(), **VALUES)[0]
    assert_same(jax.jit(step)(params, state), step(params, state), 1e-9, 1e-10)


def test_burn_in_that_fails_loses_nothing():
    optimizer = make(num_burnin_steps=2)
    params = make_params()
    state = optimizer.init(params, key(0), make_batch())
    with pytest.raises(ValueError, match="ended after 1 of 2 updates"):
        optimizer.step(params, state, key(0), data_iterator=[make_batch()], **VALUES)
    both = [make_batch(), make_batch()]
    with pytest.warns(UserWarning, match="ended after 0 of 3 steps"):
        found = optimizer.fit(params, state, key(0), both, 3, progress=False, **VALUES)
    assert not any(x.is_deleted() for x in jax.tree.leaves(found))
    optimizer.step(params, state, key(0), data_iterator=[make_batch()] * 3, **VALUES)


def test_fit_goes_on_where_it_was_with_other_random_numbers():
    optimizer = make(estimation_mode="fisher_gradients", donate_buffers=False)
    params = make_params()
    state = optimizer.init(params, key(0), make_batch())
    options = {"progress": False, **VALUES}
    whole = optimizer.fit(params, state, key(7), itertools.repeat(make_batch()), 4, **options)
    half = optimizer.fit(params, state, key(7), itertools.repeat(make_batch()), 2, **options)
    rest = optimizer.fit(*half[:2], key(7), itertools.repeat(make_batch()), 2, **options)
    assert_same(rest[0], whole[0])


def test_fit_ends_at_anything_true_and_an_error_has_what_was_reached(started):
    optimizer, params, state = started
    copies = jax.tree.map(jnp.array, (params, state))
    batches = itertools.repeat(make_batch())
    ends = lambda params, state, stats: stats["loss"] < 1e9
    found = optimizer.fit(*copies, key(0), batches, 5, ends, progress=False, **VALUES)
    assert int(found[1].step_counter) == 1

    def fails(params, state, stats):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no") as caught:
        optimizer.fit(*found[:2], key(0), batches, 5, fails, progress=False, **VALUES)
    assert int(caught.value.reached[1].step_counter) == 2


def test_parts_of_aux_are_put_together_from_microbatches():
    def with_aux(params, batch):
        x, _ = batch
        return loss(params, batch), {"rows": 2 * x, "count": jnp.sum(x > 0), "mean": jnp.mean(x)}

    value_and_grad = jax.value_and_grad(with_aux, has_aux=True)
    batch = make_batch()
    for size in (4, 5):
        optimizer = make(value_and_grad, value_func_has_aux=True, microbatch_size=size)
        params = make_params()
        state = optimizer.init(params, key(0), batch)
        _, _, stats = optimizer.step(params, state, key(0), batch=batch, **VALUES)
        assert_same(stats["aux"], with_aux(make_params(), batch)[1])


def test_numbers_of_python_do_without_compiling():
    of_number = lambda w, batch: linear(w * jnp.ones((3, 1)), batch)
    x = make_batch()[0]
    results = []
    for debug in (True, False):
        optimizer = make(jax.value_and_grad(of_number), debug=debug)
        state = optimizer.init(0.5, key(0), (x, x[:, :1]))
        params, _, _ = optimizer.step(0.5, state, key(0), batch=(x, x[:, :1]), **VALUES)
        results.append(np.asarray(params))
    np.testing.assert_allclose(*results)


class TestOptax:
    """As above, for the gradient transformations."""

    def test_burn_in_and_processing_of_batches_are_done(self):
        doubled = lambda batch: jax.tree.map(lambda x: 2 * x, batch)
        options = {"estimation_mode": "ggn_exact", "num_burnin_steps": 3, **VALUES}
        transformation = curvax.kfac(loss, make_batch(), batch_process_func=doubled, **options)
        params = make_params()
        gradient = jax.grad(loss)(params, make_batch())
        _, state = transformation.update(
            gradient, transformation.init(params), params, batch=make_batch()
        )
        factor = state.optimizer.estimator_state.blocks_states[0].inputs_factor
        assert float(factor.weight) == pytest.approx(1 + 0.95 + 0.95**2 + 0.95**3)
        inputs = 2 * make_batch()[0]
        assert_same(factor.value[:3, :3], inputs.T @ inputs / 12, 1e-9)

    def test_options_without_meaning_are_rejected(self):
        for name in ("debug", "multi_device", "include_norms_in_stats"):
            with pytest.raises(TypeError, match=f"mean nothing here: {name}"):
                curvax.kfac(loss, make_batch(), 0.1, **{name: True})
        with pytest.raises(ValueError, match="learning_rate and use_adaptive_learning_rate"):
            curvax.kfac(loss, make_batch(), 0.1, use_adaptive_learning_rate=True)

    def test_states_can_be_donated(self):
        transformation = curvax.scale_by_kfac(loss, make_batch(), estimation_mode="ggn_exact")
        params = make_params()
        update = jax.jit(
            lambda g, s: transformation.update(g, s, params, batch=make_batch()), donate_argnums=1
        )
        gradient = jax.grad(loss)(params, make_batch())
        _, state = update(gradient, transformation.init(params))
        assert int(state.step_counter) == 1
