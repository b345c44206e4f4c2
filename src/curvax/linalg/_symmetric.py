"""Symmetric matrices by one triangle: products of a matrix with its transpose, triangular inverses.

All of it is done by halves: a matrix is cut in two until the parts are small, and what is known by
symmetry, or to be zero, is not computed. Large products of dense parts remain, which is what
machines are good at.
"""

import jax.numpy as jnp
from jax import lax

from curvax._types import Array

__all__ = ["lower_inverse", "symmetric_product", "triangular_product"]

SMALLEST = 128
"""Below this size, doing everything at once is faster."""


def symmetric_product(x: Array, y: Array | None = None) -> Array:
    """`x.T @ x`, or `x.T @ y` if that is known to be symmetric, by one triangle.

    Along axes in front there are several such matrices.
    """
    y = x if y is None else y
    size = x.shape[-1]
    if size <= SMALLEST:
        return _product(x, y)
    half = _half(size)
    first, last = (
        symmetric_product(x[..., :half], y[..., :half]),
        symmetric_product(x[..., half:], y[..., half:]),
    )
    beside = _product(x[..., :half], y[..., half:])
    return _mirrored(first, beside, last)


def lower_inverse(matrix: Array) -> Array:
    """The inverse of a lower triangular matrix."""
    size = matrix.shape[-1]
    if size <= SMALLEST:
        identity = jnp.broadcast_to(jnp.eye(size, dtype=matrix.dtype), matrix.shape)
        return lax.linalg.triangular_solve(matrix, identity, left_side=True, lower=True)
    half = _half(size)
    first = lower_inverse(matrix[..., :half, :half])
    last = lower_inverse(matrix[..., half:, half:])
    below = -(last @ (matrix[..., half:, :half] @ first))
    return _blocks(first, jnp.zeros_like(jnp.matrix_transpose(below)), below, last)


def triangular_product(matrix: Array) -> Array:
    """`matrix.T @ matrix` of a lower triangular matrix."""
    size = matrix.shape[-1]
    if size <= SMALLEST:
        return _product(matrix, matrix)
    half = _half(size)
    below, last = matrix[..., half:, :half], matrix[..., half:, half:]
    first = triangular_product(matrix[..., :half, :half]) + symmetric_product(below)
    return _mirrored(first, _product(below, last), triangular_product(last))


def _half(size: int) -> int:
    """About half of a size: a power of two times the smallest where that is possible."""
    half = SMALLEST
    while 2 * half < size:
        half *= 2
    return half


def _product(x: Array, y: Array) -> Array:
    return jnp.matrix_transpose(x) @ y


def _mirrored(first: Array, beside: Array, last: Array) -> Array:
    return _blocks(first, beside, jnp.matrix_transpose(beside), last)


def _blocks(first: Array, beside: Array, below: Array, last: Array) -> Array:
    above = jnp.concatenate([first, beside], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([below, last], axis=-1)], axis=-2)
