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
from curvax.linalg._symmetric import positive_inverse

__all__ = ["add_identity", "per_matrix", "psd_eigh", "psd_power", "spectral_power"]


def add_identity(matrix: Array, weight: ArrayLike) -> Array:
    """`matrix + weight * identity`."""
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return matrix + per_matrix(weight, 2, matrix.dtype) * jnp.broadcast_to(identity, matrix.shape)


def per_matrix(weight: ArrayLike, axes: int, dtype: jnp.dtype) -> Array:
    """A number for all matrices as it is, or one for each with as many axes at its end."""
    weight = jnp.asarray(weight).astype(dtype)
    return weight.reshape(*weight.shape, *[1] * axes) if weight.ndim else weight


def psd_eigh(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues, none of them negative, and eigenvectors, as columns."""
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    return jnp.maximum(values, 0), vectors


def spectral_power(values: Array, power: float | int, axes: int | tuple[int, ...] = -1) -> Array:
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


def psd_power(matrix: Array, identity_weight: ArrayLike, power: float | int) -> Array:
    """`(matrix + identity_weight * identity) ** power`."""
    damped = add_identity(matrix, identity_weight)
    if power == 1:
        return damped
    if power != -1:
        return _by_eigenvalues(matrix, identity_weight, power)
    inverse = positive_inverse(damped)
    condition = _norm(damped) * _norm(inverse)
    # What is not finite is not less, either.
    is_good = jnp.all(2 * condition * _resolution(matrix.shape[-1], matrix.dtype) < 1)
    return lax.cond(is_good, lambda: inverse, lambda: _by_eigenvalues(matrix, identity_weight, -1))


def _by_eigenvalues(matrix: Array, identity_weight: ArrayLike, power: float | int) -> Array:
    values, vectors = psd_eigh(matrix)
    values = values + per_matrix(identity_weight, 1, values.dtype)
    half = vectors * jnp.sqrt(spectral_power(values, power))[..., None, :]
    # Not by panels: next to the eigenvectors the time saved is little, and to compile it is not.
    return half @ jnp.matrix_transpose(half)


def _resolution(size: int, dtype: jnp.dtype) -> float:
    """The smallest eigenvalue that can be told from zero, as a part of the largest.

    `psd_power` accepts an inverse by factorisation up to a condition of one over twice this: in
    float32, 5e5 up to size 64, and 1.3e5 at size 1000. The hardest spectrum for it is one half
    ones, one half as small as that. There, measured for sizes from 128 to 1000, its relative error
    is below 2 %, and its smallest eigenvalue, which is the first to turn negative, is off by 6 %.
    """
    return max(8, math.sqrt(size)) * float(jnp.finfo(dtype).eps)


def _several(axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def _norm(matrix: Array) -> Array:
    """The largest eigenvalue in magnitude, or a little less, by a few steps of iteration."""
    size = matrix.shape[-1]
    # Any vector that is not likely to be orthogonal to what is looked for.
    start = jnp.cos(jnp.arange(size, dtype=matrix.dtype) ** 2 + 1) / size**0.5
    vector = jnp.broadcast_to(start, matrix.shape[:-1])
    length = jnp.ones((*matrix.shape[:-2], 1), matrix.dtype)
    for _ in range(3):
        vector = jnp.einsum("...ij,...j->...i", matrix, vector / jnp.where(length > 0, length, 1))
        length = jnp.linalg.norm(vector, axis=-1, keepdims=True)
    return length[..., 0]
