"""A call computes with its function as that is now, not as it was when it was compiled.

The oracle is JAX without `jit`, asked at the time of the call. Where nothing has changed, nothing
is compiled; and no array is kept alive that the function has let go of.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import curvax
from curvax import AccumulationType
from helpers import assert_same
from memory.changing import KINDS

POINT = jnp.array([0.3, -0.7, 1.1])
ROWS = jnp.array([[0.3, -0.7, 1.1], [0.2, 0.9, -0.4]])


def scalar(value, x):
    return jnp.sum(value * jnp.sin(x) ** 2) * x[0] + jnp.sum(x**3)


def vector(value, x):
    return value * jnp.sin(x) * x[0] + x**2


def loglike(value, x, example):
    return jnp.sum(value * jnp.sin(x * example))


def step(value, carry, x):
    return jnp.tanh(carry + value * x), jnp.sum(carry * value)


def fisher(f):
    scores = jax.vmap(jax.grad(f), (None, 0))(POINT, ROWS)
    return scores.T @ scores


def gauss_newton(f, weight=lambda r: r):
    J = jax.jacobian(f)(POINT)
    return J.T @ jax.vmap(weight, 1, 1)(J)


BUDGET = {"memory_budget": "1MB"}
# What is called, its oracle, and the function of a value that it is called with.
CALLS = {
    "hessian": (lambda f: curvax.hessian(f, POINT)[0], lambda f: jax.hessian(f)(POINT), scalar),
    "hessian, checkpointed": (
        lambda f: curvax.hessian(f, POINT, checkpoint=True)[0],
        lambda f: jax.hessian(f)(POINT),
        scalar,
    ),
    "hessian to a budget": (
        lambda f: curvax.hessian(f, POINT, **BUDGET)[0],
        lambda f: jax.hessian(f)(POINT),
        scalar,
    ),
    "hessian_diagonal": (
        lambda f: curvax.hessian_diagonal(f, POINT),
        lambda f: jnp.diagonal(jax.hessian(f)(POINT)),
        scalar,
    ),
    "hessian_blocks": (
        lambda f: curvax.hessian_blocks(f, POINT),
        lambda f: jax.hessian(f)(POINT),
        scalar,
    ),
    "jacobian by columns": (
        lambda f: curvax.jacobian(f, POINT, mode="forward", batch_size=2)[0],
        lambda f: jax.jacobian(f)(POINT),
        vector,
    ),
    "jacobian by rows": (
        lambda f: curvax.jacobian(f, POINT, mode="reverse", **BUDGET)[0],
        lambda f: jax.jacobian(f)(POINT),
        vector,
    ),
    "gauss_newton": (lambda f: curvax.gauss_newton(f, POINT)[0], gauss_newton, vector),
    "gauss_newton's weight": (
        lambda w: curvax.gauss_newton(jnp.sin, POINT, w)[0],
        lambda w: gauss_newton(jnp.sin, w),
        lambda value, r: value * r,
    ),
    "fisher_information": (
        lambda f: curvax.fisher_information(f, POINT, ROWS)[0],
        fisher,
        loglike,
    ),
    "chunked_vmap": (
        lambda f: curvax.chunked_vmap(f, **BUDGET)(ROWS),
        lambda f: jax.vmap(f)(ROWS),
        vector,
    ),
    "micro_vmap": (
        lambda f: curvax.micro_vmap(f, accumulator=AccumulationType.SUM, **BUDGET)(ROWS),
        lambda f: jnp.sum(jax.vmap(f)(ROWS), 0),
        vector,
    ),
    "microbatch": (
        lambda f: curvax.microbatch(f, 0, **BUDGET)(ROWS),
        lambda f: f(ROWS),
        lambda value, rows: jnp.sum(value * jnp.sin(rows), 0),
    ),
    "micro_grad": (
        lambda f: curvax.micro_grad(f, keep_batch_dim=False, **BUDGET)(POINT, ROWS)[0],
        lambda f: jnp.sum(jax.vmap(jax.grad(f), (None, 0))(POINT, ROWS), 0),
        loglike,
    ),
    "micro_grad's transform_fn": (
        lambda t: curvax.micro_grad(
            lambda x, y: jnp.sum(x * y), keep_batch_dim=False, transform_fn=t, **BUDGET
        )(POINT, ROWS)[0],
        lambda t: jnp.sum(jax.vmap(t)(ROWS), 0),
        vector,
    ),
    "checkpoint_chunked_scan": (
        lambda f: curvax.checkpoint_chunked_scan(f, POINT, ROWS, **BUDGET),
        lambda f: jax.lax.scan(lambda *args: f(*args), POINT, ROWS),
        step,
    ),
    "checkpointed_scan": (
        lambda f: curvax.checkpointed_scan(f, POINT, ROWS, **BUDGET),
        lambda f: jax.lax.scan(lambda *args: f(*args), POINT, ROWS),
        step,
    ),
}


def check(call, kind, values):
    compute, oracle, body = CALLS[call]
    get, change = KINDS[kind](body)
    for value in values:
        change(value)
        assert_same(compute(get()), oracle(get()), 1e-12, 1e-12)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_sees_an_attribute_that_has_changed(call):
    check(call, "attribute_of_an_object", [1.0, 5.0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_seen(kind):
    check("hessian", kind, [1.0, 5.0])
    check("chunked_vmap", kind, [1.0, 5.0])


@given(
    st.sampled_from(list(CALLS)),
    st.sampled_from(list(KINDS)),
    st.lists(st.sampled_from([0.0, 0.5, 2, 3.0, np.float64(0.25), -1.5]), min_size=2, max_size=3),
)
def test_any_change_is_seen_by_any_call(call, kind, values):
    check(call, kind, values)


@pytest.mark.parametrize("call", ["hessian", "chunked_vmap"])
def test_a_number_may_be_replaced_by_a_value_of_any_type(call):
    values = [2.0, 2, np.float64(3), jnp.float64(2), jnp.arange(3.0), np.arange(3.0)]
    check(call, "attribute_of_an_object", values)


def test_derivatives_look_through_jit():
    """What is inside a `jax.jit` counts, not what it has cached."""
    held = [1.0]
    f = lambda x: scalar(held[0], x)
    jitted = jax.jit(f)
    for value in (1.0, 5.0):
        held[0] = value
        assert_same(curvax.hessian(jitted, POINT)[0], jax.hessian(f)(POINT), 1e-12, 1e-12)


@pytest.mark.parametrize(("mark", "call"), [("jvp", "hessian"), ("vjp", "jacobian by rows")])
def test_derivative_rules_are_those_of_the_time_of_the_call(mark, call, compilations):
    """They run when derivatives are traced, and the function alone does not show them."""
    held = [None]

    def with_rule(f):
        primal = lambda *args: f(1.0, *args)
        if mark == "jvp":
            g = jax.custom_jvp(primal)
            rule = lambda x, t: (primal(*x), held[0] * jax.jvp(primal, x, t)[1])
            g.defjvp(rule)
        else:
            g = jax.custom_vjp(primal)
            backward = lambda x, c: jax.tree.map(lambda d: held[0] * d, jax.vjp(primal, *x)[1](c))
            g.defvjp(lambda *x: (primal(*x), x), backward)
        return g

    compute, oracle, body = CALLS[call]
    f = with_rule(body)
    for value in (1.0, 5.0):
        held[0] = value
        assert_same(compute(f), oracle(f), 1e-12, 1e-12)
    expected, before = oracle(f), len(compilations)
    assert_same(compute(f), expected, 1e-12, 1e-12)
    assert len(compilations) == before


@pytest.mark.parametrize("zero", [0.0, np.float64(0.0), complex(0.0, 0.0)])
def test_numbers_are_compared_bit_for_bit(zero):
    divide = curvax.chunked_vmap(lambda x, s: x / s.real, in_axes=(0, None), memory_budget="1MB")
    ones = jnp.ones(2)
    negative = type(zero)(complex(-0.0, 0.0)) if isinstance(zero, complex) else -zero
    assert float(divide(ones, zero)[0]) == np.inf
    assert float(divide(ones, negative)[0]) == -np.inf


def test_the_sign_of_a_zero_that_a_function_reads_counts():
    held = [0.0]
    f = lambda x: jnp.sum(x**2) / held[0]
    assert float(curvax.hessian(f, jnp.ones(1))[0][0, 0]) == np.inf
    held[0] = -0.0
    assert float(curvax.hessian(f, jnp.ones(1))[0][0, 0]) == -np.inf


def test_not_a_number_is_compiled_once(compilations):
    divide = curvax.chunked_vmap(lambda x, s: x * s, in_axes=(0, None), memory_budget="1MB")
    ones = jnp.ones(2)
    divide(ones, float("nan"))
    before = len(compilations)
    assert np.isnan(divide(ones, float("nan"))).all()
    assert len(compilations) == before


@pytest.mark.parametrize(
    "call", ["hessian", "hessian to a budget", "micro_grad", "checkpointed_scan"]
)
def test_an_unchanged_function_is_not_compiled_again(call, compilations):
    """Nor is what changes back, or an array that takes the place of another."""
    compute, _, body = CALLS[call]
    get, change = KINDS["attribute_of_an_object"](body)
    arrays = jnp.float64(2.0), jnp.float64(3.0)
    for value in (1.0, arrays[0]):
        change(value)
        jax.block_until_ready(compute(get()))
    before = len(compilations)
    for value in (1.0, arrays[1], 1.0):
        change(value)
        jax.block_until_ready(compute(get()))
    assert len(compilations) == before


def test_a_new_callback_that_does_the_same_is_not_another_program(compilations):
    def f(x):
        jax.debug.callback(lambda value: None, x)
        return jnp.sum(x**3)

    curvax.hessian(f, POINT)
    before = len(compilations)
    curvax.hessian(f, POINT)
    assert len(compilations) == before


def test_a_callback_that_closes_over_another_list_is_another_program():
    """Though both are equal, it is the one that is there now that is written to."""
    held = [[]]

    def f(x):
        seen = held[0]
        jax.debug.callback(lambda: seen.append(1))
        return jnp.sum(x**3)

    lists = [], []
    for number, seen in enumerate(lists):
        held[0] = seen
        jax.block_until_ready(curvax.hessian(f, POINT)[0])
        jax.effects_barrier()
        assert list(map(len, lists)) == [1, number]


@pytest.mark.parametrize("call", ["hessian", "gauss_newton", "chunked_vmap"])
@pytest.mark.parametrize("new", [jnp.arange, np.arange], ids=["JAX", "NumPy"])
def test_arrays_that_a_function_has_let_go_of_are_not_kept(call, new):
    compute, _, body = CALLS[call]
    get, change = KINDS["attribute_of_an_object"](body)
    array = new(3.0)
    gone = weakref.ref(array)
    change(array)
    jax.block_until_ready(compute(get()))
    change(1.0)
    del array
    gc.collect()
    assert gone() is None
    assert_same(compute(get()), CALLS[call][1](get()), 1e-12, 1e-12)
