"""`gauss_newton`: the product of a Jacobian's transpose, a weight and the Jacobian.

Columns are computed without the Jacobian, as in Schraudolph (2002), "Fast curvature matrix-vector
products for second-order gradient descent": forward through the linearised function, through the
weight, and back through the transpose.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array, Float, Fun, PyTree, Size
from curvax.derivatives.arguments import (
    Options,
    Point,
    TracedFunction,
    Unflatten,
    check_block_size,
    check_on_mesh,
    check_options,
    check_point,
    trace_function,
)
from curvax.derivatives.columns import (
    BlockProblem,
    LinearMap,
    Part,
    advised,
    has_derivative,
    run_blocks,
    why_not,
)
from curvax.devices.mesh_axis import Axis
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective


def gauss_newton(
    f: Fun,
    x: PyTree,
    weight: ArrayLike | Callable[[PyTree], PyTree] | None = None,
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
) -> tuple[Float[Array, "n n"], Unflatten]:
    """Compute the Gauss-Newton matrix `Jᵀ W J` of a residual function, without its Jacobian.

    Equal to

        J, unflatten = jacobian(lambda x: ravel(f(x)), x)
        return J.T @ W @ J, unflatten

    except that `J` is never computed: a block of unit vectors goes through the linearised `f`, the
    weight, and the transpose of the linearised `f`.

    Arguments:
        f: A function of a pytree to a real array or a pytree of real arrays: m residuals in all.
        x: A pytree of real floating-point arrays, possibly of different dtypes.
        weight: None for the identity; m weights, as a vector or in the shape of a single residual
            array; an (m, m) matrix W; or a function that applies W to a pytree like the residuals.
        nbatches: Number of blocks of columns, computed one after the other.
        jit: Whether to compile the computation.
        checkpoint: Whether to apply `jax.checkpoint` to `f`: its intermediate values are recomputed
            instead of saved, which takes less memory and more time.
        batch_size: Number of columns in a block, instead of `nbatches`.
        memory_budget: Memory that the call, compiled by itself, may allocate, including the result,
            instead of `nbatches` or `batch_size`: such as "1GB", or any other form that
            `parse_memory` accepts.
        objective: How to choose a size within the budget. "memory" takes the largest block that
            fits; "time" takes one that is expected to be fast, by a rule: on a CPU a small one,
            whose temporaries stay in the cache, elsewhere the largest.
        progress: Whether to show a progress bar over blocks.
        mesh: Devices among which columns are sharded. Each device computes its shard in blocks;
            sizes and budgets are per device.
        axis: Name of the mesh axis to shard along, or several names. It can be left out for a mesh
            with one axis.
        replicated: Whether to replicate the result on every device.

    Returns:
        `(G, unflatten)`: the (n, n) matrix over the coordinates of `x` in the order of
        `jax.flatten_util.ravel_pytree`, and the function that converts a vector of length n to a
        pytree like `x`.

        On a mesh `G` is sharded along its last axis. It is replicated with `replicated=True`, and
        if the number of devices does not divide n.

    Raises:
        ValueError: If the weight does not fit the residuals, there are more blocks than parameters,
            more than one size is given, a budget or a mesh is combined with `jit=False`, the mesh
            does not have the axis, `x` is committed to other devices, or processes disagree on
            shapes.
        TypeError: If `x` or a residual is not real floating-point, the weight is not real, or it
            does not return a pytree like the residuals.
        MemoryBudgetError: If not even blocks of one column fit the budget.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> residuals = lambda p: p[0] + p[1] * jnp.arange(3.0)
        >>> G, unflatten = curvax.gauss_newton(residuals, jnp.zeros(2), jnp.array([1.0, 1.0, 2.0]))
        >>> G
        Array([[4., 5.],
               [5., 9.]], dtype=float32)
    """
    options = check_options(
        nbatches, batch_size, memory_budget, objective, jit, mesh, axis, replicated
    )
    point, x = check_point(x, options)
    traced = trace_function(f, (x,), options)
    residuals = Point.of(traced.outputs, "f(x)")
    functions = (
        [traced, _trace_weight(weight, residuals, options)] if callable(weight) else [traced]
    )
    given, apply = _weight(weight, residuals)
    x_and_weight = x, check_on_mesh("weight", given, options)
    length = options.local_length(point.size)
    block_size = check_block_size(options, length)

    def problem(f: Fun, weight: Fun | None = None) -> BlockProblem:
        def prepare(
            arguments: tuple[PyTree, Array | None],
        ) -> tuple[tuple[LinearMap, Array | None], None]:
            x, given = arguments
            return (jax.linearize(jax.checkpoint(f) if checkpoint else f, x)[1], given), None

        def column(prepared: tuple[LinearMap, Array | None], index: Size) -> Array:
            push_forward, given = prepared
            direction = point.direction(index)
            pushed = push_forward(direction)
            weighted = apply(given, pushed) if weight is None else weight(pushed)
            (pulled_back,) = jax.linear_transpose(push_forward, direction)(weighted)
            return point.flatten(pulled_back)

        # The matrix is symmetric only if the weight is, so a column must not be written as a row.
        return BlockProblem(prepare, (Part(point.size, column, -1),))

    def lacking() -> Exception | None:
        return why_not(problem(*(each.traced() for each in functions)), x_and_weight)

    def advice() -> str | None:
        g = traced.traced()
        forward = lambda x: jax.jvp(g, (x,), (x,))[1]
        reverse = lambda x: jax.vjp(g, x)[1](g(x))
        if not (has_derivative(forward, x) or has_derivative(reverse, x)):
            return None
        return (
            "f has derivatives in one mode only, and products with this matrix take both. Its "
            "Jacobian can be computed: with J, unflatten = curvax.jacobian(f, x), the matrix is "
            "J.T @ J or J.T @ W @ J, for an f that returns one vector."
        )

    with advised(lacking, advice):
        key = "gauss_newton", checkpoint
        (matrix,), _ = run_blocks(
            problem, functions, x_and_weight, options, block_size, length, progress, key=key
        )
    return matrix, point.unflatten


def _weight(
    weight: ArrayLike | Fun | None, residuals: Point
) -> tuple[Array | None, Callable[[Array | None, PyTree], PyTree]]:
    """Return a weight that is None or an array, and a function that applies it to residuals."""
    if weight is None or callable(weight):  # A function is applied by `column` itself.
        return None, lambda _, tree: tree
    array = jnp.asarray(weight)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{where()}: weight is of type {array.dtype}, but residuals are real.")
    size = residuals.size
    by_shape = len(residuals.shapes) == 1 and array.shape == residuals.shapes[0]
    if array.shape == (size,) or by_shape:
        product = lambda array, vector: array.reshape(-1) * vector
    elif array.shape == (size, size):
        product = lambda array, vector: array @ vector
    else:
        raise ValueError(
            f"{where()}: a weight for {size} residuals is a vector ({size},), a matrix ({size}, "
            f"{size}) or a function, or has the shape of a single residual array; got an array of "
            f"shape {array.shape}."
        )

    def apply(array: Array | None, tree: PyTree) -> PyTree:
        assert array is not None
        vector = residuals.flatten(tree)
        return residuals.unflatten(product(array.astype(vector.dtype), vector))

    return array, apply


def _trace_weight(weight: Fun, residuals: Point, options: Options) -> TracedFunction:
    """Trace a weight that is a function, and check that it returns a pytree like the residuals."""
    pairs = zip(residuals.shapes, residuals.dtypes, strict=True)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in pairs]
    given = jax.tree.unflatten(residuals.structure, shapes)
    traced = trace_function(weight, (given,), options)
    returned = traced.outputs
    described = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(returned)]
    expected = [(shape.shape, shape.dtype) for shape in shapes]
    if jax.tree.structure(returned) != residuals.structure or described != expected:
        raise TypeError(
            f"{where()}: weight must return what it is given, a pytree like the residuals. "
            f"It is given {given} and returns {returned}."
        )
    return traced
