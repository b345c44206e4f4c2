"""Inverses of symmetric positive definite matrices, on CPUs nearly all of it by products of tiles.

A matrix is cut into tiles of one shape. Its Cholesky factor, the inverse of that and the product of
this with its transpose are computed by steps, each of which makes one tile from others: what is
known to be zero or to be symmetric is mostly not computed. Tiles on the diagonal are cut again,
down to small matrices. The steps are a table. Where there are few, they are written out in the
program, where there are many, a loop goes through them.

Libraries do the same at once, and elsewhere they are asked to. On CPUs there are two reasons not
to. They factorise large matrices on threads of their own, which go on to wait busily and keep a
core from the threads that compute products; they do not for small ones. And what is done to tiles
of one shape is compiled once, while products of any shape are not compiled at all.
"""

import functools
import itertools
import operator
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax._types import Array
from curvax.linalg._one_by_one import one_by_one
from curvax.linalg._shared import shared

__all__ = ["inverse_root", "positive_inverse", "widened"]

LARGEST = 256
"""Up to which size there is one tile: large enough for products to be fast."""

SMALLEST = 96
"""Up to which size a tile on the diagonal is not cut."""

MOST_WRITTEN_OUT = 4
"""Up to how many rows of tiles there is no loop."""

MULTIPLY, ACCUMULATE, ROOT, MIRROR = range(4)
"""What a step makes of two tiles x and y: `x @ y`, `keep * old + sign * x @ y.T`, the
`inverse_root` of x, or `x.T`."""

Step = tuple[int, ...]
"""A kind, what to keep of the old tile, a sign, and the places of the new tile and of x and y."""


def widened(matrix: Array) -> Array:
    """The matrix with some rows and columns more, so that it has tiles of one size.

    On the diagonal they have the first number of the matrix. That is never more than the largest
    eigenvalue nor less than the smallest, so that the condition stays as it is.
    """
    size = matrix.shape[-1]
    count, width = _tiles(size)
    more = count * width - size
    if not more:
        return matrix
    wide = _padded(matrix, 0, 0, size + more)
    row, column = jnp.indices((size + more, size + more), sparse=True)
    is_new = jnp.broadcast_to((row == column) & (row >= size), wide.shape)
    return jnp.where(is_new, jnp.broadcast_to(matrix[..., :1, :1], wide.shape), wide)


@shared
def positive_inverse(matrix: Array) -> Array:
    """The inverse of a symmetric positive definite matrix.

    It is not finite where a matrix is not positive definite to rounding. Naively,
    `cho_solve((cholesky(matrix), True), identity)`, except that the result is a product of a
    matrix with its transpose, so that it is positive even where it is not accurate. Along axes in
    front there are several matrices.
    """
    return lax.platform_dependent(matrix, cpu=_by_tiles, default=_at_once)


def _at_once(matrix: Array) -> Array:
    factor = lax.linalg.cholesky(matrix, symmetrize_input=False)
    identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
    root = lax.linalg.triangular_solve(
        factor, identity, left_side=True, lower=True, transpose_a=True
    )
    return _times_transpose(root, root)


def _by_tiles(matrix: Array) -> Array:
    size = matrix.shape[-1]
    count, _ = _tiles(size)
    if count == 1:
        root = inverse_root(matrix)
        return _times_transpose(root, root)
    invert = _written_out if count <= MOST_WRITTEN_OUT else _in_a_loop
    return invert(widened(matrix))[..., :size, :size]


def _written_out(matrix: Array) -> Array:
    """The inverse by steps that are all in the program, so that some are computed side by side."""
    count, width = _tiles(matrix.shape[-1])
    # Positions that are known to be constants would make the same kernels different ones.
    edges = lax.optimization_barrier([jnp.int32(width * k) for k in range(count)])
    lower = [(i, j) for i in range(count) for j in range(i + 1)]
    tiles: dict[tuple[int, ...], Array] = {}
    tiles |= {(i, j): _tile(matrix, edges[i], edges[j], width=width) for i, j in lower}
    for kind, keep, sign, *places in _steps(count):
        target, x, y = (tuple(places[k : k + 2]) for k in (0, 2, 4))
        if kind == ROOT:
            tiles[target] = inverse_root(tiles[x])
        elif kind == MULTIPLY:
            tiles[target] = tiles[x] @ tiles[y]
        else:
            product = sign * _times_transpose(tiles[x], tiles[y])
            tiles[target] = tiles[target] + product if keep else product
    inverse = jnp.zeros_like(matrix)
    for i, j in lower:
        inverse = _with_mirrored(inverse, tiles[i, j], edges[i], edges[j])
    return inverse


