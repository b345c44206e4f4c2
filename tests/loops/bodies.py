"""Scan bodies that the tests of the loops share, and what the loops are compared with.

A new line in `BODIES` joins the property tests of all loops.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import settings, strategies as st

import curvax
from helpers import random_like, total


class Body(NamedTuple):
    """A scan body `fun(params, carry, x)`, with the shapes of all three.

    `fixed` goes next to the carry, and is not differentiated.
    """

    name: str
    fun: Callable[[Any, Any, Any], Any]
    params: Any
    carry: Any
    x: Any
    fixed: Any = None

    def arguments(self, length: int) -> tuple[Any, Any, Any]:
        """Parameters, a first carry, and what to scan over."""
        like = _shaped(self.params), _shaped(self.carry), _shaped(self.x, length)
        return random_like(like)

    def through(self, loop: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        """The body run through a loop, as a function of the arguments."""

        def run(params: Any, init: Any, xs: Any) -> Any:
            init = init if self.fixed is None else (init, self.fixed)
            return loop(functools.partial(self.fun, params), init, xs, *args, **options)

        return run


def _shaped(shapes: Any, *leading: int) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct((*leading, *shape), jnp.float64),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _recurrence(w: Any, carry: Any, x: Any) -> Any:
    carry = jnp.sin(w * carry + x) + 0.1 * carry**2
    return carry, carry * jnp.cos(x)


def _tree(params: Any, carry: Any, x: Any) -> Any:
    state, count = carry
    new = jnp.tanh(params["a"] * state["h"] + x["b"] * state["s"])
    y = {"pair": (jnp.outer(new, x["a"]), count), "none": None, "empty": ()}
    state = {"h": new + x["a"], "s": params["b"] * state["s"], "none": None}
    return (state, 3 * count + 1), y


def _without_xs(w: Any, carry: Any, x: Any) -> Any:
    return (jnp.sin(w + carry), carry**2) if x is None else x


BODIES = [
    Body("recurrence", _recurrence, (2,), (2,), (2,)),
    Body(
        "tree",
        _tree,
        {"a": (), "b": ()},
        {"h": (2,), "s": (), "none": None},
        {"a": (2,), "b": ()},
        fixed=jnp.array(1, jnp.int32),
    ),
    Body("without xs", _without_xs, (), (2,), None),
    Body("without outputs", lambda w, carry, x: (jnp.cos(w * carry * x), None), (), (), ()),
    Body("without carry", lambda w, carry, x: (carry, [w * jnp.sin(x)]), (), {}, ()),
    Body("output of parameters only", lambda w, carry, x: (carry * x, w**3), (2,), (), ()),
]
BODIES_BY_NAME = {body.name: body for body in BODIES}

# Most examples are such that something happens: several steps, several chunks, a few kept outputs.
# The others are anything.
bodies = st.sampled_from([*BODIES[:2], *BODIES])
lengths = st.integers(4, 9) | st.integers(0, 12)
unrolls = st.sampled_from([1, 2, 3, 40, False, True])
depths = st.integers(1, 4)
chunk_sizes = st.integers(1, 4) | st.integers(2, 5) | st.integers(1, 14) | st.none()


def _across(low: int | None, high: int | None, step: int | None) -> slice:
    """The slice from a low to a high position, or back if the step is negative."""
    return slice(high, low, step) if step is not None and step < 0 else slice(low, high, step)


_steps = st.integers(-4, 4).filter(bool)
_some = st.builds(_across, st.none() | st.integers(0, 3), st.none() | st.integers(-3, -1), _steps)
_any = st.builds(
    slice,
    *[st.none() | st.integers(-15, 15)] * 2,
    st.none() | _steps | st.sampled_from([-20, 20]),
)
slices = _some | _some | _any

# Each example costs a compilation, of a second or two for derivatives.
costly = settings(max_examples=max(1, settings.default.max_examples // 2))
expensive = settings(max_examples=max(1, settings.default.max_examples // 6))
short_lengths = st.integers(3, 8)
few_unrolls = st.integers(1, 2)


def scan_then_slice(
    f, init, xs, length=None, reverse=False, unroll=1, *, start=None, stop=None, step=None
):
    """What `sliced_scan` equals."""
    carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
    return carry, jax.tree.map(lambda leaf: leaf[start:stop:step], ys)


def bounds(kept: slice) -> dict[str, int | None]:
    """A slice as keyword arguments."""
    return {"start": kept.start, "stop": kept.stop, "step": kept.step}


def all_derivatives(fun: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Values with reverse, forward and forward-over-reverse derivatives, in one program.

    All of it for two sets of arguments, under `jit` and an outer `vmap`.
    """

    def outputs(args: Any) -> tuple[jax.Array, Any]:
        leaves = jax.tree.leaves(fun(*args))
        return total(leaves), [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def compute(*args: Any) -> dict[str, Any]:
        tangents = jax.tree.map(jnp.cos, args)
        gradient = jax.value_and_grad(outputs, has_aux=True)
        values, derivatives = jax.jvp(gradient, (args,), (tangents,))
        return {
            "value": values[0],
            "gradient": values[1],
            "tangent": derivatives[0],
            "forward over reverse": derivatives[1],
        }

    twice = lambda args: jax.tree.map(lambda x: jnp.stack([x, 0.7 - x]), args)
    return lambda *args: jax.jit(jax.vmap(compute))(*twice(args))


def first_derivatives(fun: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Reverse and forward mode, each by itself, under `jit`."""

    def compute(*args: Any) -> dict[str, Any]:
        return {
            "gradient": jax.grad(lambda args: total(fun(*args)))(args),
            "tangent": jax.jvp(fun, args, jax.tree.map(jnp.cos, args)),
        }

    return jax.jit(compute)


class Loop(NamedTuple):
    """A loop with fixed options, and the naive program it equals."""

    run: Callable[..., Any]
    naive: Callable[..., Any]


def _sliced(**kept: int) -> Loop:
    return Loop(
        functools.partial(curvax.sliced_scan, **kept), functools.partial(scan_then_slice, **kept)
    )


def _chunked(size: int) -> Loop:
    return Loop(functools.partial(curvax.checkpoint_chunked_scan, chunk_size=size), jax.lax.scan)


def _nested(levels: int) -> Loop:
    return Loop(functools.partial(curvax.checkpointed_scan, levels=levels), jax.lax.scan)


# For tests of ten steps: some before the first kept output, between, and after the last, which are
# wanted in the opposite order; a size that does not divide the length; loops of 2, 2 and 3 rounds,
# of which the first ends early.
LOOPS = {
    "sliced_scan": _sliced(start=-2, stop=1, step=-3),
    "checkpoint_chunked_scan": _chunked(4),
    "checkpointed_scan": _nested(3),
}
each_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
