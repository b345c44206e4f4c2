"""Inverses of symmetric positive definite matrices, nearly all of it by products of large parts.

A Cholesky factorisation and what follows from it are cut in two, again and again, down to small
matrices. What is known to be zero or to be symmetric is mostly not computed. On CPUs there is a
second reason for it: libraries factorise large matrices on threads of their own, which go on to
wait busily and keep a core from the threads that compute products. They do not for small ones.
"""

import jax.numpy as jnp
from jax import lax

from curvax._types import Array
from curvax.linalg._symmetric import triangular_product

__all__ = ["inverse_root", "positive_inverse"]

SMALLEST = 96
"""Up to which size a matrix is not cut."""

SMALLEST_TRIANGULAR = 256
"""The same for products and solutions with a triangular matrix: less is saved."""


def positive_inverse(matrix: Array) -> Array:
    """The inverse of a symmetric positive definite matrix.

    It is not finite where a matrix is not positive definite to rounding. Naively,
    `cho_solve((cholesky(matrix), True), identity)`, except that the result is a product of a
    matrix with its transpose, so that it is positive even where it is not accurate. Along axes in
    front there are several matrices.
    """
    return triangular_product(inverse_root(matrix))


def inverse_root(matrix: Array) -> Array:
    """The inverse of the Cholesky factor: lower triangular, with `root @ matrix @ root.T = 1`."""
    root, _ = _root(matrix)
    return root


def _root(matrix: Array) -> tuple[Array, Array | None]:
    """The inverse of the Cholesky factor, and what it needs to be solved with; see `_solved`.

    The factor of [[A, B.T], [B, C]] is [[L, 0], [-K, M]] with `K = -B @ inv(L).T` and M that of
    `C - K @ K.T`. Its inverse is [[inv(L), 0], [inv(M) @ K @ inv(L), inv(M)]].
    """
    size = matrix.shape[-1]
    if size <= SMALLEST:
        return _small_root(matrix), None
    half = _half(size)
    first, inside = _root(matrix[..., :half, :half])
    beside = _solved(-matrix[..., half:, :half], first, inside)
    last, _ = _root(matrix[..., half:, half:] - beside @ jnp.matrix_transpose(beside))
    below = _lower_times(last, _times_lower(beside, first))
    zeros = jnp.zeros((*first.shape[:-1], size - half), matrix.dtype)
    root = jnp.concatenate(
        [jnp.concatenate([first, zeros], -1), jnp.concatenate([below, last], -1)], -2
    )
    return root, beside


def _solved(x: Array, root: Array, beside: Array | None) -> Array:
    """`x @ root.T`, which is a solution with the factor, more accurately."""
    if beside is None or root.shape[-1] <= SMALLEST_TRIANGULAR:
        return x @ jnp.matrix_transpose(root)
    half = beside.shape[-1]
    first = x[..., :half] @ jnp.matrix_transpose(root[..., :half, :half])
    rest = x[..., half:] + first @ jnp.matrix_transpose(beside)
    last = rest @ jnp.matrix_transpose(root[..., half:, half:])
    return jnp.concatenate([first, last], axis=-1)


def _small_root(matrix: Array) -> Array:
    """The same at once: the transposed inverse is part of the factor of a larger matrix.

    This is [[matrix, 1], [1, c]], with c so large that it is positive definite. To solve with the
    factor instead takes other threads already for matrices of 32 rows.
    """
    size = matrix.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(size, dtype=matrix.dtype), matrix.shape)
    large = jnp.finfo(matrix.dtype).max / 2 * identity
    both = jnp.concatenate(
        [jnp.concatenate([matrix, identity], -1), jnp.concatenate([identity, large], -1)], -2
    )
    # Factorisations take columns first, so that both transposes are no work.
    factor = lax.linalg.cholesky(jnp.matrix_transpose(both), symmetrize_input=False)
    return jnp.matrix_transpose(factor[..., size:, :size])


def _times_lower(x: Array, lower: Array) -> Array:
    """`x @ lower`."""
    size = lower.shape[-1]
    if size <= SMALLEST_TRIANGULAR:
        return x @ lower
    half = _half(size)
    parts = x @ lower[..., :half], x[..., half:] @ lower[..., half:, half:]
    return jnp.concatenate(parts, axis=-1)


def _lower_times(lower: Array, x: Array) -> Array:
    """`lower @ x`."""
    size = lower.shape[-1]
    if size <= SMALLEST_TRIANGULAR:
        return lower @ x
    half = _half(size)
    parts = lower[..., :half, :half] @ x[..., :half, :], lower[..., half:, :] @ x
    return jnp.concatenate(parts, axis=-2)


def _half(size: int) -> int:
    """Where to cut: as many small matrices before as after, or one more."""
    return SMALLEST * -(-size // (2 * SMALLEST))
