"""Powers of symmetric positive semi-definite matrices plus a multiple of the identity.

A Cholesky factorisation is the fast way to an inverse. Where the condition of a matrix comes near
what its dtype can resolve, what it returns is not accurate any more, or not finite. That is
noticed, and the inverse is then computed from eigenvalues. Without damping, those below what can be
resolved are taken to be just that: the inverse of a singular matrix is large, and not infinite. All
functions take several matrices along leading axes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from curvax._cpu import (
    compiled_once,
    one_by_one,
    pad_to_tiles,
    positive_inverse,
    row_products,
    run_if,
)
from curvax._types import Array

LARGEST_RESIDUAL = 0.05
"""Up to what residual an inverse by factorisation is accepted; see `_is_inverse`.

Measured in float32 for sizes from 64 to 512, its relative error is then below 5 %. The hardest
spectrum is one half ones and one half tiny: that has such a residual at a condition of 6e4.
Spectra that fall gradually, as those of second moments do, have it at 5e5, with errors below 1 %.
"""


def add_identity(matrix: Array, weight: ArrayLike) -> Array:
    """Return `matrix + weight * identity`."""
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return matrix + per_matrix(weight, 2, matrix.dtype) * jnp.broadcast_to(identity, matrix.shape)


def diagonal(matrix: Array) -> Array:
    """Return the diagonal of each matrix: `jnp.diagonal`, by a strided slice and no gather."""
    size = matrix.shape[-1]
    return matrix.reshape(*matrix.shape[:-2], size * size)[..., :: size + 1]


def per_matrix(weight: ArrayLike, axes: int, dtype: jnp.dtype) -> Array:
    """Return a scalar as it is, or one number for each matrix with trailing axes of length one."""
    weight = jnp.asarray(weight).astype(dtype)
    return weight.reshape(*weight.shape, *[1] * axes) if weight.ndim else weight


def psd_eigh(matrix: Array) -> tuple[Array, Array]:
    """Return eigenvalues, none of them negative, and eigenvectors, as columns."""
    values, vectors = _eigh(matrix)
    return jnp.maximum(values, 0), vectors


def spectral_power(
    values: Array,
    power: float | int,
    axes: int | tuple[int, ...] = -1,
    *,
    largest: Array | None = None,
) -> Array:
    """Return powers of the eigenvalues of a PSD matrix; all of them are along `axes`.

    For a negative power, zeros are taken to be as much as the rounding of the largest. If all are
    zero, so are the powers.
    """
    if power >= 0:
        return values**power
    if largest is None:
        largest = jnp.max(values, axis=axes, keepdims=True, initial=0)
    is_zero = values < jnp.finfo(values.dtype).tiny
    values = jnp.where(is_zero, _resolution(1, values.dtype) * largest, values)
    return jnp.where(values > 0, jnp.where(values > 0, values, 1) ** power, 0)


def clamp_eigenvalues(
    values: Array,
    identity_weight: ArrayLike,
    power: float | int,
    *,
    largest: Array | None = None,
) -> Array:
    """Clamp the eigenvalues of a dense matrix from below, for a negative power without damping.

    Those that rounding makes indistinguishable from zero become the smallest that are not. With
    damping nothing is clamped: there are no zeros.
    """
    if power >= 0:
        return values
    if largest is None:
        largest = jnp.max(values, axis=-1, keepdims=True, initial=0)
    clamped = jnp.maximum(values, _resolution(values.shape[-1], values.dtype) * largest)
    return jnp.where(per_matrix(identity_weight, 1, values.dtype) > 0, values, clamped)


def psd_power(
    matrix: Array, identity_weight: ArrayLike, power: float | int, scale: ArrayLike = 1
) -> Array:
    """Return `(scale * matrix + identity_weight * identity) ** power`.

    To give a number as a scale takes less memory than to multiply a matrix with it before.
    """
    weight, scale = (jnp.asarray(x).astype(matrix.dtype) for x in (identity_weight, scale))
    if power == 1 or matrix.size == 0:
        return add_identity(_scaled(matrix, scale), weight)
    if power == -1:
        return _inverse(matrix, weight, scale)
    return spectral_of(matrix, weight, scale, power=power)


@jax.custom_jvp
def _inverse(matrix: Array, weight: Array, scale: Array) -> Array:
    """Return the inverse of `scale * matrix + weight * identity`."""
    weight, scale = (jnp.broadcast_to(x, matrix.shape[:-2]) for x in (weight, scale))
    return _padded_inverse(matrix, weight, scale)


@compiled_once
def _padded_inverse(matrix: Array, weight: Array, scale: Array) -> Array:
    size = matrix.shape[-1]
    inverse = checked_inverse(pad_to_tiles(add_identity(_scaled(matrix, scale), weight)), weight)
    return inverse[..., :size, :size]


def checked_inverse(damped: Array, weight: Array) -> Array:
    """Return the inverse of a matrix with `weight` on its diagonal already.

    It is that of the factorisation where this is accurate, else it is computed from eigenvalues.
    """
    inverse = positive_inverse(damped)
    is_good = _is_inverse(damped, inverse)

    def mended(inverse: Array) -> Array:
        other = _by_eigenvalues(damped, weight)
        return other if damped.ndim == 2 else jnp.where(is_good[..., None, None], inverse, other)

    return run_if(~jnp.all(is_good), mended, inverse)


@_inverse.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    inverse = _inverse(*primals)
    (matrix, _, scale), (its_own, weight, its_scale) = primals, tangents
    damped = add_identity(_scaled(its_own, scale) + _scaled(matrix, its_scale), weight)
    return inverse, -_matmul(_matmul(inverse, damped), inverse)


@compiled_once
def spectral_of(matrix: Array, weight: Array, scale: Array, *, power: float | int) -> Array:
    """Return `(scale * matrix + weight * identity) ** power`, by eigenvalues."""
    values, vectors = psd_eigh(matrix)
    values = per_matrix(scale, 1, values.dtype) * values
    return _put_together(values, vectors, weight, power)


@compiled_once
def _by_eigenvalues(damped: Array, weight: Array) -> Array:
    """Return the inverse of a matrix with `weight` on its diagonal already, by eigenvalues."""
    values, vectors = _eigh(damped)
    values = jnp.maximum(values - per_matrix(weight, 1, values.dtype), 0)
    return _put_together(values, vectors, weight, -1)


def _put_together(values: Array, vectors: Array, weight: Array, power: float | int) -> Array:
    """Return a power of a matrix from its eigenvalues, to all of which a weight is added."""
    # Eigenvalues are sorted.
    values = clamp_eigenvalues(values, weight, power, largest=values[..., -1:])
    values = values + per_matrix(weight, 1, values.dtype)
    powers = spectral_power(values, power, largest=values[..., -1:])
    half = vectors * jnp.sqrt(powers)[..., None, :]
    return _matmul(half, jnp.matrix_transpose(half))


def _eigh(matrix: Array) -> tuple[Array, Array]:
    # LAPACK is column-major, so that the transpose costs nothing.
    decompose = lambda x: tuple(jnp.linalg.eigh(x, symmetrize_input=False))
    return one_by_one(decompose, jnp.matrix_transpose(matrix))


def _matmul(x: Array, y: Array) -> Array:
    """Return `x @ y` in the precision of the dtype, which on GPUs and TPUs is not the default."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _resolution(size: int, dtype: jnp.dtype) -> float:
    """Return the smallest eigenvalue that is not rounding, relative to the largest."""
    return max(8, math.sqrt(size)) * float(jnp.finfo(dtype).eps)


