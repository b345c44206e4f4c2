"""`hessian_diagonal`: second derivatives by each coordinate, and never the matrix."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax._types import Array, Fun, PyTree, Size
from curvax.diffops._devices import Devices
from curvax.diffops._function import TracedFunction
from curvax.diffops._modes import advised_to_go_forward
from curvax.diffops._options import BlockOptions
from curvax.diffops._point import Point, as_arrays
from curvax.diffops._problem import BlockProblem, Part
from curvax.diffops._solve import solve
from curvax.diffops._value import check_scalar
from curvax.memory import Budget, Objective
from curvax.parallel import Axis

__all__ = ["hessian_diagonal"]


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
