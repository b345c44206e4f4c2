"""Loops carry whatever a scan carries: any dtype, random keys, Python numbers, own nodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, key
from loops.bodies import each_loop

LENGTH = 10
TOLERANCE = {jnp.bfloat16: 0.05, jnp.float32: 1e-5, jnp.complex64: 1e-5}


def number_body(w, carry, x):
    if jnp.issubdtype(x.dtype, jnp.bool_):
        return carry ^ x, carry & w
    if jnp.issubdtype(x.dtype, jnp.integer):
        return carry * w + x, carry - x
    return jnp.sin(w * carry + x), {"y": carry * jnp.conj(x)}


def numbers(dtype, *shape):
    values = np.cos(np.arange(np.prod(shape))).reshape(shape)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.array(values > 0)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.array(np.round(10 * np.abs(values)), dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * np.sin(3 * values)
    return jnp.array(values, dtype)


@functools.cache
def outputs_of(run, dtype):
    """What a loop makes of numbers, with its gradient if they have one."""
    args = numbers(dtype, 2), numbers(dtype, 2), numbers(dtype, LENGTH, 2)
    through = lambda w, init, xs: run(functools.partial(number_body, w), init, xs)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jax.jit(through)(*args)

    def loss(args):
        result = through(*args)
        square = lambda x: jnp.sum(jnp.real(x * jnp.conj(x)))
        return sum(map(square, jax.tree.leaves(result))), result

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(args)


@each_loop
@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, jnp.bfloat16, jnp.complex64, jnp.int32, jnp.uint8, bool],
)
def test_every_dtype_is_kept(loop, dtype):
    tolerance = TOLERANCE.get(dtype, 1e-12)
    actual, expected = outputs_of(loop.run, dtype), outputs_of(loop.naive, dtype)
    assert_same(actual, expected, rtol=tolerance, atol=tolerance)


@each_loop
def test_complex_numbers_within_a_body_of_real_ones(loop):
    def body(w, carry, x):
        waves = jnp.fft.rfft(carry * x)
        waves = jax.lax.fori_loop(0, 2, lambda _, state: w * jnp.sin(state) * state, waves)
        return jnp.fft.irfft(waves, n=4), jnp.abs(waves * waves)

    def outputs(run):
        loss = lambda w, init, xs: sum(
            map(jnp.sum, jax.tree.leaves(run(functools.partial(body, w), init, xs)))
        )
        args = jnp.array(0.9 + 0.2j), numbers(jnp.float64, 4), numbers(jnp.float64, LENGTH, 4)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)

    assert_same(outputs(loop.run), outputs(loop.naive))


@each_loop
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_zeros_with_a_sign_infinities_nan_and_tiny_numbers_come_out_as_they_are(loop, dtype):
    parts = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-39], np.float32)
    # All pairs, so that complex numbers have each for their real and for their imaginary part.
    pairs = np.stack(np.meshgrid(parts, parts), axis=-1).reshape(-1, 2)
    xs = pairs.view(np.complex64) if dtype == jnp.complex64 else jnp.array(pairs, dtype)
    body = lambda carry, x: (carry, x)
    actual, expected = (np.asarray(run(body, (), xs)[1]) for run in (loop.run, loop.naive))
    as_real = lambda x: x.view(np.float32) if dtype == jnp.complex64 else x.astype(np.float32)
    np.testing.assert_array_equal(as_real(actual), as_real(expected))
    np.testing.assert_array_equal(np.signbit(as_real(actual)), np.signbit(as_real(expected)))


@each_loop
def test_random_keys_go_in_through_and_out(loop):
    def body(w, carry, x):
        noise = jnp.sum(jnp.sin(jax.random.key_data(x["key"]).astype(jnp.float64)))
        state, carried = carry
        return (jnp.sin(w * state + noise), jax.random.fold_in(carried, 3)), {
            "read": x["key"],
            "carried": carried[None],
            "state": state,
        }

    def outputs(run):
        init = jnp.array(0.5), jax.random.key(1, impl="threefry2x32")
        xs = {"key": jax.random.split(jax.random.key(0, impl="rbg"), LENGTH)}

        def loss(w):
            result = run(functools.partial(body, w), init, xs)
            return result[0][0] + jnp.sum(result[1]["state"] ** 2), result

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(0.7)

    assert_same(outputs(loop.run), outputs(loop.naive))


@each_loop
def test_no_random_keys_come_out_of_no_steps(loop):
    keys = jax.random.split(key(), 5)[:0]
    body = lambda carry, x: (carry, x)
    assert_same(loop.run(body, key(), keys), loop.naive(body, key(), keys))


def accumulate(carry, x):
    return carry + x, carry * x


WEAK = {
    "of the dtype that comes back": (0.0, jnp.float64, accumulate),
    "an integer that becomes a float": (2, jnp.float32, accumulate),
    "a float that becomes narrower": (0.5, jnp.bfloat16, accumulate),
    "a float that becomes complex": (0.5, jnp.complex64, accumulate),
    "one that stays weak": (0.5, jnp.float32, lambda carry, x: (2 * carry, carry * x)),
    # The carry is of weak type in the body of a scan throughout, so the output is narrow.
    "one that does not widen an output": (
        0.5,
        jnp.float64,
        lambda carry, x: (carry + x, carry * jnp.ones((), jnp.bfloat16)),
    ),
    "next to others": (
        (1, 0.5, np.float32(2)),
        jnp.float32,
        lambda carry, x: ((carry[0] + 1, carry[1] + x, carry[2] * x), carry),
    ),
}


@each_loop
@pytest.mark.parametrize("name", WEAK)
def test_python_numbers_have_the_dtypes_of_a_scan(loop, name):
    init, dtype, body = WEAK[name]
    xs = jnp.linspace(-1.0, 1.0, LENGTH).astype(dtype)
    with jax.numpy_dtype_promotion("standard"):
        outputs = lambda run: jax.jit(lambda: run(body, init, xs))()
        assert_same(outputs(loop.run), outputs(loop.naive), rtol=0.02)


@each_loop
def test_no_steps_return_the_types_of_a_scan(loop):
    with jax.numpy_dtype_promotion("standard"):
        xs = jnp.zeros((0, 2), jnp.float32)
        body = lambda carry, x: (carry + jnp.sum(x), {"y": (x, carry)})
        assert_same(loop.run(body, 0.0, xs), loop.naive(body, jnp.asarray(0.0), xs))
        assert_same(loop.run(body, 1, xs), loop.naive(body, 1, xs))


@each_loop
def test_numpy_arrays_are_arrays(loop):
    xs = {"a": np.linspace(0.0, 1.0, LENGTH), "b": np.arange(LENGTH)}
    body = lambda carry, x: (carry + x["a"], (x["b"], np.ones(2), 3))
    assert_same(loop.run(body, np.zeros(()), xs), loop.naive(body, np.zeros(()), xs))


@each_loop
def test_constants_become_arrays(loop):
    body = lambda carry, x: (1, (2.0, True, jnp.float32(3)))
    actual = loop.run(body, 0, jnp.zeros(LENGTH))
    assert_same(actual, loop.naive(body, 0, jnp.zeros(LENGTH)))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(actual))


@jax.tree_util.register_pytree_node_class
class Opaque:
    """A node of a pytree that knows no equality and looks into what it is made of."""

    def __init__(self, value):
        if isinstance(value, str):
            raise TypeError("a node must not be made of anything but arrays")
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@each_loop
def test_user_registered_nodes_are_carried(loop):
    body = lambda carry, x: (Opaque(carry.value + x.value), Opaque(carry.value * x.value))
    args = Opaque(jnp.array(0.5)), Opaque(jnp.linspace(0.0, 1.0, LENGTH))
    assert_same(loop.run(body, *args), loop.naive(body, *args))


@each_loop
def test_a_body_need_not_be_hashable(loop):
    class Body:
        __hash__ = None

        def __call__(self, carry, x):
            return accumulate(carry, x)

    xs = jnp.linspace(0.0, 1.0, LENGTH)
    assert_same(loop.run(Body(), jnp.array(0.5), xs), loop.naive(accumulate, jnp.array(0.5), xs))
