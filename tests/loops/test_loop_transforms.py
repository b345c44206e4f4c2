"""Loops are ordinary JAX: they trace the body once, and go wherever a scan goes."""

import functools

import jax
import jax.numpy as jnp
import pytest

import curvax
from helpers import CountTraces, assert_same, checking_leaks, total
from loops.bodies import BODIES_BY_NAME, LOOPS, each_loop

LENGTH = 10
BODY = BODIES_BY_NAME["recurrence"]


def summed(fun):
    return lambda *args: total(fun(*args))


TRANSFORMS = {
    "forward": lambda f: f,
    "gradient": lambda f: jax.grad(summed(f), (0, 1)),
    "forward over reverse": lambda f: (
        lambda *args: jax.jvp(jax.grad(summed(f), (0, 1)), args, args)
    ),
}
TRACED = {name: loop.run for name, loop in LOOPS.items()} | {
    "sliced_scan of many groups": functools.partial(curvax.sliced_scan, start=1, step=2),
    "checkpoint_chunked_scan of one chunk": curvax.checkpoint_chunked_scan,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("run", TRACED.values(), ids=TRACED)
@pytest.mark.parametrize("init", [jnp.array(0.5), 0.5], ids=["array", "Python number"])
def test_the_body_is_traced_once(run, transform, init):
    body = CountTraces(lambda w, carry, x: (jnp.sin(w * carry + x), carry * x))
    through = lambda w, xs: run(functools.partial(body, w), init, xs)
    jax.jit(transform(through)).trace(jnp.array(0.3), jnp.linspace(0.0, 1.0, 13))
    assert body.count == 1


@each_loop
def test_a_body_that_was_seen_before_is_not_traced_again(loop):
    body = CountTraces(lambda carry, x: (jnp.sin(carry + x), carry * x))
    for _ in range(3):
        loop.run(body, jnp.array(0.5), jnp.linspace(0.0, 1.0, LENGTH))
    assert body.count == 1


def through(run):
    return lambda params, init, xs: run(functools.partial(BODY.fun, params), init, xs)


def in_a_scan(run):
    """The loop as the body of a scan, over its own results."""

    def outer(init, w):
        carry, ys = through(run)(w, init, jnp.ones((LENGTH, 2)))
        return carry + w * jnp.sum(ys), ys

    return lambda params, init, xs: jax.lax.scan(outer, init + params, xs[:3])


def in_itself(run):
    """The loop in its own body, over a part of what the outer one scans over."""

    def outer(w, carry, x):
        inner = lambda inner_carry, x: BODY.fun(w, inner_carry, x)
        carry, ys = run(inner, carry, x[None] * jnp.linspace(0.0, 1.0, LENGTH)[:, None])
        return carry, jnp.sum(ys)

    return lambda params, init, xs: run(functools.partial(outer, params), init, xs)


def in_a_checkpointed_branch(run):
    other = lambda *args: jax.tree.map(jnp.ones_like, through(run)(*args))
    branch = jax.checkpoint(lambda *args: jax.lax.cond(args[0][0] < 9, through(run), other, *args))
    return lambda *args: branch(*args)


@jax.custom_vjp
def unusual(x):
    return jnp.sin(x)


unusual.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (3 * cotangent * jnp.cos(x),))


def around_control_flow_and_a_custom_derivative(run):
    def body(w, carry, x):
        carry, y = jax.lax.cond(x[0] > 0, BODY.fun, lambda *args: (args[1], args[2]), w, carry, x)
        return jax.lax.fori_loop(0, 3, lambda _, state: unusual(state) * w, carry), unusual(y)

    return lambda params, init, xs: run(functools.partial(body, params), init, xs)


PROGRAMS = [
    in_a_scan,
    in_itself,
    in_a_checkpointed_branch,
    around_control_flow_and_a_custom_derivative,
]


@functools.cache
def gradient_through(program, run):
    gradient = jax.jit(jax.value_and_grad(lambda args: summed(program(run))(*args)))
    return gradient(BODY.arguments(LENGTH))


@each_loop
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_loops_compose(loop, program):
    assert_same(gradient_through(program, loop.run), gradient_through(program, loop.naive))


@each_loop
def test_linearize(loop):
    args = BODY.arguments(LENGTH)

    def linearized(run):
        out, tangent = jax.linearize(through(run), *args)
        return out, tangent(*args)

    assert_same(linearized(loop.run), linearized(loop.naive))


@each_loop
@pytest.mark.parametrize("mapped", range(3), ids=["parameter", "carry", "xs"])
def test_vmap_over_any_of_the_arguments(loop, mapped):
    args = BODY.arguments(LENGTH)
    axes = tuple(-1 if number == mapped else None for number in range(3))
    batch = lambda x, axis: x if axis is None else jnp.stack([x, 2 * x, -x], axis)
    args = tuple(map(batch, args, axes))
    vmapped = lambda run: jax.jit(jax.vmap(through(run), axes))(*args)
    assert_same(vmapped(loop.run), vmapped(loop.naive))


@each_loop
def test_a_linear_loop_can_be_transposed(loop):
    body = lambda carry, x: (0.5 * carry + x, carry - x)
    xs = jnp.linspace(0.0, 1.0, LENGTH)

    def transpose(run):
        linear = lambda xs: run(body, jnp.zeros(()), xs)
        cotangents = jax.tree.map(jnp.cos, linear(xs))
        return jax.jit(jax.linear_transpose(linear, xs))(cotangents)

    assert_same(transpose(loop.run), transpose(loop.naive))


@each_loop
def test_no_tracer_leaks(loop):
    args = BODY.arguments(LENGTH)
    with checking_leaks():
        jax.jit(jax.grad(summed(through(loop.run))))(*args)


@each_loop
def test_loops_run_without_jit(loop):
    args = BODY.arguments(5)
    with jax.disable_jit():
        assert_same(through(loop.run)(*args), through(loop.naive)(*args))


@each_loop
def test_effects_of_the_body_happen_once_a_step(loop):
    seen = []

    def body(carry, x):
        jax.debug.callback(lambda x: seen.append(int(x)), x, ordered=True)
        return carry + x, carry

    jax.block_until_ready(jax.jit(lambda xs: loop.run(body, 0, xs, reverse=True))(jnp.arange(5)))
    jax.effects_barrier()
    assert seen == [4, 3, 2, 1, 0]
