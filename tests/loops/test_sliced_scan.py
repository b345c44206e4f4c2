"""`sliced_scan` equals the scan followed by the slice, and computes no output that is dropped."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from curvax import sliced_scan
from curvax.loops.scan_program import ScanProgram
from curvax.loops.sliced_scan import _Kept
from helpers import assert_same
from loops.bodies import (
    BODIES_BY_NAME,
    all_derivatives,
    bodies,
    bounds,
    costly,
    expensive,
    few_unrolls,
    first_derivatives,
    lengths,
    scan_then_slice,
    short_lengths,
    slices,
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
    kept=slices,
    reverse=st.booleans(),
    unroll=unrolls,
    give_length=st.booleans(),
)
@example(body=TREE, length=0, kept=slice(None), reverse=False, unroll=1, give_length=False)
@example(body=TREE, length=12, kept=slice(-2, 1, -3), reverse=True, unroll=5, give_length=False)
@example(body=TREE, length=12, kept=slice(1, -2, 3), reverse=True, unroll=True, give_length=False)
def test_values_equal_the_scan_then_slice(body, length, kept, reverse, unroll, give_length):
    args = body.arguments(length)
    given_length = length if give_length or body.x is None else None
    loop = body.through(sliced_scan, given_length, reverse, unroll, **bounds(kept))
    carry, ys = full_scan(body.name, length, reverse)(*args)
    assert_same(jax.jit(loop)(*args), (carry, jax.tree.map(lambda leaf: leaf[kept], ys)))


@expensive
@given(body=bodies, length=short_lengths, kept=slices, reverse=st.booleans(), unroll=few_unrolls)
def test_derivatives_equal_those_of_the_scan_then_slice(body, length, kept, reverse, unroll):
    args = body.arguments(length)
    loop = body.through(sliced_scan, length, reverse, unroll, **bounds(kept))
    naive = body.through(scan_then_slice, length, reverse, **bounds(kept))
    assert_same(all_derivatives(loop)(*args), all_derivatives(naive)(*args))


@pytest.mark.parametrize(
    ("length", "reverse", "kept"),
    [
        (11, False, slice(1, 9, 3)),
        (13, True, slice(-2, None, -2)),
    ],
)
def test_first_derivatives_by_themselves(length, reverse, kept):
    """Without `vmap`; with few and with many kept outputs."""
    body = BODIES_BY_NAME["recurrence"]
    args = body.arguments(length)
    loop, naive = (
        body.through(loop, None, reverse, **bounds(kept)) for loop in (sliced_scan, scan_then_slice)
    )
    assert_same(first_derivatives(loop)(*args), first_derivatives(naive)(*args))


def test_every_slice_of_short_scans_is_planned_right():
    """All of them, in pure Python: which steps are kept, in the order of running, and where to."""
    ends = [None, *range(-6, 7)]
    steps = [None, *range(-6, 0), *range(1, 7)]
    for length, reverse in itertools.product(range(6), (False, True)):
        program = ScanProgram(lambda carry, x: (carry, x), (), (), length, reverse, ())
        for kept in map(slice, *zip(*itertools.product(ends, ends, steps), strict=True)):
            plan = _Kept.of(program, kept)
            result = [None] * plan.count
            for number in range(plan.count):
                time = plan.first + number * plan.gap
                assert 0 <= time < length
                result[plan.slot(number)] = length - 1 - time if reverse else time
            assert result == list(range(length))[kept]
            if plan.count:
                assert plan.first + (plan.count - 1) * plan.gap + plan.after == length - 1


def kept_by_counting(length, reverse, unroll, kept):
    """For which positions the output is computed, in a run of a compiled `sliced_scan`."""
    computed = []

    def watch(x):
        computed.append(int(x))
        return np.asarray(x)

    def body(carry, x):
        y = jax.pure_callback(watch, jax.ShapeDtypeStruct((), x.dtype), x)
        return jnp.sin(carry + x.astype(carry.dtype)), y

    xs = jnp.arange(length)
    _, ys = jax.jit(lambda xs: sliced_scan(body, 0.0, xs, None, reverse, unroll, **bounds(kept)))(
        xs
    )
    assert_same(ys, xs[kept])
    jax.effects_barrier()
    return computed


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "kept", [slice(3, None, 4), slice(-2, 2, -5), slice(-1, None), slice(0, 0), slice(4, 8)]
)
def test_outputs_outside_the_slice_are_not_computed(kept, reverse, unroll):
    length = 14
    computed = kept_by_counting(length, reverse, unroll, kept)
    assert sorted(computed) == sorted(range(length)[kept])


@pytest.mark.usefixtures("unchecked")
def test_the_bounds_may_be_any_integers():
    body, xs = lambda carry, x: (carry + x, carry), jnp.arange(9)
    bounds = {"start": np.int32(1), "stop": jnp.array(8), "step": np.uint8(3)}
    assert_same(sliced_scan(body, 0, xs, **bounds)[1], jax.lax.scan(body, 0, xs)[1][1:8:3])
