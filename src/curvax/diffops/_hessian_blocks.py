"""`hessian_blocks`: second derivatives by the coordinates of each leaf."""

import functools
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

__all__ = ["hessian_blocks"]


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
