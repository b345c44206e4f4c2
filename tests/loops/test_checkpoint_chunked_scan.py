"""`checkpoint_chunked_scan` equals `jax.lax.scan`, whatever the chunk size."""

import functools

import jax
from hypothesis import example, given, strategies as st

from curvax import checkpoint_chunked_scan
from helpers import assert_same
from loops.bodies import (
    BODIES_BY_NAME,
    all_derivatives,
    bodies,
    chunk_sizes,
    costly,
    expensive,
    few_unrolls,
    first_derivatives,
    lengths,
    short_lengths,
    unrolls,
)

TREE = BODIES_BY_NAME["tree"]


@functools.cache
def full_scan(name, length, reverse):
    return jax.jit(BODIES_BY_NAME[name].through(jax.lax.scan, length, reverse))


@costly
@given(
    body=bodies,
    length=lengths,
    size=chunk_sizes,
    reverse=st.booleans(),
    unroll=unrolls,
    give_length=st.booleans(),
)
@example(body=TREE, length=0, size=3, reverse=False, unroll=1, give_length=False)
@example(body=TREE, length=12, size=5, reverse=True, unroll=2, give_length=False)
@example(body=TREE, length=12, size=3, reverse=True, unroll=True, give_length=False)
def test_values_equal_those_of_scan(body, length, size, reverse, unroll, give_length):
    args = body.arguments(length)
    given_length = length if give_length or body.x is None else None
    loop = body.through(checkpoint_chunked_scan, given_length, reverse, unroll, chunk_size=size)
    assert_same(jax.jit(loop)(*args), full_scan(body.name, length, reverse)(*args))


@expensive
@given(
    body=bodies, length=short_lengths, size=chunk_sizes, reverse=st.booleans(), unroll=few_unrolls
)
@example(body=TREE, length=8, size=3, reverse=True, unroll=2)
def test_derivatives_equal_those_of_scan(body, length, size, reverse, unroll):
    args = body.arguments(length)
    loop = body.through(checkpoint_chunked_scan, length, reverse, unroll, chunk_size=size)
    naive = body.through(jax.lax.scan, length, reverse)
    assert_same(all_derivatives(loop)(*args), all_derivatives(naive)(*args))


def test_first_derivatives_by_themselves():
    """Without `vmap`."""
    body = BODIES_BY_NAME["recurrence"]
    args = body.arguments(11)
    loop = body.through(checkpoint_chunked_scan, None, True, chunk_size=4)
    naive = body.through(jax.lax.scan, None, True)
    assert_same(first_derivatives(loop)(*args), first_derivatives(naive)(*args))
