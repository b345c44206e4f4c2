"""kfac_jax's `curvature_blocks.utils`: settings, and sums over the axes that were broadcast."""

from collections.abc import Sequence

import jax.numpy as jnp

from curvax._types import Array
from curvax.curvature.blocks.settings import (
    get_default_eigen_decomposition_threshold as get_default_eigen_decomposition_threshold,
    get_max_parallel_elements as get_max_parallel_elements,
    set_default_eigen_decomposition_threshold as set_default_eigen_decomposition_threshold,
    set_max_parallel_elements as set_max_parallel_elements,
)
from curvax.kfac_jax.curvature_blocks.block import to_real_set as to_real_set


def compatible_shapes(ref_shape: Sequence[int], target_shape: Sequence[int]) -> None:
    """Check that an array of the shape `target_shape` can be broadcast to `ref_shape`."""
    if len(target_shape) > len(ref_shape):
        raise ValueError("Target shape should be smaller.")
    pairs = zip(reversed(list(ref_shape)), reversed(list(target_shape)), strict=False)
    if any(target not in (ref, 1) for ref, target in pairs):
        raise ValueError(f"{tuple(target_shape)} is incompatible with {tuple(ref_shape)}.")


def compatible_sum(tensor: Array, target_shape: Sequence[int], skip_axes: Sequence[int]) -> Array:
    """Sum over the axes along which an array of the shape `target_shape` would be broadcast.

    Args:
        tensor: An array.
        target_shape: A shape that can be broadcast to that of the array.
        skip_axes: Axes that are not summed over, such as that of the examples.

    Examples:
        >>> import jax.numpy as jnp
        >>> compatible_sum(jnp.ones((5, 4, 3)), (3,), skip_axes=[0]).shape
        (5, 3)
        >>> compatible_sum(jnp.ones((5, 4, 3)), (1, 3), skip_axes=[0]).shape
        (5, 1, 3)
    """
    compatible_shapes(tensor.shape, target_shape)
    extra = tensor.ndim - len(target_shape)
    stretched = [
        extra + axis
        for axis, size in enumerate(target_shape)
        if size == 1 and tensor.shape[extra + axis] != 1
    ]
    summed = jnp.sum(tensor, [a for a in stretched if a not in skip_axes], keepdims=True)
    return jnp.sum(summed, [axis for axis in range(extra) if axis not in skip_axes])
