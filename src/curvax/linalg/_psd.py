"""Powers of symmetric positive semi-definite matrices plus a multiple of the identity.

A Cholesky factorisation is the fast way to an inverse. Where the condition of a matrix comes near
what its dtype can resolve, what it returns is not accurate any more, or not finite. That is
noticed, and the inverse is then computed from eigenvalues. Without damping, those below what can be
resolved are taken to be just that: the inverse of a singular matrix is large, and not infinite. All
functions take several matrices along axes in front.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.linalg._inverse import positive_inverse

__all__ = [
    "add_identity",
    "per_matrix",
    "psd_eigh",
    "psd_power",
    "spectral_power",
    "told_from_zero",
]


LARGEST_RESIDUAL = 0.05
"""Up to what residual an inverse by factorisation is accepted; see `_residual`.

Measured in float32 for sizes from 64 to 1000, its relative error is then below 10 %. The hardest
spectrum is one half ones and one half tiny: that has such a residual at a condition of 6e4.
Spectra that fall gradually, as those of second moments do, have it at 5e5, with an error of 0.1 %.
"""


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
    # The decomposition takes columns first, so that the transpose is no work.
    values, vectors = jnp.linalg.eigh(jnp.matrix_transpose(matrix), symmetrize_input=False)
    return jnp.maximum(values, 0), vectors


def spectral_power(values: Array, power: float | int, axes: int | tuple[int, ...] = -1) -> Array:
    """Powers of the eigenvalues of a matrix that are not negative; all of them are along `axes`.

    For a negative power, zeros are taken to be as much as the rounding of the largest. If all are
    zero, so are the powers.
    """
    if power >= 0:
        return values**power
    largest = jnp.max(values, axis=axes, keepdims=True, initial=0)
    is_zero = values < jnp.finfo(values.dtype).tiny
    values = jnp.where(is_zero, _resolution(1, values.dtype) * largest, values)
    return jnp.where(values > 0, jnp.where(values > 0, values, 1) ** power, 0)


def told_from_zero(values: Array, identity_weight: ArrayLike, power: float | int) -> Array:
    """Eigenvalues of a dense matrix as they should be for a power with this much damping.

    Without damping and for a negative power, those that cannot be told from zero are taken to be
    the smallest that can. Damping is never changed: with it there are no zeros.
    """
    if power >= 0:
        return values
    largest = jnp.max(values, axis=-1, keepdims=True, initial=0)
    clamped = jnp.maximum(values, _resolution(values.shape[-1], values.dtype) * largest)
    return jnp.where(per_matrix(identity_weight, 1, values.dtype) > 0, values, clamped)


def psd_power(
    matrix: Array, identity_weight: ArrayLike, power: float | int, scale: ArrayLike = 1
) -> Array:
    """`(scale * matrix + identity_weight * identity) ** power`.

    To give a number as a scale takes less memory than to multiply a matrix with it before.
    """
    weight, scale = (jnp.asarray(x).astype(matrix.dtype) for x in (identity_weight, scale))
    if power == 1 or matrix.size == 0:
        return add_identity(_scaled(matrix, scale), weight)
    if power == -1:
        return _inverse(matrix, weight, scale)
    return _by_eigenvalues(matrix, weight, power, scale)


@jax.custom_jvp
def _inverse(matrix: Array, weight: Array, scale: Array) -> Array:
    """The inverse of `scale * matrix + weight * identity`."""
    inverse = positive_inverse(add_identity(_scaled(matrix, scale), weight))
    # What is not finite is not less, either.
    is_good = _residual(matrix, weight, scale, inverse) <= LARGEST_RESIDUAL

    def mended(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        is_good, inverse = carry
        other = _by_eigenvalues(matrix, weight, -1, scale)
        return jnp.ones_like(is_good), jnp.where(is_good[..., None, None], inverse, other)

    # A loop of at most one step. Other than `lax.cond` it does not copy what is good already.
    some_bad = lambda carry: ~jnp.all(carry[0])
    _, inverse = lax.while_loop(some_bad, mended, (is_good, inverse))
    return inverse


@_inverse.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    inverse = _inverse(*primals)
    (matrix, _, scale), (its_own, weight, its_scale) = primals, tangents
    damped = add_identity(_scaled(its_own, scale) + _scaled(matrix, its_scale), weight)
    return inverse, -inverse @ damped @ inverse


def _by_eigenvalues(matrix: Array, weight: Array, power: float | int, scale: Array) -> Array:
    values, vectors = psd_eigh(matrix)
    values = told_from_zero(per_matrix(scale, 1, values.dtype) * values, weight, power)
    values = values + per_matrix(weight, 1, values.dtype)
    half = vectors * jnp.sqrt(spectral_power(values, power))[..., None, :]
    # Not by panels: next to the eigenvectors the time saved is little, and to compile it is not.
    return half @ jnp.matrix_transpose(half)


def _resolution(size: int, dtype: jnp.dtype) -> float:
    """The smallest eigenvalue that can be told from zero, as a part of the largest."""
    return max(8, math.sqrt(size)) * float(jnp.finfo(dtype).eps)


def _residual(matrix: Array, weight: Array, scale: Array, inverse: Array) -> Array:
    """How far `inverse @ damped @ vector` is from a vector of length one; the worse of two.

    One is the column of the matrix where the diagonal is largest. What is wrong with an inverse by
    factorisation shows there: it is as if the matrix had changed by about its rounding. The other
    has a part in all directions, for matrices whose largest column has not.
    """
    largest = jnp.argmax(jnp.diagonal(matrix, axis1=-2, axis2=-1), axis=-1, keepdims=True)
    column = jnp.take_along_axis(matrix, largest[..., None], axis=-2)[..., 0, :]
    any_other = jnp.cos(jnp.arange(matrix.shape[-1], dtype=matrix.dtype) ** 2 + 1)
    vectors = jnp.stack([column, jnp.broadcast_to(any_other, column.shape)], axis=-1)
    # In two steps: squares of what is very large or very small are not numbers any more.
    vectors = _divided(vectors, jnp.max(jnp.abs(vectors), -2, keepdims=True))
    vectors = _divided(vectors, jnp.linalg.norm(vectors, axis=-2, keepdims=True))
    damped = _scaled(matrix @ vectors, scale) + _scaled(vectors, weight)
    return jnp.max(jnp.linalg.norm(inverse @ damped - vectors, axis=-2), axis=-1)


def _scaled(matrix: Array, scale: Array) -> Array:
    return per_matrix(scale, 2, matrix.dtype) * matrix


def _divided(x: Array, size: Array) -> Array:
    return x / jnp.where(size > 0, size, 1)