@compiled_once
def _is_inverse(matrix: Array, inverse: Array) -> Array:
    """Return whether `vector @ matrix @ inverse` is near the vector, for four vectors.

    Two of them have a component in all directions. The others are what the matrix makes of these,
    so that the largest eigenvalues have most weight. What is wrong with an inverse by factorisation
    shows there: it is as if the matrix had changed by about its rounding.
    """
    columns = np.arange(matrix.shape[-1])
    some = jnp.asarray(np.cos(columns**2 + np.array([[1.0], [2.0]])), matrix.dtype)
    some = jnp.broadcast_to(some, (*matrix.shape[:-2], 2, matrix.shape[-1]))
    products = _matmul(some, matrix)
    # Squares of what is very large or very small are not numbers any more.
    size = jnp.sum(row_products(some, products), axis=-1)[..., None, None]
    others = products / jnp.where(size > 0, size, 1)
    residual_is_small = _are_near(_matmul(products, inverse), some)
    return residual_is_small & _are_near(_matmul(_matmul(others, matrix), inverse), others)


def _are_near(found: Array, vectors: Array) -> Array:
    """Return whether the distance from each vector is finite and a small part of its length."""
    lengths = row_products(vectors, vectors)
    # The square of the distance, to rounding, which is far less than what is small here.
    squares = row_products(found, found) - 2 * row_products(found, vectors) + lengths
    return jnp.all(squares <= LARGEST_RESIDUAL**2 * lengths, axis=-1)


def _scaled(matrix: Array, scale: Array) -> Array:
    return per_matrix(scale, 2, matrix.dtype) * matrix
