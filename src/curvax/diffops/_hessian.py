"""`hessian`: the matrix of second derivatives, some of its rows at a time."""

from os import PathLike
from typing import Any

import jax
from jax.sharding import Mesh

from curvax._types import Array, Fun, PyTree, Size
from curvax.diffops._devices import Devices
from curvax.diffops._function import TracedFunction
from curvax.diffops._modes import advised_to_go_forward
from curvax.diffops._options import BlockOptions
from curvax.diffops._point import Point, as_arrays
from curvax.diffops._problem import BlockProblem, Part
from curvax.diffops._solve import solve
from curvax.diffops._stream import stream
from curvax.diffops._triangle import Triangle
from curvax.diffops._value import check_scalar, linear_map
from curvax.memory import Budget, Objective
from curvax.parallel import Axis

__all__ = ["hessian"]


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
