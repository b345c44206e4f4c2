"""A large batch in bounded memory: the same steps, in parts."""

import functools

import jax
import jax.numpy as jnp
import pytest

import curvax
from helpers import assert_same, key, temporaries
from optimizer.problems import ADAPTIVE, VALUES, loss, make, make_batch, make_params, train

pytestmark = pytest.mark.optimised


@pytest.mark.parametrize("size", [3, 5])
def test_steps_in_microbatches_equal_those_at_once(size):
    found, state, history = train(make(**ADAPTIVE, microbatch_size=size), 5)
    expected, other, whole = train(make(**ADAPTIVE), 5)
    assert_same(found, expected, 1e-8, 1e-9)
    assert_same(history[-1]["loss"], whole[-1]["loss"], 1e-8)
    assert_same(state.damping, other.damping)


def test_other_outputs_of_the_function_are_averaged():
    def with_more(params, count, batch):
        x, _ = batch
        return loss(params, batch), (count + 1, {"mean": jnp.mean(x), "count": count})

    optimizer = make(
        jax.value_and_grad(with_more, has_aux=True),
        value_func_has_state=True,
        value_func_has_aux=True,
        microbatch_size=5,
    )
    params, batch, count = make_params(), make_batch(), jnp.zeros((), int)
    state = optimizer.init(params, key(0), batch, count)
    _, _, after, stats = optimizer.step(
        params, state, key(0), batch=batch, func_state=count, **VALUES
    )
    assert_same(stats["aux"]["mean"], jnp.mean(batch[0]))
    assert int(after) == 1


def test_rows_are_distinguished_from_arrays_of_the_same_length():
    """Also if the function takes no batch that is larger; then all that is as long is rows."""
    params, batch = make_params(), make_batch()
    length = len(batch[0])

    def with_rows(is_strict, params, batch):
        x, _ = batch
        if is_strict and len(x) > length:
            raise ValueError("too large")
        return loss(params, batch), {"rows": x[:, 0], "as long": jnp.mean(x) * jnp.ones(length)}

    for is_strict in (False, True):
        function = jax.value_and_grad(functools.partial(with_rows, is_strict), has_aux=True)
        optimizer = make(function, value_func_has_aux=True)
        func_args = params, batch
        aux = jax.eval_shape(function, *func_args)[0][1]
        found = optimizer.finalize(params, key(0), batch).function.rows_of_aux(func_args, aux)
        assert found == {"rows": True, "as long": is_strict}


def wide_loss(params, batch):
    x, y = batch
    hidden = x
    for w in params[:-1]:
        hidden = jnp.tanh(hidden @ w)
    output = curvax.register_squared_error_loss(hidden @ params[-1], y)
    return jnp.mean((output - y) ** 2)


def temporaries_of_a_step(**options):
    """Of a network whose activations are much larger than its parameters."""
    keys = jax.random.split(key(0), 6)
    params = [jax.random.normal(k, (8, 8)) for k in keys]
    batch = jnp.ones((4096, 8)), jnp.ones((4096, 8))
    optimizer = make(jax.value_and_grad(wide_loss), **options, estimation_mode="fisher_gradients")
    algorithm = optimizer.finalize(params, key(0), batch)
    state = jax.eval_shape(algorithm.init, params, key(0), batch)
    return temporaries(
        lambda p, s, b: optimizer.step(p, s, key(1), batch=b, **VALUES), params, state, batch
    )


def test_microbatches_bound_the_memory_of_a_step():
    whole = temporaries_of_a_step()
    in_parts = temporaries_of_a_step(microbatch_size=256)
    within = temporaries_of_a_step(memory_budget="500kB")
    assert in_parts < whole / 5
    assert within < whole / 2
