"""Symmetric matrices by one triangle: products of a matrix with its transpose, and inverses.

A matrix is cut into a few parts, and what is known by symmetry is not computed. Products of large
dense parts remain, which is what machines are good at. Each cut also makes the program larger and
slower to compile, so there are never many.
"""

import itertools

import jax.numpy as jnp
from jax import lax

from curvax._types import Array

__all__ = ["positive_inverse", "symmetric_product", "triangular_product"]

MOST_PANELS, NARROWEST = 6, 128
"""How a product is cut: more panels save little time, and each takes its time to compile."""

SMALLEST, DEEPEST = 256, 2
"""How an inverse is cut: not below this size, and not in two more often than this."""


def symmetric_product(x: Array, y: Array | None = None) -> Array:
    """`x.T @ x`, or `x.T @ y` if that is known to be symmetric, by one triangle.

    It is computed by panels of rows, each from its diagonal on; what is to the left of it is above
    the diagonal of a panel before. Along axes in front there are several such matrices.
    """
    y = x if y is None else y
    panels: list[tuple[int, Array]] = []
    rows: list[Array] = []
    for start, end in itertools.pairwise(_edges(x.shape[-1])):
        panel = jnp.matrix_transpose(x[..., start:end]) @ y[..., start:]
        known = [jnp.matrix_transpose(p[..., start - at : end - at]) for at, p in panels]
        rows.append(jnp.concatenate([*known, panel], axis=-1))
        panels.append((start, panel))
    return jnp.concatenate(rows, axis=-2)


def triangular_product(lower: Array) -> Array:
    """`lower.T @ lower` of a lower triangular matrix, without what is known to be zero."""
    product = lower[..., :0, :0]
    for start, end in itertools.pairwise(_edges(lower.shape[-1])):
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
    return triangular_product(_factor_and_inverse(matrix, DEEPEST)[1])


def _factor_and_inverse(matrix: Array, cuts: int) -> tuple[Array, Array]:
    """The Cholesky factor L of a matrix [[A, B.T], [B, D]], and the inverse of the factor.

    L is [[K, 0], [M, N]] with M = B inv(K).T, and N is the factor of D - M M.T. Its inverse is
    [[inv(K), 0], [-inv(N) M inv(K), inv(N)]]. Solving by triangular factors is as accurate as a
    factorisation of the whole; products with inverses would lose the root of the condition.
    """
    size = matrix.shape[-1]
    if cuts == 0 or size <= SMALLEST:
        factor = lax.linalg.cholesky(matrix, symmetrize_input=False)
        identity = jnp.broadcast_to(jnp.eye(size, dtype=matrix.dtype), matrix.shape)
        return factor, _solve(factor, identity, left=True)
    half = _part(size, 2)
    first, first_inverse = _factor_and_inverse(matrix[..., :half, :half], cuts - 1)
    below = _solve(first, matrix[..., half:, :half], transposed=True)
    rest = matrix[..., half:, half:] - symmetric_product(jnp.matrix_transpose(below))
    last, last_inverse = _factor_and_inverse(rest, cuts - 1)
    below_inverse = -_solve(last, _solve(first, below), left=True)
    return _lower(first, below, last), _lower(first_inverse, below_inverse, last_inverse)


def _solve(lower: Array, x: Array, left: bool = False, transposed: bool = False) -> Array:
    return lax.linalg.triangular_solve(lower, x, left_side=left, lower=True, transpose_a=transposed)


def _lower(first: Array, below: Array, last: Array) -> Array:
    """The matrix [[first, 0], [below, last]]."""
    above = jnp.concatenate([first, jnp.zeros_like(jnp.matrix_transpose(below))], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([below, last], axis=-1)], axis=-2)


def _edges(size: int) -> list[int]:
    """Where to cut so many columns into panels; the last may be narrower."""
    count = max(1, min(MOST_PANELS, size // NARROWEST))
    return [*range(0, size, _part(size, count)), size]


def _part(size: int, count: int) -> int:
    """The width of one of so many parts: a multiple of what vector instructions take at once."""
    return 16 * max(1, -(-size // (16 * count)))
