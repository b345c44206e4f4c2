"""`checkpointed_scan` equals `jax.lax.scan`, however deep, and its gradient needs the k-th root.

Memory is asserted from the compiled programs, as in `test_loop_memory.py`: float32 and rows of a
kilobyte, so that what is measured is data, not bookkeeping.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, strategies as st

from curvax import checkpoint_chunked_scan, checkpointed_scan
from curvax.loops.checkpointed_scan import nested_lengths, run_nested
from curvax.loops.scan_program import ScanProgram
from helpers import CountTraces, assert_same, temporaries, total
from loops.bodies import (
    BODIES_BY_NAME,
    all_derivatives,
    bodies,
    costly,
    depths,
    expensive,
    few_unrolls,
    first_derivatives,
    unrolls,
)

pytestmark = pytest.mark.optimised

TREE = BODIES_BY_NAME["tree"]
RECURRENCE = BODIES_BY_NAME["recurrence"]
lengths = st.integers(4, 30) | st.integers(0, 30)

WIDTH = 256
ROW = 4 * WIDTH


class TestLengths:
    @given(length=st.integers(0, 10**6), levels=st.integers(1, 8))
    @example(length=3**5, levels=5)
    @example(length=10**6, levels=6)
    def test_the_loops_are_balanced_and_take_all_steps(self, length, levels):
        found = nested_lengths(length, levels)
        assert 1 <= len(found) <= levels
        assert math.prod(found) >= length
        # A last round is begun only if it is needed.
        assert (found[0] - 1) * math.prod(found[1:]) < max(1, length)
        if levels <= 4:
            assert sum(found) <= 1.3 * levels * length ** (1 / levels) + levels

    @pytest.mark.parametrize(
        ("length", "levels", "expected"),
        [
            (0, 3, (1,)),
            (1, 3, (1,)),
            (2, 4, (2,)),
            (1000, 1, (1000,)),
            (1000, 3, (10, 10, 10)),
            (243, 5, (3, 3, 3, 3, 3)),
        ],
    )
    def test_exact_roots_are_found_and_few_steps_need_few_levels(self, length, levels, expected):
        assert nested_lengths(length, levels) == expected

    def test_a_length_nearby_that_leaves_no_remainder_is_preferred(self):
        assert nested_lengths(1000, 2) == (25, 40)


@functools.cache
def full_scan(name, length, reverse):
    return jax.jit(BODIES_BY_NAME[name].through(jax.lax.scan, length, reverse))


@costly
@given(
    body=bodies,
    length=lengths,
    levels=depths | st.none(),
    reverse=st.booleans(),
    unroll=unrolls,
    give_length=st.booleans(),
)
@example(body=TREE, length=0, levels=3, reverse=False, unroll=1, give_length=False)
@example(body=TREE, length=29, levels=3, reverse=True, unroll=2, give_length=False)
@example(body=TREE, length=27, levels=3, reverse=True, unroll=True, give_length=False)
def test_values_equal_those_of_scan(body, length, levels, reverse, unroll, give_length):
    args = body.arguments(length)
    given_length = length if give_length or body.x is None else None
    loop = body.through(checkpointed_scan, given_length, reverse, unroll, levels=levels)
    assert_same(jax.jit(loop)(*args), full_scan(body.name, length, reverse)(*args))


@expensive
@given(
    body=bodies, length=st.integers(3, 30), levels=depths, reverse=st.booleans(), unroll=few_unrolls
)
@example(body=TREE, length=29, levels=3, reverse=True, unroll=2)
def test_derivatives_equal_those_of_scan(body, length, levels, reverse, unroll):
    args = body.arguments(length)
    loop = body.through(checkpointed_scan, length, reverse, unroll, levels=levels)
    naive = body.through(jax.lax.scan, length, reverse)
    # Thirty steps round a little more than a few.
    assert_same(all_derivatives(loop)(*args), all_derivatives(naive)(*args), 1e-9, 1e-9)


@pytest.mark.parametrize("lengths", [(2, 3, 2), (9, 2, 2), (3, 1, 2), (2, 30), (1, 1, 1)], ids=str)
def test_any_lengths_will_do(lengths):
    """Whether their product is below or above the number of steps."""

    def run(f, init, xs):
        program = ScanProgram.of(f, init, xs, None, True)
        return run_nested(program, lengths, 1)

    args = RECURRENCE.arguments(23)
    naive = RECURRENCE.through(jax.lax.scan, None, True)
    actual = first_derivatives(RECURRENCE.through(run))(*args)
    assert_same(actual, first_derivatives(naive)(*args), 1e-10, 1e-10)


def test_reverse_over_reverse():
    args = RECURRENCE.arguments(11)

    def second(loop):
        gradient = jax.grad(lambda args: total(RECURRENCE.through(loop)(*args)))
        return jax.jit(jax.grad(lambda args: total(gradient(args))))(args)

    loop = functools.partial(checkpointed_scan, levels=3)
    assert_same(second(loop), second(jax.lax.scan), 1e-10, 1e-10)


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_the_body_is_traced_once_at_any_depth(levels):
    body = CountTraces(lambda w, carry, x: (jnp.sin(w * carry + x), carry * x))
    run = lambda w, xs: checkpointed_scan(functools.partial(body, w), 0.5, xs, levels=levels)
    gradient = jax.grad(lambda *args: total(run(*args)))
    jax.jit(gradient).trace(jnp.array(0.3), jnp.linspace(0.0, 1.0, 29))
    assert body.count == 1


def row():
    return jax.ShapeDtypeStruct((WIDTH,), jnp.float32)


def rows(length, given):
    return jax.ShapeDtypeStruct((length, WIDTH), jnp.float32) if given else None


def last_carry(loop, length, reverse=False, **options):
    def run(w, init, xs):
        def body(carry, x):
            return jnp.tanh(w * carry + (1.0 if x is None else x)), None

        return loop(body, init, xs, length, reverse, **options)[0]

    return run


def gradient_needs(loop, length, has_xs=False, arguments=(0, 1), reverse=False, **options):
    run = last_carry(loop, length, reverse, **options)
    loss = lambda *args: jnp.sum(run(*args))
    return temporaries(jax.grad(loss, arguments), row(), row(), rows(length, has_xs))


@pytest.mark.parametrize("has_xs", [False, True], ids=["without xs", "with xs"])
@pytest.mark.parametrize(
    ("lengths", "reverse"),
    [((512, 4096, 32768), False), ((509, 4091, 32749), True)],
    ids=["exact", "remainder"],
)
def test_the_gradient_with_three_levels_needs_the_cube_root(lengths, reverse, has_xs):
    needs = [
        gradient_needs(checkpointed_scan, length, has_xs, reverse=reverse, levels=3)
        for length in lengths
    ]
    for length, need in zip(lengths, needs, strict=True):
        assert need < (8 * length ** (1 / 3) + 16) * ROW
    for smaller, larger in itertools.pairwise(needs):
        assert 1.6 < larger / smaller < 2.3


@pytest.mark.parametrize("length", [4096, 4099])
def test_each_level_needs_less(length):
    needs = [gradient_needs(checkpointed_scan, length, True, levels=k) for k in (1, 2, 3, 4)]
    assert needs[0] > length * ROW
    assert needs[1] < 0.1 * needs[0]
    assert needs[2] < 0.5 * needs[1]
    assert needs[3] < needs[2]


def test_two_levels_need_what_chunks_of_sqrt_n_need():
    nested = gradient_needs(checkpointed_scan, 4096, True)
    chunked = gradient_needs(checkpoint_chunked_scan, 4096, True, chunk_size=64)
    assert nested < 1.1 * chunked


@pytest.mark.parametrize("length", [4096, 4099])
def test_the_gradient_by_xs_holds_no_second_array_like_xs(length):
    need = gradient_needs(checkpointed_scan, length, True, (0, 1, 2), levels=3)
    assert need < 0.2 * length * ROW


@pytest.mark.parametrize("length", [4096, 4099])
def test_forward_mode_holds_no_stack_of_carries(length):
    """Neither without a derivative: no more than what an innermost loop reads."""
    run = last_carry(checkpointed_scan, length, levels=3)
    # Not by `xs`, whose tangents are read one round of the outermost loop at a time.
    tangent = lambda w, init, xs: jax.jvp(lambda *args: run(*args, xs), (w, init), (w, init))
    args = row(), row(), rows(length, True)
    assert temporaries(run, *args) < 40 * ROW
    assert temporaries(tangent, *args) < 60 * ROW
