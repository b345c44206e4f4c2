"""`hessian`, its diagonal and its diagonal blocks: second derivatives, some columns at a time."""

from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _compat
from curvax._types import Array, Fun, PyTree, Size
from curvax.diffops._options import BlockOptions
from curvax.diffops._point import Point, as_arrays
from curvax.diffops._problem import BlockProblem, Part
from curvax.diffops._stream import stream
from curvax.diffops._value import linear_map, value_shapes
from curvax.memory import Budget, Objective

__all__ = ["hessian", "hessian_blocks", "hessian_diagonal"]


def hessian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    memory_budget: Budget | None = None,
    objective: Objective = "memory",
    has_aux: bool = False,
    progress: bool = False,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
) -> Any:
    """The Hessian of a scalar function `f` at `x`, a block of it at a time.

    Equal to

        flat, unflatten = jax.flatten_util.ravel_pytree(x)
        H = jax.hessian(lambda flat: f(unflatten(flat)))(flat)
        return H, unflatten

    except that the gradient of `f` is linearised once, and only one block of Hessian-vector
    products is computed at a time. It is compiled once for each `f` and each shape of `x`.

    Arguments:
        f: a real scalar function of a pytree.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks.
        jit: whether to compile.
        checkpoint: whether to compute what `f` does on the way again where it is needed, instead
            of remembering it: less memory, more time.
        batch_size: the number of columns in a block, in place of `nbatches`.
        memory_budget: bytes, in place of both, in any form that `parse_memory` takes: what the
            call, compiled by itself, may allocate, the result included. With `out`, what it holds
            while it computes a block.
        objective: with a budget, "memory" takes the largest block that fits, "time" the fastest
            of some. On a CPU small blocks are often several times as fast.
        has_aux: whether `f` returns `(value, aux)`.
        progress: whether to show a progress bar of blocks.
        out: a directory for a Zarr array on disk. Blocks go there as they are computed, and memory
            holds one of them. Stopped at any time and run again, it goes on where it was.
        overwrite: whether `out` may replace a store that belongs to something else.

    Returns:
        `(H, unflatten)`, and with `has_aux` `(H, unflatten, aux)`: the (n, n) matrix over the
        coordinates of `x` in the order of `jax.flatten_util.ravel_pytree`, and the function that
        makes a vector of n numbers a pytree like `x`. See also `hessian_to_pytree`.

    Raises:
        ValueError: if there are more batches than parameters, two sizes are given, a budget with
            `jit=False`, or the store at `out` belongs to something else.
        TypeError: if `x` is not real floating-point, or `f` no real scalar.
        MemoryBudgetError: if not even single columns fit the budget.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> rosenbrock = lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
        >>> H, unflatten = curvax.hessian(rosenbrock, jnp.ones(2), nbatches=2)
        >>> H
        Array([[ 802., -400.],
               [-400.,  200.]], dtype=float32)
    """
    where = "curvax.hessian"
    f = _compat.unjitted(f)
    point, x = Point.of(x, where), as_arrays(x)
    _check_scalar(f, x, has_aux, where)

    def prepare(x: PyTree) -> tuple[Any, PyTree]:
        gradient = jax.grad(jax.checkpoint(f) if checkpoint else f, has_aux=has_aux)
        return linear_map(jax.linearize, gradient, x, has_aux)

    def column(product: Any, index: Size) -> Array:
        return point.flatten(product(point.direction(index)))

    # By symmetry a column is a row, and rows are contiguous.
    problem = BlockProblem(prepare, (Part(point.size, column),))
    options = BlockOptions.of(
        point.size,
        where,
        nbatches=nbatches,
        batch_size=batch_size,
        memory_budget=memory_budget,
        objective=objective,
        jit=jit,
    )
    if out is not None:
        (matrix,), aux = stream(problem, x, options, out, overwrite, progress)
    else:
        bar = "hessian" if progress else None
        (matrix,), aux = problem.solve(f, x, options, key=(checkpoint, has_aux), progress=bar)
    return (matrix, point.unflatten, aux) if has_aux else (matrix, point.unflatten)


