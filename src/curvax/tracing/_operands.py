"""From the operands of a loss tag to the loss.

Inside of loops and of `jax.vmap`, a loss is registered many times at once: its arrays have axes in
front. All of it is one loss, with these axes merged into that of the batch. Inside of `jax.vmap`,
predictions with two axes and more are a batch, and with fewer those of a single example.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from curvax._types import Array
from curvax.graph import Node
from curvax.tags import LossTag

__all__ = ["LossOperands", "mapped_lengths"]

_NUMBERS = ("weight", "variance")
"""Arguments of losses that are numbers, unless they are given for each example."""


class LossOperands:
    """The arrays of one loss: those that depend on parameters, and the others.

    `operands` have `num_loops` axes in front, one for each loop around the tag.
    """

    def __init__(self, node: Node, operands: Sequence[Any], num_loops: int) -> None:
        tag: LossTag = node.equation.primitive
        count = len(tag.parameter_dependants_names)
        in_loops = ((True,) * len(operands),) * num_loops
        stacked = (*in_loops, *node.params["stacked"])
        # A vector inside of vmap is one example's, and not a batch of numbers.
        least_axes = max(tag.least_axes, 2 if node.params["stacked"] else 1)
        shared = {k for k, name in enumerate(node.params["args_names"]) if name in _NUMBERS}
        arrays = _merged(list(map(jnp.asarray, operands)), stacked, count, least_axes, shared)
        self.dependants = tuple(arrays[:count])
        self.others = tuple(arrays[count:])


def mapped_lengths(node: Node) -> tuple[int, ...]:
    """The lengths of the axes of `jax.vmap` that the operands of a loss tag have in front."""
    stacked = node.params["stacked"]
    return tuple(_size(node.inputs, stacked, level) for level in range(len(stacked)))


def _merged(
    arrays: list[Array],
    stacked: Sequence[Sequence[bool]],
    num_dependants: int,
    least_axes: int,
    shared: Collection[int],
) -> list[Array]:
    """All arrays with the axes in front merged into one, along which each has its own part.

    `stacked` says for each such axis which arrays have it. Those that are `shared` may also be
    numbers that are the same everywhere.
    """
    if not stacked:
        return arrays
    sizes = [_size(arrays, stacked, level) for level in range(len(stacked))]
    count = [sum(level[k] for level in stacked) for k in range(len(arrays))]
    full = [_with_all_axes(x, stacked, k, sizes) for k, x in enumerate(arrays)]
    # An example alone, inside of vmap, has no axis of its own for a batch.
    first = full[0]
    has_batch = first.ndim - len(sizes) >= least_axes
    batch = first.shape[len(sizes) : len(sizes) + 1] if has_batch else ()
    merged = []
    for number, (x, own) in enumerate(zip(full, arrays, strict=True)):
        plain = own.ndim - count[number] == 0
        if plain and number >= num_dependants:
            if not count[number] and number in shared:
                merged.append(own)  # A number that is the same everywhere.
                continue
            x = jnp.broadcast_to(x.reshape(*x.shape, *[1] * len(batch)), (*sizes, *batch))
        keep = len(sizes) + (1 if has_batch else 0)
        merged.append(x.reshape(-1, *x.shape[keep:]))
    return merged


def _size(arrays: Sequence[Any], stacked: Sequence[Sequence[bool]], level: int) -> int:
    """The length of an axis in front, from an array that has it."""
    number = stacked[level].index(True)
    before = sum(outer[number] for outer in stacked[:level])
    return arrays[number].shape[before]


def _with_all_axes(
    x: Array, stacked: Sequence[Sequence[bool]], number: int, sizes: Sequence[int]
) -> Array:
    """An array with all axes in front, repeated along those that it does not have."""
    own = [level[number] for level in stacked]
    rest = x.shape[sum(own) :]
    x = jnp.expand_dims(x, [axis for axis, has in enumerate(own) if not has])
    return jnp.broadcast_to(x, (*sizes, *rest))
