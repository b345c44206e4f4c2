"""Which rows of a batch are those of a device, where devices share one.

What is drawn for a row depends on its number in the whole batch, and sums over a whole batch are
over all devices. So an estimate is the same on any number of them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvax._types import Array, PyTree

__all__ = ["Share", "row_numbers", "sum_of_shares"]


class Share(NamedTuple):
    """What a device has of a batch: so many examples; and the axis of all devices, if any."""

    num_examples: int
    axis_name: str | None


def row_numbers(count: int, stack: Sequence[int], share: Share) -> Array:
    """The numbers, in the whole batch, of the rows that a loss has here.

    They are along the axes of loops and of `vmap` of these lengths, and then along one of its own.
    One of all these is that of examples, where the parts of devices lie side by side.
    """
    numbers, axis = jnp.arange(count, dtype=jnp.uint32), share.axis_name
    if axis is None:
        return numbers
    part = jnp.uint32(_side_by_side(count, stack, share.num_examples))
    others = jnp.uint32(lax.axis_size(axis) - 1)
    device = lax.axis_index(axis).astype(jnp.uint32)
    return numbers + part * (numbers // part * others + device)


def sum_of_shares(sums: PyTree, axis_name: str | None) -> PyTree:
    """Sums over the batch of a device, as those over the whole batch, for averages of squares.

    The square of the sum over all of n devices is n times what each of them adds to the average.
    """
    if axis_name is None:
        return sums
    scale = lax.axis_size(axis_name) ** -0.5
    return lax.psum(jax.tree.map(lambda x: x * scale, sums), axis_name)


def _side_by_side(count: int, stack: Sequence[int], num_examples: int) -> int:
    """How many rows of a device lie side by side, with those of other devices beside them.

    The axis of examples is one of their number, or else one with several rows for each of them.
    """
    lengths = (*stack, count // max(math.prod(stack), 1))
    fits = [k for k, length in enumerate(lengths) if length == num_examples]
    fits = fits or [k for k, length in enumerate(lengths) if length % max(num_examples, 1) == 0]
    return max(math.prod(lengths[fits[-1] if fits else -1 :]), 1)