def hessian_diagonal(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    memory_budget: Budget | None = None,
    objective: Objective = "memory",
    progress: bool = False,
) -> PyTree:
    """The diagonal of the Hessian of a scalar function, exactly, and never the matrix.

    Equal to

        H, unflatten = hessian(f, x)
        return unflatten(jnp.diagonal(H))

    except that only one block of Hessian-vector products exists at a time.

    Arguments:
        f: a real scalar function of a pytree.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks, as in `hessian`.
        jit: whether to compile.
        checkpoint: as in `hessian`.
        batch_size: the number of columns in a block, in place of `nbatches`.
        memory_budget: as in `hessian`.
        objective: as in `hessian`.
        progress: whether to show a progress bar of blocks.

    Returns:
        A pytree like `x`.

    Raises:
        ValueError, TypeError, MemoryBudgetError: as `hessian`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> f = lambda p: jnp.sum(p["a"] ** 3) * p["b"]
        >>> curvax.hessian_diagonal(f, {"a": jnp.ones(2), "b": 2.0})
        {'a': Array([12., 12.], dtype=float32), 'b': Array(0., dtype=float32)}
    """
    where = "curvax.hessian_diagonal"
    f = _compat.unjitted(f)
    point, x = Point.of(x, where), as_arrays(x)
    _check_scalar(f, x, False, where)

    def prepare(x: PyTree) -> tuple[Any, None]:
        return jax.linearize(jax.grad(jax.checkpoint(f) if checkpoint else f), x)[1], None

    def element(product: Any, index: Size) -> Array:
        direction = point.direction(index)
        pairs = zip(*map(jax.tree.leaves, (direction, product(direction))), strict=True)
        # The direction is one in a single place; elsewhere a product may be infinite.
        parts = [
            jnp.sum(jnp.where(unit != 0, column, 0)).astype(point.dtype) for unit, column in pairs
        ]
        return sum(parts, start=jnp.zeros((), point.dtype))

    problem = BlockProblem(prepare, (Part(point.size, element),))
    options = BlockOptions.of(
        point.size,
        where,
        nbatches=nbatches,
        batch_size=batch_size,
        memory_budget=memory_budget,
        objective=objective,
        jit=jit,
    )
    bar = "hessian_diagonal" if progress else None
    (diagonal,), _ = problem.solve(f, x, options, key=checkpoint, progress=bar)
    return point.unflatten(diagonal)


def hessian_blocks(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    memory_budget: Budget | None = None,
    objective: Objective = "memory",
    progress: bool = False,
) -> PyTree:
    """The diagonal blocks of the Hessian of a scalar function, one for each leaf of `x`.

    Equal to

        jax.tree.map(lambda leaf: second derivatives of f with respect to that leaf alone, x)

    except that only one block of Hessian-vector products exists at a time. What is between two
    leaves is never computed.

    Arguments:
        f: a real scalar function of a pytree.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks for the largest leaf, as in `hessian`.
        jit: whether to compile.
        checkpoint: as in `hessian`.
        batch_size: the number of columns in a block, in place of `nbatches`.
        memory_budget: as in `hessian`.
        objective: as in `hessian`.
        progress: whether to show a progress bar of blocks.

    Returns:
        A pytree like `x`, with an array of shape `leaf.shape + leaf.shape` for each leaf.

    Raises:
        ValueError, TypeError, MemoryBudgetError: as `hessian`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> f = lambda p: jnp.prod(p["a"]) * p["b"] ** 2
        >>> blocks = curvax.hessian_blocks(f, {"a": jnp.ones(2), "b": 2.0})
        >>> blocks["a"]
        Array([[0., 4.],
               [4., 0.]], dtype=float32)
    """
    where = "curvax.hessian_blocks"
    f = _compat.unjitted(f)
    point, x = Point.of(x, where), as_arrays(x)
    _check_scalar(f, x, False, where)
    sizes = point.sizes

    def prepare(x: PyTree) -> tuple[list[Any], None]:
        g = jax.checkpoint(f) if checkpoint else f
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(x)]

        def product(number: int) -> Any:
            def of_leaf(leaf: Array) -> Any:
                filled = [*leaves[:number], leaf, *leaves[number + 1 :]]
                return g(jax.tree.unflatten(point.structure, filled))

            return jax.linearize(jax.grad(of_leaf), leaves[number])[1]

        return [product(number) for number in range(len(leaves))], None

    def part(number: int) -> Part:
        shape, dtype = point.shapes[number], point.dtypes[number]

        def column(products: list[Any], index: Size) -> Array:
            unit = (jnp.arange(sizes[number], dtype=jnp.int32) == index).astype(dtype)
            return products[number](unit.reshape(shape))

        return Part(sizes[number], column)

    problem = BlockProblem(prepare, tuple(map(part, range(len(sizes)))))
    options = BlockOptions.of(
        problem.length,
        where,
        nbatches=nbatches,
        batch_size=batch_size,
        memory_budget=memory_budget,
        objective=objective,
        jit=jit,
    )
    bar = "hessian_blocks" if progress else None
    blocks, _ = problem.solve(f, x, options, key=checkpoint, progress=bar)
    shaped = [b.reshape(*s, *s) for b, s in zip(blocks, point.shapes, strict=True)]
    return jax.tree.unflatten(point.structure, shaped)


def _check_scalar(f: Fun, x: PyTree, has_aux: bool, where: str) -> None:
    returned = value_shapes(f, x, has_aux, where)
    real = hasattr(returned, "dtype") and jnp.issubdtype(returned.dtype, jnp.floating)
    if not real or returned.shape != ():
        raise TypeError(
            f"{where}: f must return a real floating-point scalar, got {returned}. For a function "
            f"of several values see curvax.jacobian and curvax.gauss_newton."
        )
