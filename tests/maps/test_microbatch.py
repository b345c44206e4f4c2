"""`microbatch` equals running the function on each microbatch and combining the outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import curvax
from curvax import AccumulationType, Accumulator
from helpers import assert_same, derivatives, key


def split(length, size, order):
    """The examples of each microbatch."""
    number = -(-length // size)
    if order == "strided":
        return [np.arange(length)[i::number] for i in range(number)]
    return [np.arange(length)[i * size : (i + 1) * size] for i in range(number)]


def batch_function(w, x):
    """Something of each kind: a sum, a mean, a row for each example."""
    y = jnp.tanh(x @ w)
    return jnp.sum(y**2), jnp.mean(y, axis=0), y


KINDS = (AccumulationType.SUM, AccumulationType.MEAN, AccumulationType.CONCAT)


@settings(max_examples=8)
@given(
    length=st.integers(1, 9),
    size=st.one_of(st.none(), st.integers(1, 11)),
    order=st.sampled_from(["strided", "contiguous"]),
    running=st.booleans(),
    axis=st.integers(-2, 1),
)
def test_a_batch_function_gives_the_result_of_the_full_batch(length, size, order, running, axis):
    w = jax.random.normal(key(), (3, 2), jnp.float64)
    x = jnp.moveaxis(jax.random.normal(key(1), (length, 3), jnp.float64), 0, axis)
    fun = lambda w, x: batch_function(w, jnp.moveaxis(x, axis, 0))
    kinds = (KINDS[0], AccumulationType.RUNNING_MEAN, KINDS[2]) if running else KINDS
    micro = curvax.microbatch(fun, 1, size, kinds, in_axes=axis, order=order)
    assert_same(derivatives(micro)(w, x), derivatives(fun)(w, x))


def test_it_composes_with_an_outer_vmap():
    w = jax.random.normal(key(), (2, 3, 2), jnp.float64)
    x = jax.random.normal(key(1), (2, 5, 3), jnp.float64)
    micro = curvax.microbatch(batch_function, 1, 2, KINDS)
    assert_same(jax.vmap(derivatives(micro))(w, x), jax.vmap(derivatives(batch_function))(w, x))


@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_function_sees_the_microbatches_of_the_order(size, order):
    """A function that is not a sum over examples shows which examples it saw together."""
    x = jax.random.normal(key(), (7,), jnp.float64)
    fun = lambda x: jnp.prod(x)
    micro = curvax.microbatch(fun, 0, size, AccumulationType.SUM, order=order)
    expected = sum(jnp.prod(x[examples]) for examples in split(7, size, order))
    assert_same(micro(x), expected)


@pytest.mark.parametrize("order", ["strided", "contiguous"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("traced", [False, True])
def test_num_real_microbatches_averages_over_the_examples_that_ran(order, number, traced):
    x = jnp.arange(8.0) ** 2
    run = lambda number: curvax.microbatch(
        jnp.mean, 0, 3, AccumulationType.MEAN, num_real_microbatches=number, order=order
    )(x)
    ran = np.concatenate([[], *split(8, 3, order)[:number]]).astype(int)
    expected = np.mean(x[ran]) if number else np.nan
    np.testing.assert_allclose(jax.jit(run)(number) if traced else run(number), expected)


def test_batch_arguments_may_be_named_by_number_or_name_and_passed_either_way():
    def loss(w, x, y=None, *, weight=1.0):
        return jnp.sum(weight * (x @ w - (0.0 if y is None else y)) ** 2)

    w, x, y = jnp.ones(2), jnp.arange(10.0).reshape(5, 2), jnp.arange(5.0)
    weight = jnp.linspace(0.0, 1.0, 5)
    by_number = curvax.microbatch(loss, (1, 2), 2)
    by_name = curvax.microbatch(loss, (), 2, argnames=("x", "y"))
    from_the_end = curvax.microbatch(loss, (-2, -1), 2)
    with_keyword = curvax.microbatch(loss, (1, 2), 2, argnames="weight")
    expected = loss(w, x, y)
    for micro in (by_number, by_name, from_the_end):
        assert_same(micro(w, x, y), expected)
        assert_same(micro(w, x, y=y), expected)
        assert_same(micro(w=w, x=x, y=y), expected)
    assert_same(by_number(w, x), loss(w, x))
    assert_same(with_keyword(w, x, y, weight=weight), loss(w, x, y, weight=weight))


def test_in_axes_may_be_one_for_each_argument_and_a_prefix_of_it():
    fun = lambda x, scale, y: jnp.sum(x["a"] * scale * y.T) + 0.0 * jnp.sum(x["b"])
    x = {"a": jnp.arange(10.0).reshape(5, 2), "b": jnp.ones(3)}
    y = jnp.arange(10.0).reshape(2, 5)
    micro = curvax.microbatch(fun, (0, 2), 2, in_axes=({"a": 0, "b": None}, -1))
    assert_same(micro(x, 2.0, y), fun(x, 2.0, y))
    by_name = curvax.microbatch(fun, 0, 2, argnames="y", in_axes=[{"a": 0, "b": None}, 1])
    assert_same(by_name(x, 2.0, y=y), fun(x, 2.0, y))


def test_arguments_that_are_no_batches_are_passed_unchanged():
    def fun(x, mode, power):
        assert isinstance(power, int)
        return jnp.sum(x**power) if mode == "power" else jnp.sum(x)

    x = jnp.arange(5.0)
    assert_same(curvax.microbatch(fun, 0, 2)(x, "power", 3), jnp.sum(x**3))


def test_gradients_accumulate_as_in_training():
    loss = lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2)
    w = jax.random.normal(key(), (3,), jnp.float64)
    x = jax.random.normal(key(1), (10, 3), jnp.float64)
    y = jax.random.normal(key(2), (10,), jnp.float64)
    micro = curvax.microbatch(jax.value_and_grad(loss), (1, 2), 4, AccumulationType.MEAN)
    assert_same(jax.jit(micro)(w, x, y), jax.value_and_grad(loss)(w, x, y))


def test_a_user_supplied_accumulator_may_take_uneven_microbatches():
    count = Accumulator(
        init=lambda like: jnp.zeros(like.shape, like.dtype),
        update=lambda carry, value, index: carry + value,
        finalize=lambda carry: carry,
        aggregate=lambda values: values,
        uneven=True,
    )
    micro = curvax.microbatch(lambda x: jnp.float64(x.shape[0]), 0, 3, count)
    assert micro(jnp.ones(8)) == 8.0


def test_an_empty_batch_is_one_empty_microbatch():
    micro = curvax.microbatch(batch_function, 1, 2, KINDS)
    w, x = jnp.ones((3, 2)), jnp.zeros((0, 3))
    total, mean, rows = micro(w, x)
    assert total == 0.0
    assert jnp.isnan(mean).all()
    assert rows.shape == (0, 2)


def test_negative_argnums_count_from_the_last_argument_of_the_call():
    f = lambda a, b, c=None: b.sum() if c is None else (b * c).sum()
    b, c = jnp.arange(5.0), jnp.arange(1.0, 6.0)
    assert curvax.microbatch(f, -1, 2)(1.0, b) == b.sum()
    assert curvax.microbatch(f, (-1, -2), 2)(1.0, b, c) == b @ c
    assert curvax.microbatch(f, (-1, -2), 2)(1.0, b=b, c=c) == b @ c