def _in_a_loop(matrix: Array) -> Array:
    """The inverse by one step after the other, in place: a program of one size for all matrices."""
    count, width = _tiles(matrix.shape[-1])
    mirrored = itertools.combinations(range(count), 2)
    steps = [*_steps(count), *((MIRROR, 0, 1, i, j, *(j, i) * 2) for i, j in mirrored)]
    table = np.array(steps, np.int32) * np.array([1, 1, 1, *[width] * 6], np.int32)
    columns = [jnp.asarray(column) for column in table.T]

    def body(number: Array, matrix: Array) -> Array:
        numbers = [lax.dynamic_index_in_dim(x, number, keepdims=False) for x in columns]
        kind, keep, sign = numbers[:3]
        target, x, y = (numbers[k : k + 2] for k in (3, 5, 7))
        tile = lambda place: _tile(matrix, *place, width=width)

        def accumulated(_: None) -> Array:
            product = _times_transpose(tile(x), tile(y))
            return keep.astype(product.dtype) * tile(target) + sign.astype(product.dtype) * product

        found = lax.switch(
            kind,
            [
                lambda _: tile(x) @ tile(y),
                accumulated,
                lambda _: inverse_root(tile(x)),
                lambda _: jnp.matrix_transpose(tile(x)),
            ],
            None,
        )
        return lax.dynamic_update_slice(matrix, found, _indices(matrix, *target))

    return lax.fori_loop(0, len(steps), body, matrix)


@shared
def _tile(matrix: Array, row: Array, column: Array, *, width: int) -> Array:
    shape = (*matrix.shape[:-2], width, width)
    return lax.dynamic_slice(matrix, _indices(matrix, row, column), shape)


@shared
def _with_mirrored(matrix: Array, tile: Array, row: Array, column: Array) -> Array:
    """The matrix with a tile at this position, and its transpose at the mirrored one."""
    here, there = _indices(matrix, row, column), _indices(matrix, column, row)
    # What is here is zero. It is added as only so the kernel is compiled once.
    added = lax.dynamic_slice(matrix, here, tile.shape) + tile
    matrix = lax.dynamic_update_slice(matrix, added, here)
    return lax.dynamic_update_slice(matrix, jnp.matrix_transpose(tile), there)


def _indices(matrix: Array, row: Array, column: Array) -> list[Array]:
    return [*[jnp.zeros_like(row)] * (matrix.ndim - 2), row, column]


def _steps(count: int) -> list[Step]:
    """The steps that invert a matrix of `count` by `count` tiles, in place.

    The result is in the lower triangle.
    """
    return [*_root_steps(count), *_product_steps(count)]


def _root_steps(count: int) -> Iterator[Step]:
    """The root of a matrix.

    The lower triangle becomes that of the Cholesky factor, except that tiles on the diagonal become
    those of the root. The upper triangle becomes the rest of the root, with
    `root[j, k] = -sum(root[j, m] @ factor[k, m].T for m in range(j, k)) @ root[k, k]`.
    """
    for k in range(count):
        yield ROOT, 0, 1, *(k, k) * 3
        for i in range(k + 1, count):
            yield MULTIPLY, 0, 1, i, k, i, k, k, k
            for j in range(k + 1, i + 1):
                yield ACCUMULATE, 1, -1, i, j, i, k, j, k
        for j in range(k):
            for m in range(j, k):
                yield ACCUMULATE, int(m > j), -1, j, k, j, m, k, m
            yield MULTIPLY, 0, 1, j, k, j, k, k, k


def _product_steps(count: int) -> Iterator[Step]:
    """The lower triangle of the root times its transpose.

    The factor is not needed any more. The root is, and on the diagonal until the row is done.
    """
    for j, i in itertools.combinations_with_replacement(range(count), 2):
        for k in range(i, count):
            yield ACCUMULATE, int(k > i), 1, i, j, i, k, j, k


@shared
def inverse_root(matrix: Array) -> Array:
    """The transposed inverse of the Cholesky factor: upper triangular, `root @ root.T` inverts."""
    size = matrix.shape[-1]
    if size <= SMALLEST:
        return _small_root(matrix)
    half = 4 * -(-size // 8)  # Mostly, both halves are of one shape.
    first, last = slice(0, half), slice(half, size)
    root = inverse_root(matrix[..., first, first])
    factor = matrix[..., last, first] @ root
    rest = inverse_root(matrix[..., last, last] - _times_transpose(factor, factor))
    beside = -_times_transpose(root, factor) @ rest
    # Sums of what is padded, as concatenations are compiled anew each time.
    parts = [
        _padded(root, 0, 0, size),
        _padded(beside, 0, half, size),
        _padded(rest, half, half, size),
    ]
    return functools.reduce(operator.add, parts)


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


def _tiles(size: int) -> tuple[int, int]:
    """In how many rows and columns of tiles a matrix is cut, and how wide these are."""
    count = max(1, -(-size // LARGEST))
    return count, 16 * -(-size // (16 * count))


def _times_transpose(x: Array, y: Array) -> Array:
    return x @ jnp.matrix_transpose(y)
