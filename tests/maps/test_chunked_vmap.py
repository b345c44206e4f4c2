"""`chunked_vmap` equals `jax.vmap`, whatever the chunk size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.experimental import io_callback

import curvax
from helpers import MAPPED, MAPPED_BY_NAME, assert_same, checking_leaks, derivatives, key

lengths = st.integers(0, 9)
sizes = st.one_of(st.none(), st.integers(1, 11))


@pytest.mark.parametrize("case", MAPPED, ids=lambda case: case.name)
@settings(max_examples=4)
@given(length=lengths, size=sizes, checkpoint=st.booleans())
def test_values_and_derivatives_equal_those_of_vmap(case, length, size, checkpoint):
    args = case.arguments(length)
    chunked = curvax.chunked_vmap(case.fun, size, in_axes=(None, 0), checkpoint=checkpoint)
    naive = jax.vmap(case.fun, in_axes=(None, 0))
    assert_same(derivatives(chunked)(*args), derivatives(naive)(*args))


TREE = MAPPED_BY_NAME["tree"]


@functools.cache
def three_trees():
    """Three sets of arguments, and what an outer vmap of the naive program makes of them."""
    args = jax.tree.map(lambda x: np.stack([x, x + 0.5, -x]), TREE.arguments(5))
    return args, jax.vmap(derivatives(jax.vmap(TREE.fun, in_axes=(None, 0))))(*args)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_it_composes_with_an_outer_vmap(size, checkpoint):
    args, expected = three_trees()
    chunked = curvax.chunked_vmap(TREE.fun, size, in_axes=(None, 0), checkpoint=checkpoint)
    assert_same(jax.vmap(derivatives(chunked))(*args), expected)


@settings(max_examples=6)
@given(
    length=st.integers(0, 7),
    size=st.integers(1, 8),
    in_axis=st.integers(-3, 2),
    out_axes=st.tuples(st.integers(-2, 1), st.integers(-3, 2), st.integers(-1, 0)),
)
def test_any_axis_may_be_mapped_and_any_may_come_out(length, size, in_axis, out_axes):
    x = jax.random.normal(key(), (length, 2, 3), jnp.float64)
    y = jax.random.normal(key(1), (2, length), jnp.float64)
    x = jnp.moveaxis(x, 0, in_axis)
    fun = lambda x, y: (x @ jnp.ones(x.shape[1]), {"outer": x * y[:, None], "sum": jnp.sum(x)})
    out_axes = (out_axes[0], {"outer": out_axes[1], "sum": out_axes[2]})
    chunked = curvax.chunked_vmap(fun, size, in_axes=(in_axis, -1), out_axes=out_axes)
    naive = jax.vmap(fun, in_axes=(in_axis, -1), out_axes=out_axes)
    assert_same(derivatives(chunked)(x, y), derivatives(naive)(x, y))


X = np.arange(20.0).reshape(5, 4)
IN_AXES = {
    "one axis for all": (0, (X, 2 * X)),
    "a list": ([0, None], (X, X[0])),
    "None for an argument": ((0, None), (X, X[0])),
    "negative": ((-2, -2), (X, X + 1)),
    "a pytree": (({"a": 0, "b": 1}, None), ({"a": X, "b": X.T}, 3.0)),
    "a prefix of a pytree": ((0, None), ({"a": X, "b": (X, X)}, 3.0)),
    "None within a pytree": (({"a": 0, "b": None}, None), ({"a": X, "b": 2.0}, 3.0)),
    "an empty argument": ((0, None), (X, ())),
}


@pytest.mark.parametrize("name", IN_AXES)
def test_in_axes_takes_what_vmap_takes(name):
    in_axes, args = IN_AXES[name]
    fun = lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(args))
    chunked = curvax.chunked_vmap(fun, 2, in_axes=in_axes)
    assert_same(chunked(*args), jax.vmap(fun, in_axes=in_axes)(*args))


OUT_AXES = {
    "None": (None, lambda x: jnp.ones(2)),
    "None in part": ((0, None), lambda x: (x, jnp.arange(3))),
    "a prefix": ((1, 0), lambda x: (jnp.outer(x, x), {"a": x, "b": (x, x)})),
    "a list of outputs": ([0, -1], lambda x: [x, x]),
}


@pytest.mark.parametrize("name", OUT_AXES)
def test_out_axes_takes_what_vmap_takes(name):
    out_axes, fun = OUT_AXES[name]
    chunked = curvax.chunked_vmap(fun, 2, out_axes=out_axes)
    assert_same(chunked(X), jax.vmap(fun, out_axes=out_axes)(X))


def test_keyword_arguments_are_mapped_over_axis_0():
    fun = lambda x, *, scale: x * scale["a"]
    scale = {"a": jnp.arange(5.0)}
    assert_same(curvax.chunked_vmap(fun, 2)(X, scale=scale), jax.vmap(fun)(X, scale=scale))


def test_arguments_that_are_not_mapped_are_passed_unchanged():
    def fun(x, mode, factor):
        return x * factor if mode == "scale" and factor > 1 else x

    chunked = curvax.chunked_vmap(fun, 2, in_axes=(0, None, None))
    np.testing.assert_array_equal(chunked(X, "scale", 2.0), 2 * X)


DATA = {
    "float32": (jnp.linspace(-1, 1, 14, dtype=jnp.float32).reshape(7, 2), lambda x: jnp.sin(x)),
    "float16": (jnp.linspace(-1, 1, 14, dtype=jnp.float16).reshape(7, 2), lambda x: x * 3),
    "bfloat16": (jnp.linspace(-1, 1, 14, dtype=jnp.bfloat16).reshape(7, 2), lambda x: x * 3),
    "int32": (jnp.arange(14, dtype=jnp.int32).reshape(7, 2), lambda x: x // 3),
    "uint8": (jnp.arange(14, dtype=jnp.uint8).reshape(7, 2), lambda x: x * 3),
    "bool": (jnp.arange(7) % 3 == 0, lambda x: ~x),
    "complex64": (jnp.arange(7, dtype=jnp.complex64) * (1 + 2j), lambda x: x**2),
    "complex128": (jnp.arange(7, dtype=jnp.complex128) * (1 + 2j), lambda x: jnp.exp(x)),
    "keys": (jax.random.split(key(), 7), lambda k: jax.random.split(k, 3)),
    "keys to numbers": (jax.random.split(key(), 7), lambda k: jax.random.normal(k, (2,))),
}


@pytest.mark.parametrize("out_axis", [0, -1])
@pytest.mark.parametrize("name", DATA)
def test_every_dtype_comes_out_bit_for_bit(name, out_axis):
    x, fun = DATA[name]
    with jax.numpy_dtype_promotion("standard"):
        chunked = jax.jit(curvax.chunked_vmap(fun, 3, out_axes=out_axis))(x)
        assert_same(chunked, jax.jit(jax.vmap(fun, out_axes=out_axis))(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["complex128", "float32"])
def test_gradients_of_other_dtypes_equal_those_of_vmap(name):
    x, fun = DATA[name]
    loss = lambda fun: lambda x: jnp.sum(jnp.abs(fun(x)) ** 2)
    with jax.numpy_dtype_promotion("standard"):
        gradient = jax.grad(loss(curvax.chunked_vmap(fun, 2)))(x)
        assert_same(gradient, jax.grad(loss(jax.vmap(fun)))(x), rtol=1e-6)


def test_negative_zero_and_nan_survive():
    x = jnp.array([-0.0, 0.0, jnp.nan, -jnp.inf, -0.0])
    result = curvax.chunked_vmap(lambda x: x, 2)(x)
    np.testing.assert_array_equal(np.signbit(result), np.signbit(x))
    np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.float16])
@pytest.mark.parametrize("order", ["strided", "contiguous"])
def test_subnormal_numbers_survive(dtype, order):
    x = jnp.full(5, jnp.finfo(dtype).smallest_subnormal, dtype)
    for mapped in (
        curvax.chunked_vmap(lambda x: x, 2),
        curvax.micro_vmap(lambda x: x, microbatch_size=2, order=order, num_real_microbatches=3),
    ):
        np.testing.assert_array_equal(mapped(x), x)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_infinite_derivative_is_not_spoilt_by_the_short_chunk(size):
    x = jnp.array([0.0, 1.0, 0.0, 4.0, 0.0])
    gradient = jax.grad(lambda x: jnp.sum(curvax.chunked_vmap(jnp.sqrt, size)(x)))(x)
    np.testing.assert_array_equal(gradient, [np.inf, 0.5, np.inf, 0.25, np.inf])


def test_side_effects_happen_once_for_each_example():
    seen = []
    fun = lambda x: jax.debug.callback(lambda x: seen.append(int(x)), x)
    curvax.chunked_vmap(fun, 2)(jnp.arange(7))
    jax.effects_barrier()
    assert sorted(seen) == list(range(7))


def test_a_function_with_side_effects_is_differentiated():
    shape = jax.ShapeDtypeStruct((), jnp.float64)
    fun = lambda x, k: jnp.sin(x) * io_callback(lambda k: np.float64(k), shape, k)
    x, k = jnp.linspace(0.0, 1.0, 7), jnp.arange(7)
    gradient = jax.grad(lambda x: jnp.sum(curvax.chunked_vmap(fun, 3)(x, k)))(x)
    np.testing.assert_allclose(gradient, np.cos(x) * np.arange(7))


@pytest.mark.parametrize("size", [2, None])
def test_python_numbers_may_be_returned(size):
    chunked = curvax.chunked_vmap(lambda x: (x, 1.0, 2), size, out_axes=(0, None, 0))
    first, constant, second = chunked(X)
    np.testing.assert_array_equal(first, X)
    assert constant == 1.0
    np.testing.assert_array_equal(second, np.full(5, 2))


def test_a_closed_over_tracer_is_differentiated():
    loss = lambda mapped: lambda w: jnp.sum(mapped(lambda x: jnp.tanh(w @ x))(jnp.asarray(X)))
    w = jnp.ones((3, 4))
    chunked = jax.jit(jax.grad(loss(functools.partial(curvax.chunked_vmap, chunk_size=2))))(w)
    assert_same(chunked, jax.grad(loss(jax.vmap))(w))


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: f])
def test_it_works_inside_scan_checkpoint_and_cond(wrap):
    def program(mapped):
        def body(carry, x):
            y = mapped(lambda x: jnp.sin(x) * carry)(x)
            y = jax.lax.cond(carry > 0.5, lambda: y, lambda: 2 * y)
            return carry + jnp.sum(y), y

        return wrap(lambda x: jax.lax.scan(body, 0.3, x))

    x = jnp.linspace(0.0, 1.0, 21).reshape(3, 7)
    chunked = program(functools.partial(curvax.chunked_vmap, chunk_size=3))
    assert_same(derivatives(chunked)(x), derivatives(program(jax.vmap))(x))


def test_no_tracer_is_leaked():
    with checking_leaks():
        jax.jit(jax.grad(lambda x: jnp.sum(curvax.chunked_vmap(jnp.sin, 2)(x))))(jnp.ones(5))


def test_it_runs_without_jit():
    with jax.disable_jit():
        assert_same(curvax.chunked_vmap(jnp.sin, 2)(jnp.ones(5)), jnp.sin(jnp.ones(5)))


def test_the_name_and_signature_of_the_function_are_kept():
    def simulate(x):
        """Says what it does."""
        return x

    chunked = curvax.chunked_vmap(simulate, 2)
    assert chunked.__name__ == "simulate"
    assert chunked.__doc__ == "Says what it does."


@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"memory_budget": "1MB"}])
def test_arguments_that_are_not_mapped_may_be_arrays_of_text(options):
    scaled = lambda x, unit: x * {"m": 1.0, "km": 1000.0}[unit[0]]
    mapped = curvax.chunked_vmap(scaled, in_axes=(0, None), **options)
    for unit, factor in (("m", 1.0), ("km", 1000.0)):
        np.testing.assert_array_equal(
            mapped(jnp.arange(4.0), np.array([unit])), factor * np.arange(4.0)
        )
