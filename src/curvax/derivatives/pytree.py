"""Matrices over the coordinates of a pytree, taken apart into blocks for its leaves."""

import jax
import jax.numpy as jnp

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.derivatives.arguments import Point


def hessian_to_pytree(H: Array, x: PyTree) -> PyTree:
    """An (n, n) matrix over the coordinates of `x` as a pytree of pytrees, like `jax.hessian`'s.

    Arguments:
        H: a matrix over the coordinates of `x` in the order of `jax.flatten_util.ravel_pytree`,
            as `hessian` and `gauss_newton` return it.
        x: the pytree, or one like it.

    Returns:
        A pytree with the structure of `x` twice: the block of leaves i and j has the shape
        `leaf_i.shape + leaf_j.shape`.

    Raises:
        ValueError: if `H` is not of shape (n, n).

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> x = {"a": jnp.ones(2), "b": 1.0}
        >>> H, _ = curvax.hessian(lambda x: jnp.sum(x["a"]) * x["b"], x)
        >>> curvax.hessian_to_pytree(H, x)["a"]["b"]
        Array([1., 1.], dtype=float32)
    """
    point = Point.of(x)
    if jnp.shape(H) != (point.size, point.size):
        raise ValueError(
            f"{where()}: x has {point.size} coordinates, so H must have the shape ({point.size}, "
            f"{point.size}), got {jnp.shape(H)}."
        )
    rows = [
        H[start : start + size].reshape((*shape, point.size))
        for start, size, shape in zip(point.offsets, point.sizes, point.shapes, strict=True)
    ]
    return jax.tree.unflatten(point.structure, [_split(row, point) for row in rows])


def jacobian_to_pytree(J: PyTree, x: PyTree) -> PyTree:
    """A Jacobian over the coordinates of `x` as pytrees like `x`, like `jax.jacobian`'s.

    Arguments:
        J: an array with a last axis over the coordinates of `x`, or a pytree of these, as
            `jacobian` returns it.
        x: the pytree, or one like it.

    Returns:
        The structure of `J` with that of `x` in place of each array, whose leaves have the shapes
        `array.shape[:-1] + leaf.shape`.

    Raises:
        ValueError: if the last axis of an array is not over the coordinates of `x`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> x = {"a": jnp.ones(2), "b": 1.0}
        >>> J, _ = curvax.jacobian(lambda x: x["a"] * x["b"], x)
        >>> curvax.jacobian_to_pytree(J, x)["b"]
        Array([1., 1.], dtype=float32)
    """
    point = Point.of(x)
    for array in jax.tree.leaves(J):
        if jnp.shape(array)[-1:] != (point.size,):
            raise ValueError(
                f"{where()}: x has {point.size} coordinates, so the last axis of each array of J "
                f"must have that length, got the shape {jnp.shape(array)}."
            )
    return jax.tree.map(lambda array: _split(array, point), J)


def _split(array: Array, point: Point) -> PyTree:
    """The last axis taken apart for the leaves."""
    parts = [
        array[..., start : start + size].reshape((*array.shape[:-1], *shape))
        for start, size, shape in zip(point.offsets, point.sizes, point.shapes, strict=True)
    ]
    return jax.tree.unflatten(point.structure, parts)
