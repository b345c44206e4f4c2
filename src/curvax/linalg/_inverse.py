"""Inverses of symmetric positive definite matrices, nearly all of it by products of blocks.

A Cholesky factorisation and what follows from it are computed by blocks, and those on the diagonal
by smaller blocks, down to small matrices. What is known to be zero or to be symmetric is mostly not
computed. On CPUs there are two more reasons for it. Libraries factorise large matrices on threads
of their own, which go on to wait busily and keep a core from the threads that compute products;
they do not for small ones. And what is done to blocks of one shape is compiled once, while products
of any shape are not compiled at all. So nearly all blocks have one shape, whatever the matrices
have; only those at the end are smaller.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax

from curvax._types import Array
from curvax.linalg._one_by_one import one_by_one
from curvax.linalg._shared import shared

__all__ = ["inverse_root", "positive_inverse"]

LARGEST = 256
"""The size of blocks: large enough for products to be fast."""

SMALLEST = 96
"""Up to which size a block is not cut."""

Blocks = dict[tuple[int, int], Array]
"""Blocks of a matrix by row and column; of a triangular one those that are not zero."""


@shared
def positive_inverse(matrix: Array) -> Array:
    """The inverse of a symmetric positive definite matrix.

    It is not finite where a matrix is not positive definite to rounding. Naively,
    `cho_solve((cholesky(matrix), True), identity)`, except that the result is a product of a
    matrix with its transpose, so that it is positive even where it is not accurate. Along axes in
    front there are several matrices.
    """
    edges = range(0, matrix.shape[-1], LARGEST)
    if len(edges) == 1:
        root = inverse_root(matrix)
        return _times_transpose(root, root)
    sizes = [min(LARGEST, matrix.shape[-1] - edge) for edge in edges]
    # Positions that are known to be constants would make the same kernels different ones.
    edges = lax.optimization_barrier([jnp.int32(edge) for edge in edges])
    count = len(edges)
    rest = {
        (i, j): _slice(matrix, edges[i], edges[j], rows=sizes[i], columns=sizes[j])
        for i in range(count)
        for j in range(i + 1)
    }
    roots = _roots(rest, count)
    inverse = jnp.zeros_like(matrix)
    for i in range(count):
        for j in range(i + 1):
            terms = [_times_transpose(roots[i, k], roots[j, k]) for k in range(i, count)]
            inverse = _with_mirrored(inverse, _total(terms), edges[i], edges[j])
    return inverse


@shared
def inverse_root(matrix: Array) -> Array:
    """The transposed inverse of the Cholesky factor: upper triangular, `root @ root.T` inverts."""
    size = matrix.shape[-1]
    if size <= SMALLEST:
        return _small_root(matrix)
    half = 16 * -(-size // 32)  # Vector instructions like multiples of 16.
    first, last = slice(0, half), slice(half, size)
    rest = {
        (0, 0): matrix[..., first, first],
        (1, 0): matrix[..., last, first],
        (1, 1): matrix[..., last, last],
    }
    roots = _roots(rest, 2)
    # Sums of what is padded, as concatenations are compiled anew each time.
    parts = [
        _padded(roots[0, 0], 0, 0, size),
        _padded(roots[0, 1], 0, half, size),
        _padded(roots[1, 1], half, half, size),
    ]
    return _total(parts)


def _roots(matrix: Blocks, count: int) -> Blocks:
    """The blocks of `inverse_root`, from those in the lower triangle of a matrix.

    With the blocks of the Cholesky factor and the inverses of those on its diagonal,
    `root[j, k] = -sum(root[j, m] @ factor[k, m].T for m in range(j, k)) @ root[k, k]`.
    """
    rest, factor, roots = dict(matrix), Blocks(), Blocks()
    for k in range(count):
        root = roots[k, k] = inverse_root(rest[k, k])
        for i in range(k + 1, count):
            factor[i, k] = rest[i, k] @ root
            for j in range(k + 1, i + 1):
                rest[i, j] = rest[i, j] - _times_transpose(factor[i, k], factor[j, k])
        for j in range(k):
            terms = [_times_transpose(roots[j, m], factor[k, m]) for m in range(j, k)]
            roots[j, k] = -_total(terms) @ root
    return roots


def _small_root(matrix: Array) -> Array:
    """The root at once: it is part of the factor of a larger matrix.

    This is [[matrix, 1], [1, c]], with c so large that it is positive definite. To solve with the
    factor instead takes other threads already for matrices of 32 rows.
    """
    size = matrix.shape[-1]
    row, column = jnp.indices((2 * size, 2 * size), sparse=True)
    large = jnp.finfo(matrix.dtype).max / 2
    others = jnp.where(abs(row - column) == size, 1, jnp.where(row == column, large, 0))
    wide = _padded(matrix, 0, 0, 2 * size)
    is_given = jnp.broadcast_to((row < size) & (column < size), wide.shape)
    both = jnp.where(is_given, wide, jnp.broadcast_to(others.astype(matrix.dtype), wide.shape))
    # Factorisations take columns first, so that the transpose is no work.
    factorise = functools.partial(lax.linalg.cholesky, symmetrize_input=False)
    factor = one_by_one(factorise, jnp.matrix_transpose(both))
    return factor[..., size:, :size]


def _padded(block: Array, row: int, column: int, size: int) -> Array:
    """A square matrix with a block at this position and zeros elsewhere."""
    rows, columns = block.shape[-2:]
    rows, columns = (row, size - row - rows, 0), (column, size - column - columns, 0)
    zero = jnp.zeros((), block.dtype)
    return lax.pad(block, zero, [*[(0, 0, 0)] * (block.ndim - 2), rows, columns])


@shared
def _slice(matrix: Array, row: Array, column: Array, *, rows: int, columns: int) -> Array:
    shape = (*matrix.shape[:-2], rows, columns)
    return lax.dynamic_slice(matrix, _indices(matrix, row, column), shape)


@shared
def _with_mirrored(matrix: Array, block: Array, row: Array, column: Array) -> Array:
    """The matrix with a block at this position, and its transpose at the mirrored one."""
    here, there = _indices(matrix, row, column), _indices(matrix, column, row)
    # What is here is zero. It is added as only so the kernel is compiled once.
    added = lax.dynamic_slice(matrix, here, block.shape) + block
    matrix = lax.dynamic_update_slice(matrix, added, here)
    return lax.dynamic_update_slice(matrix, jnp.matrix_transpose(block), there)


def _indices(matrix: Array, row: Array, column: Array) -> list[Array]:
    return [*[jnp.zeros_like(row)] * (matrix.ndim - 2), row, column]


def _times_transpose(x: Array, y: Array) -> Array:
    return x @ jnp.matrix_transpose(y)


def _total(terms: list[Array]) -> Array:
    return functools.reduce(operator.add, terms)
