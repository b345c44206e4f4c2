"""`reshape_batch_axis`: a batch laid out by microbatches."""

from typing import Any

import jax
import jax.numpy as jnp

from curvax._checks import check_size
from curvax._tree import leaf_name
from curvax._types import Array, PyTree
from curvax.batching._arguments import normal_axis

__all__ = ["reshape_batch_axis"]


def reshape_batch_axis(tree: PyTree, microbatch_size: int, axis: int = 0) -> PyTree:
    """Split the batch axis of each leaf in two: microbatches, then the examples of each.

    An axis of N becomes two of `(M, microbatch_size)` in column-major order: microbatch i holds
    examples i, i + M, i + 2M, …, as in `microbatch` with `order="strided"`. So

        reshape_batch_axis(x, size)[i] == x[i::M]

    A batch axis that is sharded over devices becomes sharded over the second of the two axes, and
    each microbatch has examples of every device.

    Arguments:
        tree: a pytree of arrays.
        microbatch_size: examples in a microbatch. It must divide the batch axis.
        axis: the batch axis of every leaf; it may be negative.

    Returns:
        A pytree like `tree` whose leaves have one axis more.

    Raises:
        ValueError: if a leaf has no such axis or `microbatch_size` does not divide it.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import reshape_batch_axis
        >>> reshape_batch_axis(jnp.arange(6), 2)
        Array([[0, 3],
               [1, 4],
               [2, 5]], dtype=int32)
    """
    where = "curvax.reshape_batch_axis"
    size = check_size("microbatch_size", microbatch_size, where)
    if size is None:
        raise TypeError(f"{where}: microbatch_size must be an integer, got None.")

    def split(path: tuple[Any, ...], leaf: Any) -> Array:
        name = leaf_name("tree", path)
        leaf = jnp.asarray(leaf)
        place = normal_axis(axis, leaf.ndim, f"{name} of shape {leaf.shape}", where)
        length = leaf.shape[place]
        if length % size:
            raise ValueError(
                f"{where}: microbatch_size={size} does not divide axis {axis} of {name}, which "
                f"has size {length}. curvax.microbatch and micro_vmap take any size."
            )
        before, after = leaf.shape[:place], leaf.shape[place + 1 :]
        folded = leaf.reshape(*before, size, length // size, *after)
        return jnp.swapaxes(folded, place, place + 1)

    return jax.tree_util.tree_map_with_path(split, tree)
