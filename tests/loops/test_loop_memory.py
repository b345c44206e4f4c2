"""What loops hold: the kept outputs and no copy of the others; for a gradient, √N of N steps.

Asserted from the compiled programs. Float32 and rows of a kilobyte, so that what is measured is
data, not bookkeeping.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from curvax import _jax, checkpoint_chunked_scan, sliced_scan
from helpers import temporaries
from loops.bodies import bounds, scan_then_slice

pytestmark = pytest.mark.optimised

WIDTH = 256
ROW = 4 * WIDTH


def row():
    return jax.ShapeDtypeStruct((WIDTH,), jnp.float32)


def rows(length, given=True):
    return jax.ShapeDtypeStruct((length, WIDTH), jnp.float32) if given else None


def wide(w, carry, x):
    """An output as large as the input."""
    carry = jnp.tanh(w * carry + (1.0 if x is None else x))
    return carry, 2 * carry


def narrow(w, carry, x):
    """An output of one number."""
    carry, y = wide(w, carry, x)
    return carry, jnp.sum(y)


def through(loop, body, *args, **options):
    return lambda w, init, xs: loop(functools.partial(body, w), init, xs, *args, **options)


@pytest.mark.parametrize(
    ("length", "kept", "reverse", "has_xs"),
    [
        (1000, slice(None, None, 100), False, False),
        (1000, slice(None, None, 100), False, True),
        (1000, slice(None, None, 100), True, True),
        (1001, slice(None, None, 100), False, True),
        (1001, slice(37, None, 100), False, True),
        (1001, slice(37, None, 100), True, False),
        (1000, slice(-50, None, -100), True, True),
        (1000, slice(500, 510), False, True),
    ],
)
def test_one_output_of_a_hundred_needs_a_hundredth(length, kept, reverse, has_xs):
    args = row(), row(), rows(length, has_xs)
    sliced, naive = (
        temporaries(through(loop, wide, length, reverse, **bounds(kept)), *args)
        for loop in (sliced_scan, scan_then_slice)
    )
    assert naive > length * ROW
    # The result is of the same size. Apart from it, less than a hundredth; with it, about that.
    assert sliced < 0.01 * naive
    assert sliced + len(range(length)[kept]) * ROW < 0.02 * naive


def scans_of_scans(jaxpr, depth=0):
    """What each scan inside another carries and scans over."""
    for equation in jaxpr.eqns:
        is_scan = equation.primitive is jax.lax.scan_p
        if is_scan and depth:
            fixed = _jax.ScanForm.of(equation).num_consts
            yield from (variable.aval for variable in equation.invars[fixed:])
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from scans_of_scans(inner, depth + is_scan)


def test_the_gradient_does_not_add_up_all_of_xs_for_every_kept_output():
    """That would take quadratic time: no loop inside a loop may carry an array like `xs`."""
    length = 40
    loss = lambda *args: jnp.sum(through(sliced_scan, narrow, step=4)(*args)[1])
    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(row(), row(), rows(length))
    operands = list(scans_of_scans(program.jaxpr))
    assert operands
    assert not [aval for aval in operands if aval.shape and aval.shape[0] == length]


def gradient_needs(loop, length, reverse, arguments, has_xs=True, body=narrow, **options):
    def loss(*args):
        carry, ys = through(loop, body, length, reverse, **options)(*args)
        return jnp.sum(carry) + jnp.sum(ys**2)

    return temporaries(jax.grad(loss, arguments), row(), row(), rows(length, has_xs))


@pytest.mark.parametrize(
    ("arguments", "has_xs", "reverse", "rest"),
    [
        ((0, 1), False, False, 0),
        ((0, 1), True, False, 7),
        ((0, 1, 2), True, True, 0),
        ((0, 1, 2), True, True, 7),
    ],
)
def test_the_gradient_in_chunks_of_sqrt_n_needs_sqrt_n(arguments, has_xs, reverse, rest):
    chunked, plain = [], []
    for length in (256, 1024, 4096):
        args = length + rest, reverse, arguments, has_xs
        size = math.isqrt(length)
        chunked.append(gradient_needs(checkpoint_chunked_scan, *args, chunk_size=size))
        plain.append(gradient_needs(jax.lax.scan, *args))
        assert chunked[-1] < (8 * size + 2 * rest + 4) * ROW
    for smaller, larger in itertools.pairwise(chunked):
        assert 1.7 < larger / smaller < 2.3
    for smaller, larger in itertools.pairwise(plain):
        assert larger / smaller > 3.5


def test_one_chunk_needs_no_more_than_a_scan():
    args = 1000, False, (0, 1, 2)
    whole = gradient_needs(checkpoint_chunked_scan, *args)
    assert whole < 1.1 * gradient_needs(jax.lax.scan, *args)


@pytest.mark.parametrize("step", [13, 100], ids=["many kept", "few kept"])
@pytest.mark.parametrize("arguments", [(0, 1), (0, 1, 2)], ids=["by parameters", "by xs"])
def test_the_gradient_of_a_slice_needs_no_more_than_that_of_the_scan(step, arguments):
    """It saves what a scan saves, but no copy of what it reads, nor dropped outputs."""
    length = 1000
    product = lambda w, carry, x: narrow(w, carry * x, None)
    sliced, naive = (
        gradient_needs(loop, length, False, arguments, body=product, start=7, step=step)
        for loop in (sliced_scan, scan_then_slice)
    )
    # The naive program keeps three rows a step; a copy of what is read would be a fourth.
    assert sliced < 1.15 * naive


@pytest.mark.parametrize(("reverse", "has_xs"), [(False, True), (True, False)])
@pytest.mark.parametrize("size", [1, 50, 64, 2000], ids=lambda size: f"chunks of {size}")
def test_a_remainder_costs_no_copy_of_the_outputs(size, reverse, has_xs):
    length = 1003
    loop = through(checkpoint_chunked_scan, wide, length, reverse, chunk_size=size)
    # What a chunk reads, and what it puts out.
    chunk = 0 if size > length else (1 + has_xs) * size * ROW
    held = temporaries(loop, row(), row(), rows(length, has_xs))
    assert held < 0.1 * length * ROW + chunk
