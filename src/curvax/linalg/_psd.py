"""Powers of symmetric positive semi-definite matrices plus a multiple of the identity.

A Cholesky factorisation is the fast way to an inverse. Where the condition of a matrix comes near
what its dtype can resolve, what it returns is not positive any more, or not finite. That is
noticed, and the inverse is then computed from eigenvalues, those below what can be resolved taken
to be just that: the inverse of a singular matrix is large, and not infinite. All functions take
several matrices along axes in front.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.linalg._symmetric import lower_inverse, symmetric_product, triangular_product

__all__ = ["add_identity", "psd_eigh", "psd_power", "spectral_power"]


def add_identity(matrix: Array, weight: ArrayLike) -> Array:
    """`matrix + weight * identity`."""
    weight = jnp.asarray(weight).astype(matrix.dtype)[..., None, None]
    return matrix + weight * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)


def psd_eigh(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues, none of them negative, and eigenvectors, as columns."""
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    return jnp.maximum(values, 0), vectors


def spectral_power(values: Array, power: float, axes: int | tuple[int, ...] = -1) -> Array:
    """Powers of the eigenvalues of a matrix that are not negative; all of them are along `axes`.

    For a negative power, eigenvalues that cannot be told from zero are taken to be the smallest
    that can. Those of a matrix of zeros are zero.
    """
    if power >= 0:
        return values**power
    size = math.prod(values.shape[axis] for axis in _several(axes))
    largest = jnp.max(values, axis=axes, keepdims=True, initial=0)
    clamped = jnp.maximum(values, _resolution(size, values.dtype) * largest)
    return jnp.where(clamped > 0, jnp.where(clamped > 0, clamped, 1) ** power, 0)


def psd_power(matrix: Array, identity_weight: ArrayLike, power: float) -> Array:
    """`(matrix + identity_weight * identity) ** power`."""
    damped = add_identity(matrix, identity_weight)
    if power == 1:
        return damped
    if power != -1:
        return _by_eigenvalues(matrix, identity_weight, power)
    lower = lax.linalg.cholesky(damped, symmetrize_input=False)
    inverse = triangular_product(lower_inverse(lower))
    condition = _norm(damped) * _norm(inverse)
    # What is not finite is not less, either.
    is_good = jnp.all(2 * condition * _resolution(matrix.shape[-1], matrix.dtype) < 1)
    return lax.cond(is_good, lambda: inverse, lambda: _by_eigenvalues(matrix, identity_weight, -1))


def _by_eigenvalues(matrix: Array, identity_weight: ArrayLike, power: float) -> Array:
    values, vectors = psd_eigh(matrix)
    values = values + jnp.asarray(identity_weight).astype(values.dtype)[..., None]
    half = vectors * jnp.sqrt(spectral_power(values, power))[..., None, :]
    return symmetric_product(jnp.matrix_transpose(half))


def _resolution(size: int, dtype: jnp.dtype) -> float:
    """The smallest eigenvalue that can be told from zero, as a part of the largest."""
    return max(8, math.sqrt(size)) * float(jnp.finfo(dtype).eps)


def _several(axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def _norm(matrix: Array) -> Array:
    """The largest eigenvalue in magnitude, or a little less, by a few steps of iteration."""
    size = matrix.shape[-1]
    # Any vector that is not likely to be orthogonal to what is looked for.
    start = jnp.cos(jnp.arange(size, dtype=matrix.dtype) ** 2 + 1) / size**0.5
    vector = jnp.broadcast_to(start[:, None], (*matrix.shape[:-1], 1))
    length = jnp.ones((*matrix.shape[:-2], 1, 1), matrix.dtype)
    for _ in range(4):
        vector = matrix @ (vector / jnp.where(length > 0, length, 1))
        length = jnp.linalg.norm(vector, axis=(-2, -1), keepdims=True)
    return length[..., 0, 0]
