"""Powers of symmetric positive semi-definite matrices plus a multiple of the identity.

Inverses come from a Cholesky factorisation. Its result is inaccurate or not finite if the condition
number of the matrix approaches the inverse of the machine epsilon. A residual check detects this,
and the inverse is then computed from eigenvalues. Without damping, eigenvalues below the resolution
of the dtype are clamped to it: the inverse of a singular matrix is large but finite. All functions
accept several matrices along leading axes.
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
"""Largest residual at which an inverse by factorisation is accepted; see `_is_inverse`.

In float32, for sizes from 64 to 512, the measured relative error is then below 5 %. The hardest
spectrum has half of its eigenvalues one and the other half tiny: it reaches this residual at a
condition number of 6e4. Spectra that decay gradually, as those of second moments do, reach it at
5e5, with errors below 1 %.
"""


def add_identity(matrix: Array, weight: ArrayLike) -> Array:
    """Return `matrix + weight * identity`."""
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return matrix + per_matrix(weight, 2, matrix.dtype) * jnp.broadcast_to(identity, matrix.shape)


def diagonal(matrix: Array) -> Array:
    """Return the diagonal of each matrix.

    Equal to `jnp.diagonal`, except that it is a strided slice and not a gather.
    """
    size = matrix.shape[-1]
    return matrix.reshape(*matrix.shape[:-2], size * size)[..., :: size + 1]


def per_matrix(weight: ArrayLike, axes: int, dtype: jnp.dtype) -> Array:
    """Cast a weight; if there is one for each matrix, append `axes` axes of length one."""
    weight = jnp.asarray(weight).astype(dtype)
    return weight.reshape(*weight.shape, *[1] * axes) if weight.ndim else weight


def psd_eigh(matrix: Array) -> tuple[Array, Array]:
    """Return eigenvalues, clamped to be non-negative, and eigenvectors, as columns."""
    values, vectors = _eigh(matrix)
    return jnp.maximum(values, 0), vectors


def spectral_power(
    values: Array,
    power: float | int,
    axes: int | tuple[int, ...] = -1,
    *,
    largest: Array | None = None,
) -> Array:
    """Return powers of the eigenvalues of a PSD matrix, which are along `axes`.

    For a negative power, zeros are replaced by the resolution of the dtype times the largest
    eigenvalue. If all eigenvalues are zero, so are the powers.

    Arguments:
        values: The eigenvalues of each matrix.
        power: Any real number.
        axes: The axes along which the eigenvalues of one matrix are.
        largest: The largest eigenvalue of each matrix, if it is known.
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

    Eigenvalues that rounding makes indistinguishable from zero become the smallest distinguishable
    one. With damping none is clamped, because none is zero.

    Arguments:
        values: The eigenvalues of each matrix, along the last axis.
        identity_weight: The damping: one number, or one for each matrix.
        power: The power that will be computed.
        largest: The largest eigenvalue of each matrix, if it is known.
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

    Passing `scale` takes less memory than scaling the matrix before the call.
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
    """Return the inverse of a matrix whose diagonal already includes `weight`.

    The inverse is that of the factorisation if it is accurate, otherwise that from eigenvalues.
    """
    inverse = positive_inverse(damped)
    is_good = _is_inverse(damped, inverse)

    def corrected(inverse: Array) -> Array:
        spectral = _by_eigenvalues(damped, weight)
        if damped.ndim == 2:
            return spectral
        return jnp.where(is_good[..., None, None], inverse, spectral)

    return run_if(~jnp.all(is_good), corrected, inverse)


@_inverse.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    # With A = scale * matrix + weight * identity, d(A⁻¹) = -A⁻¹ dA A⁻¹.
    inverse = _inverse(*primals)
    (matrix, _, scale), (d_matrix, d_weight, d_scale) = primals, tangents
    d_damped = add_identity(_scaled(d_matrix, scale) + _scaled(matrix, d_scale), d_weight)
    return inverse, -_matmul(_matmul(inverse, d_damped), inverse)


@compiled_once
def spectral_of(matrix: Array, weight: Array, scale: Array, *, power: float | int) -> Array:
    """Return `(scale * matrix + weight * identity) ** power`, from eigenvalues."""
    values, vectors = psd_eigh(matrix)
    values = per_matrix(scale, 1, values.dtype) * values
    return _from_eigenvalues(values, vectors, weight, power)


@compiled_once
def _by_eigenvalues(damped: Array, weight: Array) -> Array:
    """Return the inverse of a matrix whose diagonal already includes `weight`."""
    values, vectors = _eigh(damped)
    values = jnp.maximum(values - per_matrix(weight, 1, values.dtype), 0)
    return _from_eigenvalues(values, vectors, weight, -1)


def _from_eigenvalues(values: Array, vectors: Array, weight: Array, power: float | int) -> Array:
    """Return `(matrix + weight * identity) ** power` from the eigenvalues of `matrix`."""
    # `eigh` sorts eigenvalues in ascending order.
    values = clamp_eigenvalues(values, weight, power, largest=values[..., -1:])
    values = values + per_matrix(weight, 1, values.dtype)
    powers = spectral_power(values, power, largest=values[..., -1:])
    half = vectors * jnp.sqrt(powers)[..., None, :]
    return _matmul(half, jnp.matrix_transpose(half))


def _eigh(matrix: Array) -> tuple[Array, Array]:
    # LAPACK is column-major, so the transpose is free.
    decompose = lambda x: tuple(jnp.linalg.eigh(x, symmetrize_input=False))
    return one_by_one(decompose, jnp.matrix_transpose(matrix))


def _matmul(x: Array, y: Array) -> Array:
    """Return `x @ y` in the full precision of the dtype, which GPUs and TPUs do not default to."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _resolution(size: int, dtype: jnp.dtype) -> float:
    """Return the smallest eigenvalue above rounding, relative to the largest."""
    return max(8, math.sqrt(size)) * float(jnp.finfo(dtype).eps)


@compiled_once
def _is_inverse(matrix: Array, inverse: Array) -> Array:
    """Return whether `vector @ matrix @ inverse` is close to the vector, for four vectors.

    Two vectors have components in all directions. The other two are their products with the matrix,
    which weights the largest eigenvalues most. The backward error of a factorisation is about the
    rounding of the matrix, that is of its largest eigenvalues, and shows there.
    """
    columns = np.arange(matrix.shape[-1])
    first = jnp.asarray(np.cos(columns**2 + np.array([[1.0], [2.0]])), matrix.dtype)
    first = jnp.broadcast_to(first, (*matrix.shape[:-2], 2, matrix.shape[-1]))
    products = _matmul(first, matrix)
    # Normalised, because squares of very large or very small numbers overflow or underflow.
    size = jnp.sum(row_products(first, products), axis=-1)[..., None, None]
    second = products / jnp.where(size > 0, size, 1)
    first_is_close = _are_close(_matmul(products, inverse), first)
    return first_is_close & _are_close(_matmul(_matmul(second, matrix), inverse), second)


def _are_close(found: Array, vectors: Array) -> Array:
    """Return whether the distance from each vector is finite and small relative to its length."""
    lengths = row_products(vectors, vectors)
    # |f - v|² = |f|² - 2 f·v + |v|². Its rounding error is far below the tolerance.
    squares = row_products(found, found) - 2 * row_products(found, vectors) + lengths
    return jnp.all(squares <= LARGEST_RESIDUAL**2 * lengths, axis=-1)


def _scaled(matrix: Array, scale: Array) -> Array:
    return per_matrix(scale, 2, matrix.dtype) * matrix
