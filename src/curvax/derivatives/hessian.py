"""`hessian`: the matrix of second derivatives, some of its rows at a time."""

import functools
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax._types import Array, Fun, PyTree, Size
from curvax.derivatives.block_options import BlockOptions, solve
from curvax.derivatives.column_sharding import Devices
from curvax.derivatives.columns import BlockProblem, Part
from curvax.derivatives.disk.stream import stream
from curvax.derivatives.flat_point import Point, as_arrays
from curvax.derivatives.hessian_triangle import Triangle
from curvax.derivatives.traced_function import (
    TracedFunction,
    advised_to_go_forward,
    check_scalar,
    linear_map,
)
from curvax.devices.mesh_axis import Axis
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective

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
    verify: bool = False,
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
) -> Any:
    """The Hessian of a scalar function `f` at `x`, a block of it at a time.

    Equal to

        flat, unflatten = jax.flatten_util.ravel_pytree(x)
        H = jax.hessian(lambda flat: f(unflatten(flat)))(flat)
        return H, unflatten

    except that only one triangle of it is computed, and that one block at a time. It is compiled
    once for what `f` does and each shape of `x`. Where `f` has a derivative rule of its own that is
    not its derivative, the second derivatives are not symmetric: take `jacobian(jax.grad(f), x)`.

    Arguments:
        f: a real scalar function of a pytree.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks. Leaves are cut apart from each other, so that there can be
            a few more.
        jit: whether to compile.
        checkpoint: whether to compute what `f` does on the way again where it is needed, instead
            of remembering it: less memory, more time. It helps where blocks are small; what a
            large block needs is mostly its own tangents.
        batch_size: the number of columns in a block, in place of `nbatches`.
        memory_budget: bytes, in place of both, in any form that `parse_memory` takes: what the
            call, compiled by itself, may allocate, the result included. With `out`, what it holds
            while it computes a block.
        objective: with a budget, "memory" takes the largest block that fits, "time" the fastest
            of some. On a CPU small blocks are often several times as fast.
        has_aux: whether `f` returns `(value, aux)`.
        progress: whether to show a progress bar of blocks.
        out: a directory for a Zarr array on disk. Blocks go there as they are computed, and memory
            holds one of them. Stopped at any time and run again, it goes on where it was. Several
            processes write to it together, if all of them make the call.
        overwrite: whether `out` may replace a store that belongs to something else.
        verify: whether to read what `out` has already and check it against its checksums. Without,
            it is only checked that nothing is missing. Damaged blocks are computed again, with a
            `DamagedStoreWarning`.
        mesh: devices among which rows are split. Each computes its share of them in blocks, and
            sizes and budgets are for each. Rows are then computed whole, so that one device alone
            is about as fast as two.
        axis: the axis of the mesh to split along, or several. With one axis it may be left out.
        replicated: whether `H` shall be whole on every device.

    Returns:
        `(H, unflatten)`, and with `has_aux` `(H, unflatten, aux)`: the (n, n) matrix over the
        coordinates of `x` in the order of `jax.flatten_util.ravel_pytree`, and the function that
        makes a vector of n numbers a pytree like `x`. See also `hessian_to_pytree`.

        On a mesh `H` is split along its first axis. It is whole on every device with `replicated`,
        and where the number of devices does not divide n. Of devices of several processes, each
        process has its own part, `H.addressable_shards`; what all shall read goes to `out`.

    Raises:
        ValueError: if there are more batches than parameters, two sizes are given, a budget or a
            mesh with `jit=False`, the store at `out` belongs to something else, the mesh does not
            have the axis, `x` is committed to other devices, or processes disagree on shapes.
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
    devices = Devices.of(mesh, axis, replicated, where, to_disk=out is not None)
    point, x = Point.of(x, where), devices.checked("x", as_arrays(x), where)
    traced = TracedFunction.of(f, x)
    check_scalar(traced, has_aux, where)
    options = BlockOptions.of(
        devices.share(point.size),
        where,
        nbatches=nbatches,
        batch_size=batch_size,
        memory_budget=memory_budget,
        objective=objective,
        jit=jit,
        devices=devices,
    )

    def rows(f: Fun) -> BlockProblem:
        def prepare(x: PyTree) -> tuple[Any, PyTree]:
            gradient = jax.grad(jax.checkpoint(f) if checkpoint else f, has_aux=has_aux)
            return linear_map(jax.linearize, gradient, x, has_aux)

        def column(product: Any, index: Size) -> Array:
            return point.flatten(product(point.direction(index)))

        # By symmetry a column is a row, and rows are contiguous.
        return BlockProblem(prepare, (Part(point.size, column),))

    def triangle(f: Fun) -> Triangle:
        return Triangle(f, x, point, has_aux, checkpoint)

    with advised_to_go_forward(where, rows, traced, x, has_aux):
        if out is not None:
            (matrix,), aux = stream(
                rows(traced.untraced()), x, options, out, overwrite, verify, progress
            )
        else:
            problem = triangle if jit and mesh is None else rows
            bar = "hessian" if progress else None
            key = checkpoint, has_aux
            (matrix,), aux = solve(problem, [traced], x, options, key=key, progress=bar)
    return (matrix, point.unflatten, aux) if has_aux else (matrix, point.unflatten)


# `hessian_diagonal`: second derivatives by each coordinate, and never the matrix.


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
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
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
        mesh: devices among which coordinates are split, as in `hessian`.
        axis: the axis of the mesh to split along, or several. With one axis it may be left out.
        replicated: whether results shall be whole on every device.

    Returns:
        A pytree like `x`.

        On a mesh each array is split along its first axis. It is whole on every device with
        `replicated`, and where the number of devices does not divide the length of that axis.

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
    devices = Devices.of(mesh, axis, replicated, where)
    point, x = Point.of(x, where), devices.checked("x", as_arrays(x), where)
    traced = TracedFunction.of(f, x)
    check_scalar(traced, False, where)

    def element(product: Any, index: Size) -> Array:
        direction = point.direction(index)
        pairs = zip(*map(jax.tree.leaves, (direction, product(direction))), strict=True)
        # The direction is one in a single place; elsewhere a product may be infinite.
        parts = [
            jnp.sum(jnp.where(unit != 0, column, 0)).astype(point.dtype) for unit, column in pairs
        ]
        return sum(parts, start=jnp.zeros((), point.dtype))

    def problem(f: Fun) -> BlockProblem:
        def prepare(x: PyTree) -> tuple[Any, None]:
            return jax.linearize(jax.grad(jax.checkpoint(f) if checkpoint else f), x)[1], None

        return BlockProblem(prepare, (Part(point.size, element, into=point.unflatten),))

    options = BlockOptions.of(
        devices.share(point.size),
        where,
        nbatches=nbatches,
        batch_size=batch_size,
        memory_budget=memory_budget,
        objective=objective,
        jit=jit,
        devices=devices,
    )
    bar = "hessian_diagonal" if progress else None
    with advised_to_go_forward(where, problem, traced, x):
        (diagonal,), _ = solve(problem, [traced], x, options, key=checkpoint, progress=bar)
    return diagonal


# `hessian_blocks`: second derivatives by the coordinates of each leaf.


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
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
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
        mesh: devices among which the rows of each leaf's block are split, as in `hessian`.
        axis: the axis of the mesh to split along, or several. With one axis it may be left out.
        replicated: whether results shall be whole on every device.

    Returns:
        A pytree like `x`, with an array of shape `leaf.shape + leaf.shape` for each leaf.

        On a mesh each array is split along its first axis. It is whole on every device with
        `replicated`, and where the number of devices does not divide `leaf.shape[0]`.

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
    devices = Devices.of(mesh, axis, replicated, where)
    point, x = Point.of(x, where), devices.checked("x", as_arrays(x), where)
    traced = TracedFunction.of(f, x)
    check_scalar(traced, False, where)
    sizes = point.sizes

    def prepare(f: Fun, x: PyTree) -> tuple[list[Any], None]:
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

        return Part(sizes[number], column, shape=shape)

    def problem(f: Fun) -> BlockProblem:
        return BlockProblem(functools.partial(prepare, f), tuple(map(part, range(len(sizes)))))

    options = BlockOptions.of(
        devices.share(max(sizes, default=0)),
        where,
        nbatches=nbatches,
        batch_size=batch_size,
        memory_budget=memory_budget,
        objective=objective,
        jit=jit,
        devices=devices,
    )
    bar = "hessian_blocks" if progress else None
    with advised_to_go_forward(where, problem, traced, x):
        blocks, _ = solve(problem, [traced], x, options, key=checkpoint, progress=bar)
    return jax.tree.unflatten(point.structure, blocks)
