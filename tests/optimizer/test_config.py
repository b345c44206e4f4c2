"""The configuration: frozen, one field for each argument, validated once for all that use it."""

import dataclasses
import inspect

import jax
import pytest

import curvax
from curvax.optimizer.config import ADAPTIVE, KFACConfig, OptimizerConfig, PreconditionerConfig
from helpers import key
from optimizer.problems import loss, make, make_batch, make_params


def test_the_arguments_of_the_optimizer_are_the_fields_of_its_configuration():
    parameters = inspect.signature(curvax.Optimizer).parameters
    fields = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
    assert fields.keys() == parameters.keys()
    required = {"value_and_grad_func", "l2_reg"}
    for name in fields.keys() - required:
        assert fields[name] == parameters[name].default, name


def test_it_is_frozen_and_each_replacement_is_validated():
    config = KFACConfig(curvature_ema=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.curvature_ema = 0.9
    assert dataclasses.replace(config, l2_reg=0.1).curvature_ema == 0.5
    with pytest.raises(ValueError, match="l2_reg must be zero or more"):
        dataclasses.replace(config, l2_reg=-1.0)


def test_values_are_numbers_for_each_step_schedules_or_adaptive():
    config = KFACConfig(learning_rate_schedule=abs, use_adaptive_damping=True, initial_damping=1.0)
    assert (config.learning_rate, config.momentum, config.damping) == (abs, None, ADAPTIVE)


@pytest.mark.parametrize(
    ("make_one", "config"),
    [(curvax.kfac, KFACConfig), (curvax.scale_by_kfac, PreconditionerConfig)],
)
def test_gradient_transformations_take_the_options_of_their_configuration(make_one, config):
    given = {} if make_one is curvax.scale_by_kfac else {"learning_rate": 0.1}
    rules = {"learning_rate_schedule", "momentum_schedule", "damping_schedule", "initial_damping"}
    for field in dataclasses.fields(config):
        if field.name not in rules:
            make_one(loss, make_batch(), **given, **{field.name: field.default})
    with pytest.raises(TypeError, match=r"kfac: n.*: dampling"):
        make_one(loss, make_batch(), **given, dampling=0.1)
    with pytest.raises(ValueError, match="curvature_ema must be between"):
        make_one(loss, make_batch(), **given, curvature_ema=2.0)


def test_schedules_of_a_transformation_are_given_as_the_value_itself():
    with pytest.raises(TypeError, match="give the schedule as damping=, not as damping_schedule="):
        curvax.kfac(loss, make_batch(), 0.1, damping_schedule=abs)


def test_results_have_names_and_unpack_as_tuples():
    values = {"learning_rate": 0.1, "momentum": 0.5, "damping": 0.1}
    optimizer = make()
    params = make_params()
    state = optimizer.init(params, key(0), make_batch())
    result = optimizer.step(params, state, key(1), batch=make_batch(), **values)
    assert isinstance(result, tuple)
    assert result._fields == ("params", "state", "stats")
    params, state, stats = result
    assert stats is result.stats
    assert int(result.state.step_counter) == 1
    result = optimizer.fit(params, state, key(1), [make_batch()], 1, progress=False, **values)
    assert int(result.state.step_counter) == 2

    counted = lambda params, count, batch: (loss(params, batch), count + 1)
    optimizer = make(jax.value_and_grad(counted, has_aux=True), value_func_has_state=True)
    params, count = make_params(), jax.numpy.zeros(())
    state = optimizer.init(params, key(0), make_batch(), count)
    step = lambda *args: optimizer.step(*args[:2], key(1), None, make_batch(), args[2], **values)
    result = jax.jit(step)(params, state, count)
    assert result._fields == ("params", "state", "func_state", "stats")
    params, state, count, _ = step(*result[:3])
    assert int(count) == 2
