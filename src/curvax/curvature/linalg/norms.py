"""Norms of PSD matrices, of Kronecker products and of block-diagonal matrices."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from curvax._types import Array

NORMS = ("avg_diag", "1_norm", "2_norm", "avg_fro")
"""The names of the norms: see `psd_norm`."""


def psd_norm(matrix: Array, norm_type: str) -> Array:
    """Return a norm of a PSD matrix.

    Arguments:
        matrix: The matrix, the vector of its diagonal, or a scalar for a multiple of the identity.
        norm_type: "avg_diag", the mean of the diagonal; "2_norm", the largest eigenvalue; "1_norm",
            the largest sum of absolute values in a column; or "avg_fro", the Frobenius norm divided
            by the square root of the size.

    Returns:
        A scalar.

    Raises:
        ValueError: If there is no norm of this name.
    """
    matrix = jnp.asarray(matrix)
    is_dense = matrix.ndim == 2
    if norm_type == "avg_diag":
        return jnp.mean(jnp.diagonal(matrix) if is_dense else matrix)
    if norm_type == "1_norm":
        return jnp.max(jnp.sum(jnp.abs(matrix), axis=0) if is_dense else jnp.abs(matrix))
    if norm_type == "2_norm":
        return jnp.linalg.eigvalsh(matrix)[-1] if is_dense else jnp.max(matrix)
    if norm_type == "avg_fro":
        return jnp.linalg.norm(jnp.ravel(matrix)) / math.sqrt(max(len(jnp.atleast_1d(matrix)), 1))
    raise ValueError(f"Unrecognized norm type: {norm_type!r}. Known are {', '.join(NORMS)}.")


def kronecker_norm(factors: Sequence[Array], stack: Sequence[int], norm_type: str) -> Array:
    """Return a norm of a Kronecker product, or of a block-diagonal matrix of such products.

    All norms of `psd_norm` are multiplicative: that of a product is the product of the norms.

    Arguments:
        factors: The factors: dense matrices, or vectors of diagonals.
        stack: The leading axes of the factors, with one product for each element.
        norm_type: The name of a norm.
    """
    flat = [x.reshape(-1, *x.shape[len(stack) :]) for x in factors]
    norms = jnp.ones((), factors[0].dtype)
    for matrices in flat:
        norms = norms * jax.vmap(lambda x: psd_norm(x, norm_type))(matrices)
    return norm_of_blocks(norms, jnp.ones_like(norms), norm_type)


def norm_of_blocks(norms: Array, sizes: Array, norm_type: str) -> Array:
    """Return a norm of a block-diagonal matrix, from the norms and the sizes of its blocks."""
    shares = sizes / jnp.sum(sizes)
    if norm_type == "avg_diag":
        return jnp.sum(shares * norms)
    if norm_type == "avg_fro":
        return jnp.sqrt(jnp.sum(shares * norms**2))
    return jnp.max(norms)
