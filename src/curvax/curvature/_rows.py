"""Which rows of a batch are those of a device, where devices share one.

What is drawn for a row depends on its number in the whole batch, and sums over a whole batch are
over all devices. So an estimate is the same on any number of them. That a batch is shared is said
around an update, by `shared_batch`, while it is traced.
"""

import contextlib
import math
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvax._types import Array, PyTree

__all__ = ["row_numbers", "shared_batch", "sum_of_shares"]


class _Shared(NamedTuple):
    """The name of a mapped axis of devices, and how many examples each has."""

    axis_name: str
    num_examples: int


_SHARED: ContextVar[_Shared | None] = ContextVar("shared", default=None)


@contextlib.contextmanager
def shared_batch(axis_name: str | None, num_examples: int) -> Generator[None]:
    """Within, devices of a mapped axis have so many examples each of one batch."""
    token = _SHARED.set(None if axis_name is None else _Shared(axis_name, num_examples))
    try:
        yield
    finally:
        _SHARED.reset(token)


def row_numbers(count: int, stack: Sequence[int]) -> Array:
    """The numbers, in the whole batch, of the rows that a loss has here.

    They are along the axes of loops and of `vmap` of these lengths, and then along one of its own.
    One of all these is that of examples, where the parts of devices lie side by side.
    """
    numbers = jnp.arange(count, dtype=jnp.uint32)
    shared = _SHARED.get()
    if shared is None:
        return numbers
    part = jnp.uint32(_side_by_side(count, stack, shared.num_examples))
    others = jnp.uint32(lax.axis_size(shared.axis_name) - 1)
    device = lax.axis_index(shared.axis_name).astype(jnp.uint32)
    return numbers + part * (numbers // part * others + device)


def sum_of_shares(sums: PyTree) -> PyTree:
    """Sums over the batch of a device, as those over the whole batch, for averages of squares.

    The square of the sum over all of n devices is n times what each of them adds to the average.
    """
    shared = _SHARED.get()
    if shared is None:
        return sums
    scale = lax.axis_size(shared.axis_name) ** -0.5
    return lax.psum(jax.tree.map(lambda x: x * scale, sums), shared.axis_name)


def _side_by_side(count: int, stack: Sequence[int], num_examples: int) -> int:
    """How many rows of a device lie side by side, with those of other devices beside them.

    The axis of examples is one of their number, or else one with several rows for each of them.
    """
    lengths = (*stack, count // max(math.prod(stack), 1))
    fits = [k for k, length in enumerate(lengths) if length == num_examples]
    fits = fits or [k for k, length in enumerate(lengths) if length % max(num_examples, 1) == 0]
    return max(math.prod(lengths[fits[-1] if fits else -1 :]), 1)
