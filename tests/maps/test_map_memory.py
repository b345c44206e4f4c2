"""Besides inputs and result, a map holds one chunk: asserted from the compiled programs.

Float32 and rows of a few kilobytes, so that what is measured is data, not bookkeeping.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import AccumulationType
from helpers import num_bytes, temporaries

pytestmark = pytest.mark.optimised

WIDTH = 512
LENGTHS = {"divides": 1024, "does not divide": 1021}
SIZE = 32


def arguments(length):
    return jnp.ones(WIDTH, jnp.float32), jnp.ones((length, WIDTH), jnp.float32)


def wide(w, x):
    """As many numbers out as in."""
    return jnp.tanh(jnp.tanh(x * w) * w)


def narrow(w, x):
    """One number out."""
    return jnp.sum(wide(w, x), keepdims=True)


MAPS = {
    "chunked_vmap": lambda fun: (
        lambda w, x: curvax.chunked_vmap(functools.partial(fun, w), SIZE)(x)
    ),
    "micro_vmap": lambda fun: curvax.micro_vmap(fun, (None, 0), microbatch_size=SIZE),
    "micro_vmap contiguous": lambda fun: curvax.micro_vmap(
        fun, (None, 0), microbatch_size=SIZE, order="contiguous"
    ),
    "microbatch": lambda fun: curvax.microbatch(
        jax.vmap(fun, (None, 0)), 1, SIZE, AccumulationType.CONCAT
    ),
}


def lax_map(fun):
    return lambda w, x: jax.lax.map(functools.partial(fun, w), x, batch_size=SIZE)


@functools.cache
def one_chunk(fun):
    """What the function needs for a chunk by itself, with the chunk's input and output."""
    w, x = arguments(SIZE)
    output = jax.eval_shape(jax.vmap(fun, (None, 0)), w, x)
    return temporaries(jax.vmap(fun, (None, 0)), w, x) + num_bytes(x) + num_bytes(output)


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("fun", [wide, narrow])
@pytest.mark.parametrize("name", MAPS)
def test_no_copy_is_made_of_the_output_or_the_input(name, fun, length):
    w, x = arguments(length)
    output = num_bytes(jax.eval_shape(jax.vmap(fun, (None, 0)), w, x))
    # Two chunk sizes mean two bodies, which do not run at the same time.
    assert temporaries(MAPS[name](fun), w, x) <= 2 * one_chunk(fun) + 0.1 * output


@pytest.mark.parametrize("out_axis", [1, -1])
@pytest.mark.parametrize("in_axis", [0, 1])
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_no_copy_is_made_along_other_axes(length, in_axis, out_axis):
    w, x = arguments(length)
    x = jnp.moveaxis(x, 0, in_axis)
    mapped = lambda w, x: curvax.chunked_vmap(
        functools.partial(wide, w), SIZE, in_axes=in_axis, out_axes=out_axis
    )(x)
    assert temporaries(mapped, w, x) <= 3 * one_chunk(wide) + 0.1 * num_bytes(x)


def gradient_of(fun):
    """The cotangents of parameters and inputs for a cotangent of the output."""
    return lambda w, x, cotangent: jax.vjp(fun, w, x)[1](cotangent)


def cotangent_of(fun, length):
    return jnp.ones((length, WIDTH if fun is wide else 1), jnp.float32)


@functools.cache
def gradient_of_lax_map(fun, length):
    """What the gradient needs there."""
    return temporaries(gradient_of(lax_map(fun)), *arguments(length), cotangent_of(fun, length))


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("fun", [wide, narrow])
@pytest.mark.parametrize("name", MAPS)
def test_the_gradient_needs_hardly_more_than_that_of_lax_map(name, fun, length):
    cotangent = cotangent_of(fun, length)
    ours = temporaries(gradient_of(MAPS[name](fun)), *arguments(length), cotangent)
    theirs = gradient_of_lax_map(fun, length)
    chunks = 4 if jax.__version_info__ < (0, 11) else 6  # Later compilers keep a few more copies.
    assert ours <= theirs + chunks * one_chunk(fun) + 0.1 * num_bytes(cotangent)


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("fun", [wide, narrow])
def test_with_checkpoint_the_gradient_holds_one_chunk(fun, length):
    w, x = arguments(length)
    mapped = lambda w, x: curvax.chunked_vmap(functools.partial(fun, w), SIZE, checkpoint=True)(x)
    ours = temporaries(gradient_of(mapped), w, x, cotangent_of(fun, length))
    assert ours <= 8 * one_chunk(fun)
    assert gradient_of_lax_map(fun, length) > 2 * num_bytes(x)


def outer(w, x):
    return jnp.outer(x[:64], w[:64])


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", ["SUM", "MEAN", "RUNNING_MEAN"])
def test_a_reduction_never_holds_the_outputs_of_all_examples(kind, length):
    w, x = arguments(length)
    micro = curvax.micro_vmap(
        outer, (None, 0), microbatch_size=SIZE, accumulator=AccumulationType[kind]
    )
    assert temporaries(micro, w, x) <= 3 * one_chunk(outer)
