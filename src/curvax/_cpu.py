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
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax import _jax
from curvax._types import Array, PyTree

__all__ = [
    "all_finite",
    "inverse_root",
    "one_by_one",
    "positive_inverse",
    "shared",
    "symmetric_product",
    "widened",
]


# Factorisations of several matrices, on CPUs one after the other.


def one_by_one(factorise: Callable[[Array], Any], matrices: Array) -> Any:
    """`factorise(matrices)`, of matrices along any axes in front.

    JAX 0.10 factorises a stack of matrices on several threads of a CPU and has one more wait for
    them. In a program with several stacks these threads can all be waiting, and it never ends: 16
    Cholesky factorisations of two matrices each are enough on two cores. Single matrices are
    factorised by the thread that asks for it.
    """
    if matrices.ndim == 2:
        return factorise(matrices)
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    found = lax.platform_dependent(
        stack, cpu=lambda each: lax.map(factorise, each), default=factorise
    )
    return jax.tree.map(lambda x: x.reshape(*matrices.shape[:-2], *x.shape[1:]), found)


# `shared`: functions that occur in many places of a program and are compiled once.


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jit(function)`, except that on CPUs it also stays a function in the compiled program.

    What is called is usually put in place of each call, and made one with what is around it there,
    so that each place has kernels of its own. It takes XLA some 15 ms to compile a kernel for CPUs,
    but kernels that are the same it compiles once. Arguments with names are static.
    """
    parameters = inspect.signature(function).parameters.values()
    static_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    jitted = jax.jit(function, static_argnames=static_names)

    @functools.cache
    def branches(**static: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        plain = functools.partial(jitted, **static)
        # Other platforms may not know what to do with a call.
        return plain, lambda *args: _jax.kept_as_call(plain(*args))

    @functools.wraps(function)
    def call(*args: Any, **static: Any) -> Any:
        plain, kept = branches(**static)
        return lax.platform_dependent(*args, cpu=kept, default=plain)

    return call


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


# `all_finite`: whether arrays have neither infinities nor anything that is not a number.

LONGEST = 2**14
"""Up to how many rows and columns a matrix is summed up by products."""


def all_finite(values: PyTree) -> Array:
    """Whether all arrays are finite. Equal to `all(jnp.all(jnp.isfinite(x)) for x in values)`.

    Matrices are summed up by products with those of two columns, whose elements are so small that
    a sum of finite numbers is finite. For products of matrices there is nothing to compile, unlike
    for comparisons: in a step of K-FAC these took a fifth of the time of all that is compiled.
    """
    arrays = [jnp.asarray(x) for x in jax.tree.leaves(values)]
    arrays = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    each = [jnp.all(jnp.isfinite(x)) for x in arrays if not _is_matrix(x)]
    sums: dict[jnp.dtype, list[Array]] = {}
    for x in filter(_is_matrix, arrays):
        total = _sum(x)
        sums.setdefault(total.dtype, []).append(total)
    each += [jnp.all(jnp.isfinite(jnp.stack(own))) for own in sums.values()]
    return jnp.all(jnp.stack(each)) if each else jnp.ones((), bool)


def _is_matrix(x: Array) -> bool:
    """Whether it has several rows and columns, and none that are split among devices.

    For the latter, products would have to say what becomes of it. Those with vectors are compiled,
    each by itself; and what is multiplied with is a constant in the program, as long as the matrix.
    """
    if x.ndim < 2 or _jax.sharding_of(x) is not None:
        return False
    rows, columns = x.size // x.shape[-1], x.shape[-1]
    return min(rows, columns) > 1 and rows + columns <= LONGEST


def _sum(x: Array) -> Array:
    """A matrix of two rows and columns that is finite if and only if all elements are."""
    rows = x.reshape(-1, x.shape[-1])
    if jnp.finfo(x.dtype).bits < 32:
        rows = rows.astype(jnp.float32)
    # The largest number, times this, can be added up more often than there are elements. Signs are
    # only to make constants of it: matrices of one number are filled by what has to be compiled.
    small = float(jnp.finfo(rows.dtype).tiny) ** 0.5
    signs = np.array([1, -1])
    columns = jnp.asarray(np.tile(small * signs, (rows.shape[1], 1)), rows.dtype)
    by_row = rows @ columns
    return jnp.asarray(np.tile(signs[:, None], rows.shape[0]), rows.dtype) @ by_row


# Products that are symmetric: one triangle is computed, the other is its mirror image.
#
# A product is cut into panels, each as wide as the triangle is there. Products of large dense parts
# remain, which is what machines are good at. Each panel also makes the program larger and slower to
# compile, so there are never many.

MOST_PANELS = 5
"""How a product is cut: more panels save little time, and each takes its time to compile."""

NARROWEST = 128
"""How narrow panels may be."""


def symmetric_product(x: Array, y: Array | None = None) -> Array:
    """`x.T @ x`, or `x.T @ y` if that is known to be symmetric, by one triangle.

    Along axes in front there are several such matrices.
    """
    y = x if y is None else y
    panel = lambda start, end: jnp.matrix_transpose(x[..., start:end]) @ y[..., :end]
    return _by_panels(panel, x.shape[-1])


def _by_panels(panel: Callable[[int, int], Array], size: int) -> Array:
    """A symmetric matrix of which `panel` returns some rows, up to the last that is diagonal."""
    count = max(1, min(MOST_PANELS, size // NARROWEST))
    width = 16 * max(1, -(-size // (16 * count)))  # What vector instructions like.
    edges = [*range(0, size, width), size]
    panels = [panel(start, end) for start, end in itertools.pairwise(edges)]
    if len(panels) == 1:
        return panels[0]
    zero = jnp.zeros((), panels[0].dtype)
    before = [(0, 0, 0)] * (panels[0].ndim - 1)
    widened = [lax.pad(x, zero, [*before, (0, size - x.shape[-1], 0)]) for x in panels]
    lower = jnp.concatenate(widened, axis=-2)
    # A choice between the matrix and its transpose makes programs of JAX 0.10 for CPUs crash.
    return jnp.tril(lower) + jnp.matrix_transpose(jnp.tril(lower, -1))
