"""Symmetric matrices by one triangle: products of a matrix with its transpose, and inverses.

A matrix is cut into a few parts, and what is known by symmetry is not computed. Products of large
dense parts remain, which is what machines are good at. Each cut also makes the program larger and
slower to compile, so there are never many.
"""

import itertools

import jax.numpy as jnp
from jax import lax

from curvax._types import Array

__all__ = ["lower_inverse", "positive_inverse", "symmetric_product", "triangular_product"]

MOST_PANELS = 6
"""How a product is cut: more panels save little time, and each takes its time to compile."""

NARROWEST, NARROWEST_TRIANGULAR = 128, 80
"""How narrow panels may be; those of triangular matrices save more."""

SMALLEST, DEEPEST = 256, 2
"""How a triangular inverse is cut: not below this size, and not in two more often than this."""


def symmetric_product(x: Array, y: Array | None = None) -> Array:
    """`x.T @ x`, or `x.T @ y` if that is known to be symmetric, by one triangle.

    It is computed by panels of rows, each from its diagonal on; what is to the left of it is above
    the diagonal of a panel before. Along axes in front there are several such matrices.
    """
    y = x if y is None else y
    panels: list[tuple[int, Array]] = []
    rows: list[Array] = []
    for start, end in itertools.pairwise(_edges(x.shape[-1], NARROWEST)):
        panel = jnp.matrix_transpose(x[..., start:end]) @ y[..., start:]
        known = [jnp.matrix_transpose(p[..., start - at : end - at]) for at, p in panels]
        rows.append(jnp.concatenate([*known, panel], axis=-1))
        panels.append((start, panel))
    return jnp.concatenate(rows, axis=-2)


def triangular_product(lower: Array) -> Array:
    """`lower.T @ lower` of a lower triangular matrix, without what is known to be zero."""
    product = lower[..., :0, :0]
    for start, end in itertools.pairwise(_edges(lower.shape[-1], NARROWEST_TRIANGULAR)):
        panel = jnp.matrix_transpose(lower[..., start:, start:end]) @ lower[..., start:, :end]
        beside = jnp.matrix_transpose(panel[..., :start])
        above = jnp.concatenate([product, beside], axis=-1)
        product = jnp.concatenate([above, panel], axis=-2)
    return product


def positive_inverse(matrix: Array) -> Array:
    """The inverse of a symmetric positive definite matrix.

    It is not finite where a matrix is not positive definite to rounding. Naively,
    `cho_solve((cholesky(matrix), True), identity)`, except that the result is a product of a
    matrix with its transpose, so that it is positive even where it is not accurate. Along axes in
    front there are several matrices.
    """
    lower = lax.linalg.cholesky(matrix, symmetrize_input=False)
    return triangular_product(lower_inverse(lower, DEEPEST))


def lower_inverse(lower: Array, cuts: int) -> Array:
    """The inverse of a lower triangular matrix, cut in two so many times.

    That of [[A, 0], [B, C]] is [[inv(A), 0], [-inv(C) B inv(A), inv(C)]]. There are only solutions
    in it, no products: these are as accurate as it gets, and on CPUs they are done by one library,
    whose threads would be in the way of those that compute products.
    """
    size = lower.shape[-1]
    if cuts == 0 or size <= SMALLEST:
        identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
        return _solve(lower, identity, left=True)
    half = _part(size, 2)
    first, last = lower[..., :half, :half], lower[..., half:, half:]
    below = -_solve(last, _solve(first, lower[..., half:, :half], left=False), left=True)
    beside = jnp.zeros_like(jnp.matrix_transpose(below))
    above = jnp.concatenate([lower_inverse(first, cuts - 1), beside], axis=-1)
    below = jnp.concatenate([below, lower_inverse(last, cuts - 1)], axis=-1)
    return jnp.concatenate([above, below], axis=-2)


def _solve(lower: Array, x: Array, left: bool) -> Array:
    """`inv(lower) @ x`, or `x @ inv(lower)`."""
    return lax.linalg.triangular_solve(lower, x, left_side=left, lower=True)


def _edges(size: int, narrowest: int) -> list[int]:
    """Where to cut so many columns into panels; the last may be narrower."""
    count = max(1, min(MOST_PANELS, size // narrowest))
    return [*range(0, size, _part(size, count)), size]


def _part(size: int, count: int) -> int:
    """The width of one of so many parts: a multiple of what vector instructions take at once."""
    return 16 * max(1, -(-size // (16 * count)))
