"""Positive semi-definite matrices and Kronecker products of them.

A matrix is a two-dimensional array, the vector of its diagonal, or a scalar (1 by 1), as in
kfac_jax. Damping is split between the factors of a Kronecker product by their norms: Martens &
Grosse 2015, *Optimizing Neural Networks with Kronecker-factored Approximate Curvature*, section
6.3, and its extension to more factors (Martens, Ba & Johnson 2018).
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from curvax.curvature.linalg.norms import psd_norm
from curvax.curvature.linalg.psd import psd_eigh, psd_power
from curvax.kfac_jax.utils.types import Array, Numeric, PyTree

_FLAGS = {"special_case_zero_inv": True, "use_cholesky_inversion": False}


def get_special_case_zero_inv() -> bool:
    """Return whether damping alone is used where a factor is zero or not finite."""
    return _FLAGS["special_case_zero_inv"]


def set_special_case_zero_inv(value: bool) -> None:
    """Set whether to use damping alone where a factor is zero or not finite."""
    _FLAGS["special_case_zero_inv"] = bool(value)


def get_use_cholesky_inversion() -> bool:
    """Return the flag that `set_use_cholesky_inversion` sets."""
    return _FLAGS["use_cholesky_inversion"]


def set_use_cholesky_inversion(value: bool) -> None:
    """Set a flag for compatibility.

    curvax always inverts by a Cholesky factorisation that it verifies, and by eigenvalues where
    that fails; so there is nothing to choose.
    """
    _FLAGS["use_cholesky_inversion"] = bool(value)


def stable_sqrt(x: Numeric, max_gradient: float = 1000.0) -> Array:
    """Return the square root, with a derivative of at most `max_gradient`, also at zero."""

    @jax.custom_jvp
    def sqrt(x: Array) -> Array:
        return jnp.sqrt(x)

    @sqrt.defjvp
    def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        y = jnp.sqrt(primals[0])
        return y, tangents[0] / jnp.maximum(2 * y, 1 / max_gradient)

    return sqrt(jnp.asarray(x))


def psd_inv(matrix: Array) -> Array:
    """Return the inverse of a PSD matrix."""
    return psd_power(matrix, 0, -1)


def psd_solve(matrix: Array, vector: Array) -> Array:
    """Solve `matrix @ x = vector` for a PSD matrix."""
    return jnp.linalg.solve(matrix, vector)


def psd_solve_maybe_zero_last_idx(a: Array, b: Array) -> Array:
    """Equal to `psd_solve`, except that a last row and column of zeros gives a last zero."""
    is_zero = a[-1, -1] == 0
    safe = a.at[-1, -1].set(jnp.where(is_zero, 1, a[-1, -1]))
    return psd_solve(safe, b.at[-1].set(jnp.where(is_zero, 0, b[-1])))


def safe_psd_eigh(x: Array, force_on_host: bool = False) -> tuple[Array, Array]:
    """Return eigenvalues, negative ones replaced by zero, and eigenvectors of a PSD matrix.

    Args:
        x: A symmetric matrix.
        force_on_host: Accepted for compatibility; XLA chooses where the decomposition runs.
    """
    del force_on_host
    values, vectors = psd_eigh(x)
    return jnp.maximum(values, 0), vectors


def invert_psd_matrices(matrices: PyTree) -> PyTree:
    """Invert every matrix of a pytree, in the representation that it has."""
    return jax.tree.map(lambda x: psd_inv(x) if jnp.ndim(x) == 2 else 1 / x, matrices)


def inverse_sqrt_psd_matrices(matrices: PyTree) -> PyTree:
    """Return the inverse square root of every matrix of a pytree."""
    power = lambda x: psd_power(x, 0, -0.5)
    return jax.tree.map(lambda x: power(x) if jnp.ndim(x) == 2 else x**-0.5, matrices)


NormType = Literal["2_norm", "avg_diag", "1_norm", "avg_fro"]


def psd_matrix_norm(
    matrix: Array,
    norm_type: str = "avg_diag",
    method_2norm: str = "lobpcg",
    rng_key: Array | None = None,
) -> Numeric:
    """Return a norm of a PSD matrix, or something like one.

    Args:
        matrix: The matrix, the vector of its diagonal, or a scalar.
        norm_type: `"avg_diag"`, the mean of the diagonal; `"1_norm"`; `"2_norm"`, the largest
            eigenvalue; or `"avg_fro"`, the Frobenius norm over the square root of the size.
        method_2norm: Accepted for compatibility. The largest eigenvalue is computed exactly.
        rng_key: Accepted for compatibility.
    """
    del method_2norm, rng_key
    return psd_norm(matrix, norm_type)


def pi_adjusted_kronecker_factors(*factors: Array, damping: Numeric) -> tuple[Array, ...]:
    """Return factors whose Kronecker product is about that of `factors` plus `damping * I`.

    All factors are brought to the same norm (the mean of the diagonal), and each that is larger
    than 1 by 1 gets an equal part of the damping.

    Args:
        factors: PSD matrices: dense, vectors of diagonals, or scalars.
        damping: What is added to the Kronecker product.
    """
    factors = tuple(map(jnp.asarray, factors))
    norms = [psd_matrix_norm(x) for x in factors]
    geometric = jnp.exp(sum(jnp.log(x) for x in norms) / len(norms))
    scaled = [x * (geometric / n) for x, n in zip(factors, norms, strict=True)]
    is_scalar = [x.size == 1 for x in factors]
    if all(is_scalar):
        total = (geometric ** len(factors) + damping) ** (1 / len(factors))
        damped = [jnp.full_like(x, total) for x in factors]
    else:
        left = damping / geometric ** sum(is_scalar)
        part = left ** (1 / (len(factors) - sum(is_scalar)))
        damped = [
            x if scalar else _plus_identity(x, part)
            for x, scalar in zip(scaled, is_scalar, strict=True)
        ]
    if not get_special_case_zero_inv():
        return tuple(damped)
    # A zero or non-finite factor leaves the damping alone.
    is_fine = jnp.all(jnp.asarray([(n > 0) & jnp.isfinite(n) for n in norms]))
    alone = jnp.asarray(damping, geometric.dtype) ** (1 / len(factors))
    return tuple(jnp.where(is_fine, x, _plus_identity(jnp.zeros_like(x), alone)) for x in damped)


def _plus_identity(matrix: Array, weight: Numeric) -> Array:
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype) if matrix.ndim == 2 else 1
    return matrix + weight * identity


def pi_adjusted_kronecker_inverse(*factors: Array, damping: Numeric) -> tuple[Array, ...]:
    """Return factors whose Kronecker product is about the inverse of that of `factors` + damping.

    Args:
        factors: PSD matrices: dense, vectors of diagonals, or scalars.
        damping: What is added to the Kronecker product.
    """
    return invert_psd_matrices(pi_adjusted_kronecker_factors(*factors, damping=damping))


def kronecker_product_mul_v(a: Array, b: Array, v: Array, a_is_symmetric: bool) -> Array:
    """Return `unvec[(a kron b) vec(v)]`, where `vec` stacks columns: `b @ v @ a.T`."""
    return b @ v @ (a if a_is_symmetric else a.T)


def kronecker_eigen_basis_mul_v(q_a: Array, q_b: Array, eigenvalues: Array, v: Array) -> Array:
    """Return `(q_a kron q_b) diagonal(eigenvalues) (q_a kron q_b)^T vec(v)` as a matrix.

    Args:
        q_a: Eigenvectors of the first factor.
        q_b: Eigenvectors of the second factor.
        eigenvalues: A matrix of the shape of `v`.
        v: A matrix, whose columns are stacked.
    """
    return q_b @ (eigenvalues * (q_b.T @ v @ q_a)) @ q_a.T


def kronecker_product_axis_mul_v(
    factors: Sequence[Array | None],
    v: Array,
    axis_groups: Sequence[Sequence[int]] | None = None,
    transpose: bool | Sequence[bool] = False,
) -> Array:
    """Return `kron(*factors) rvec(v)`, where `rvec` flattens row by row, in the shape of `v`.

    Args:
        factors: Square matrices; None stands for the identity.
        v: An array, whose axes the factors act along.
        axis_groups: For each factor, the consecutive axes of `v` that it acts along. By default
            the first factor acts along the first axis, and so on.
        transpose: Whether to transpose the factors: all, or each.
    """
    groups = axis_groups or [[axis] for axis in range(v.ndim)]
    flags = [transpose] * len(factors) if isinstance(transpose, bool) else list(transpose)
    if not len(groups) == len(factors) == len(flags):
        raise ValueError(
            f"There are {len(factors)} factors, {len(groups)} groups of axes and {len(flags)} "
            f"flags for transposition; there must be as many of each."
        )
    if list(itertools.chain(*groups)) != list(range(v.ndim)):
        raise ValueError(f"The groups {groups} must have the axes of {v.shape} in order.")
    result = v.reshape([math.prod(v.shape[axis] for axis in group) for group in groups])
    for axis, (factor, flag) in enumerate(zip(factors, flags, strict=True)):
        if factor is not None:
            product = jnp.tensordot(factor.T if flag else factor, result, axes=(1, axis))
            result = jnp.moveaxis(product, 0, axis)
    return result.reshape(v.shape)


def kronecker_eigen_basis_axis_mul_v(
    q_factors: Sequence[Array],
    eigenvalues: Array,
    v: Array,
    axis_groups: Sequence[Sequence[int]] | None = None,
) -> Array:
    """Return `kron(*q) diag(eigenvalues) kron(*q)^T rvec(v)` in the shape of `v`.

    Args:
        q_factors: Eigenvectors of each factor.
        eigenvalues: An array with one element for each of the product of the bases.
        v: An array, whose axes the factors act along.
        axis_groups: For each factor, the consecutive axes of `v` that it acts along.
    """
    inside = kronecker_product_axis_mul_v(q_factors, v, axis_groups, transpose=True)
    if math.prod(jnp.shape(eigenvalues)) != inside.size:
        raise ValueError(
            f"The eigenvalues array should have the same shape as the projection of `v` onto "
            f"`kron(*factors)`, {inside.shape}, but has {jnp.shape(eigenvalues)}."
        )
    inside = inside * jnp.reshape(eigenvalues, inside.shape)
    return kronecker_product_axis_mul_v(q_factors, inside, axis_groups)


def tnt_scale(factors: Sequence[Array]) -> Numeric:
    """Return what the Kronecker product of factors is multiplied by in TNT's approximation.

    That is `prod(traces) ** (1/n - 1)` (Ren & Goldfarb 2021, *Tensor Normal Training for Deep
    Learning Models*): all factors have the trace of the whole matrix in expectation.
    """
    traces = jnp.asarray([jnp.trace(x) for x in factors])
    return jnp.prod(traces) ** (1 / len(factors) - 1)


def outer_product(*arrays: Array) -> Array:
    """Return the outer product of vectors."""
    result = jnp.ones(())
    for x in arrays:
        result = result[..., None] * x
    return result


def block_permuted(matrix: Array, block_sizes: Sequence[int], block_order: Sequence[int]) -> Array:
    """Permute the blocks of a square matrix, rows and columns alike.

    Args:
        matrix: The matrix.
        block_sizes: The size of each block, in the order that they have in `matrix`.
        block_order: For each block of the result, which block of `matrix` it is.
    """
    starts = [sum(block_sizes[:k]) for k in range(len(block_sizes))]
    rows = [starts[k] + i for k in block_order for i in range(block_sizes[k])]
    return matrix[jnp.asarray(rows)][:, jnp.asarray(rows)]


def rearrange(x: Array, spec: str) -> Array:
    """Permute, split off or merge axes by a pattern such as `"ab -> (ba)"`.

    Each axis of `x` has one letter on the left. Letters in parentheses on the right are merged; an
    empty pair is an axis of size one. Spaces do not matter. einops has more.
    """
    left, right = (side.replace(" ", "") for side in spec.split("->"))
    if (not left.isalpha() and left) or len(set(left)) != len(left) or len(left) != x.ndim:
        raise NotImplementedError(
            f"curvax.kfac_jax.utils.rearrange: {spec!r} must name each of the {x.ndim} axes of the "
            f"array by one letter on the left. Use einops.rearrange for other patterns."
        )
    sizes = dict(zip(left, x.shape, strict=True))
    groups = re.findall(r"\(\w*\)|\w", right)
    merged = [math.prod(sizes[name] for name in group.strip("()")) for group in groups]
    order = [left.index(name) for group in groups for name in group.strip("()")]
    return x.transpose(order).reshape(merged)
