"""`jacobian`: all first derivatives of a function, a block of columns or rows at a time."""

import functools
from collections.abc import Callable, Hashable, Sequence
from os import PathLike
from typing import Literal, TypeAlias, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Array, Fun, PyTree, Size
from curvax.derivatives.arguments import (
    ColumnOptions,
    Point,
    TracedFunction,
    Unflatten,
    check_block_size,
    check_options,
    check_point,
    trace_function,
    unit_vector,
    value_shapes,
)
from curvax.derivatives.columns import (
    BlockProblem,
    LinearMap,
    Part,
    advised,
    linear_map,
    run_blocks,
    why_not,
)
from curvax.derivatives.disk.stream import stream
from curvax.devices.mesh_axis import Axis
from curvax.memory.budget import Budget
from curvax.memory.compiled import FunctionCache, Objective

Mode: TypeAlias = Literal["auto", "forward", "reverse"]
"""Columns by forward mode, rows by reverse mode, or whichever is cheaper."""

REVERSE_COST = 1.5
"""Estimated cost of a row by reverse mode, relative to a column by forward mode."""


@overload
def jacobian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    mode: Mode = "auto",
    has_aux: Literal[False] = False,
    out: str | PathLike[str] | None = None,
    **options: Unpack[ColumnOptions],
) -> tuple[PyTree, Unflatten]: ...
@overload
def jacobian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    mode: Mode = "auto",
    has_aux: Literal[True],
    out: str | PathLike[str] | None = None,
    **options: Unpack[ColumnOptions],
) -> tuple[PyTree, Unflatten, PyTree]: ...
@overload
def jacobian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    mode: Mode = "auto",
    has_aux: bool,
    out: str | PathLike[str] | None = None,
    **options: Unpack[ColumnOptions],
) -> tuple[PyTree, Unflatten] | tuple[PyTree, Unflatten, PyTree]: ...
def jacobian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    batch_size: int | None = None,
    memory_budget: Budget | None = None,
    objective: Objective = "memory",
    mode: Mode = "auto",
    has_aux: bool = False,
    progress: bool = False,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    verify: bool = False,
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    replicated: bool = False,
) -> tuple[PyTree, Unflatten] | tuple[PyTree, Unflatten, PyTree]:
    """Compute the Jacobian of `f` at `x`, a block of it at a time.

    Equal to

        flat, unflatten = jax.flatten_util.ravel_pytree(x)
        J = jax.jacobian(lambda flat: f(unflatten(flat)))(flat)
        return J, unflatten

    except that `f` is linearised once, and only one block of columns (or of rows, in reverse mode)
    is computed at a time. The program is compiled once for the jaxpr of `f` and the shapes of `x`.

    Arguments:
        f: A function of a pytree to an array or a pytree of arrays.
        x: A pytree of real floating-point arrays, possibly of different dtypes.
        nbatches: Number of blocks, computed one after the other.
        jit: Whether to compile the computation.
        checkpoint: Whether to apply `jax.checkpoint` to `f`: its intermediate values are recomputed
            instead of saved, which takes less memory and more time.
        batch_size: Number of columns or rows in a block, instead of `nbatches`.
        memory_budget: Memory that the call, compiled by itself, may allocate, including the result,
            instead of `nbatches` or `batch_size`: such as "1GB", or any other form that
            `parse_memory` accepts. With `out`, the memory that is held while a block is computed.
        objective: How to choose a size within the budget. "memory" takes the largest block that
            fits; "time" takes one that is expected to be fast, by a rule: on a CPU a small one,
            whose temporaries stay in the cache, elsewhere the largest.
        mode: "forward" computes columns, "reverse" rows. "auto" chooses the cheaper one by the
            numbers of columns and rows, or the other one if `f` cannot be differentiated in it.
        has_aux: Whether `f` returns `(value, aux)`.
        progress: Whether to show a progress bar over blocks.
        out: Directory for a Zarr array on disk. Each block is written once it is computed, and
            memory holds one block. A call that was interrupted resumes when it is repeated. In a
            multi-process program all processes must make the call; they write together.
        overwrite: Whether `out` may replace a store that belongs to a different computation.
        verify: Whether to read the blocks that `out` has already and check their checksums. By
            default it is only checked that none is missing. Damaged blocks are computed again, with
            a `DamagedStoreWarning`.
        mesh: Devices among which columns (or rows) are sharded. Each device computes its shard in
            blocks; sizes and budgets are per device.
        axis: Name of the mesh axis to shard along, or several names. It can be left out for a mesh
            with one axis.
        replicated: Whether to replicate the result on every device.

    Returns:
        `(J, unflatten)`, or `(J, unflatten, aux)` with `has_aux`. `J` has the structure of the
        value of `f`. Each array has an additional last axis over the n coordinates of `x`, in the
        order of `jax.flatten_util.ravel_pytree`. `unflatten` converts a vector of length n to a
        pytree like `x`. `jacobian_to_pytree` splits the last axis into leaves. With `out`, the
        arrays are `zarr.Array`s.

        On a mesh each array is sharded along its last axis if columns are computed, and along its
        first if rows are. It is replicated with `replicated=True`, and if the number of devices
        does not divide the length of that axis. In a multi-process program each process holds
        `J.addressable_shards` only; to read all of `J` everywhere, write it to `out`.

    Raises:
        ValueError: If there are more blocks than parameters (or rows), more than one size is given,
            a budget or a mesh is combined with `jit=False`, `out` is combined with `jit=False`,
            `objective="time"` or `replicated=True`, rows are to be written to `out` and `f` does
            not return one array with one axis, the store at `out` belongs to a different
            computation, the mesh does not have the axis, `x` is committed to other devices,
            processes disagree on shapes, or `f` cannot be differentiated in the given mode.
        TypeError: If `x` is not real floating-point, an output is not floating-point, or an output
            is complex in reverse mode.
        MemoryBudgetError: If not even blocks of one column or row fit the budget.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> f = lambda p: p["rate"] * jnp.arange(3.0) + p["offset"]
        >>> J, unflatten = curvax.jacobian(f, {"offset": 1.0, "rate": 2.0})
        >>> J
        Array([[1., 0.],
               [1., 1.],
               [1., 2.]], dtype=float32)
    """
    if mode not in get_args(Mode):
        raise ValueError(f"{where()}: mode must be one of {get_args(Mode)}, got {mode!r}.")
    to_disk = out is not None
    options = check_options(
        nbatches, batch_size, memory_budget, objective, jit, mesh, axis, replicated, to_disk
    )
    point, x = check_point(x, options)
    traced = trace_function(f, (x,), options)
    outputs = _outputs(traced, has_aux)
    leaves, structure = jax.tree.flatten(outputs)

    def by(reverse: bool, f: Fun) -> BlockProblem:
        if reverse:
            return _by_rows(f, point, outputs, checkpoint, has_aux)
        return _by_columns(f, point, checkpoint, has_aux)

    why_not_by = lambda reverse: why_not(by(reverse, traced.traced()), x)
    works = lambda reverse: why_not_by(reverse) is None
    reverse = _is_reverse(mode, leaves, to_disk, works)
    if reverse is None:
        cheaper = REVERSE_COST * sum(leaf.size for leaf in leaves) < point.size
        reverse = _possible(traced, cheaper, works, (checkpoint, has_aux))
    problem = functools.partial(by, reverse)
    lengths = [options.local_length(part.length) for part in problem(f).parts]
    block_size = check_block_size(
        options,
        sum(lengths),
        # Without a mode, the user cannot know whether blocks have columns or rows.
        most=None if mode == "reverse" else options.local_length(point.size),
        what="rows" if mode == "reverse" else "parameters",
    )

    def advise_other_mode() -> str | None:
        # Reverse mode does not define rows of complex outputs.
        if any(map(_is_complex, leaves)) or not works(not reverse):
            return None
        lacking, there = ("reverse", "forward") if reverse else ("forward", "reverse")
        if not reverse and to_disk and not _rows_fit_store(leaves):
            change_mode = "" if mode == "auto" else " Either way, use mode='reverse' or 'auto'."
            return (
                f"f has no derivative in {lacking} mode, and rows, by {there} mode, can be written "
                f"to disk only if f returns one array with one axis. Let it return such an array, "
                f"or do not pass out.{change_mode}"
            )
        return (
            f"f has no derivative in {lacking} mode, but it has one in {there} mode: use "
            f"mode={there!r}, or mode='auto', which finds out."
        )

    with advised(lambda: why_not_by(reverse), advise_other_mode):
        if out is not None:
            made = problem(traced.untraced())
            arrays, aux = stream(made, x, options, block_size, out, overwrite, verify, progress)
        else:
            key = "jacobian", checkpoint, reverse, has_aux
            max_size = max(lengths, default=0)
            parts, aux = run_blocks(
                problem, [traced], x, options, block_size, max_size, progress, key=key
            )
            arrays = jax.tree.leaves(parts)
    J = jax.tree.unflatten(structure, arrays)
    return (J, point.unflatten, aux) if has_aux else (J, point.unflatten)


def jacobian_to_pytree(J: PyTree, x: PyTree) -> PyTree:
    """Convert a Jacobian over the coordinates of `x` to a pytree of pytrees like `x`.

    Equal to `jax.jacobian(f)(x)` for `J, _ = jacobian(f, x)`.

    Arguments:
        J: An array whose last axis is over the coordinates of `x`, or a pytree of such arrays, as
            `jacobian` returns it.
        x: The pytree at which derivatives were taken, or one of the same shapes.

    Returns:
        The structure of `J` with the structure of `x` instead of each array, whose leaves have the
        shapes `array.shape[:-1] + leaf.shape`.

    Raises:
        ValueError: If the last axis of an array does not have the length of all coordinates.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> x = {"a": jnp.ones(2), "b": 1.0}
        >>> J, _ = curvax.jacobian(lambda x: x["a"] * x["b"], x)
        >>> curvax.jacobian_to_pytree(J, x)["b"]
        Array([1., 1.], dtype=float32)
    """
    point = Point.of(x)
    for array in jax.tree.leaves(J):
        if jnp.shape(array)[-1:] != (point.size,):
            raise ValueError(
                f"{where()}: x has {point.size} coordinates, so the last axis of each array of J "
                f"must have that length, got the shape {jnp.shape(array)}."
            )
    return jax.tree.map(point.split, J)


def _by_columns(f: Fun, point: Point, checkpoint: bool, has_aux: bool) -> BlockProblem:
    """Return the problem of computing columns by forward mode."""

    def prepare(x: PyTree) -> tuple[LinearMap, PyTree]:
        return linear_map(jax.linearize, jax.checkpoint(f) if checkpoint else f, x, has_aux)

    def column(push_forward: LinearMap, index: Size) -> PyTree:
        return push_forward(point.direction(index))

    return BlockProblem(prepare, (Part(point.size, column, -1),))


def _by_rows(
    f: Fun, point: Point, outputs: PyTree, checkpoint: bool, has_aux: bool
) -> BlockProblem:
    """Return the problem of computing rows by reverse mode, with one part for each output."""
    leaves, structure = jax.tree.flatten(outputs)

    def prepare(x: PyTree) -> tuple[LinearMap, PyTree]:
        return linear_map(jax.vjp, jax.checkpoint(f) if checkpoint else f, x, has_aux)

    def part(i: int) -> Part:
        leaf = leaves[i]

        def row(pull_back: LinearMap, index: Size) -> Array:
            cotangents = [jnp.zeros(other.shape, other.dtype) for other in leaves]
            cotangents[i] = unit_vector(index, leaf.shape, leaf.dtype)
            (gradient,) = pull_back(jax.tree.unflatten(structure, cotangents))
            return point.flatten(gradient).astype(leaf.dtype)

        return Part(leaf.size, row, shape=leaf.shape)

    return BlockProblem(prepare, tuple(map(part, range(len(leaves)))))


def _outputs(f: TracedFunction, has_aux: bool) -> PyTree:
    """Return the shapes of the outputs of `f`, after checking that they are floating-point."""
    returned = value_shapes(f, has_aux)
    for path, leaf in jax.tree_util.tree_leaves_with_path(returned):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"{where()}: {leaf_name('f(x)', path)} is of type {leaf.dtype}, which has no "
                f"derivative. Convert it to floating point, or return it as aux with has_aux=True."
            )
    return returned


_reverse: FunctionCache[bool] = FunctionCache()


def _possible(
    f: TracedFunction,
    cheaper: bool,
    works: Callable[[bool], bool],
    key: Hashable,
) -> bool:
    """Return whether to compute rows: the cheaper choice, unless only the other one is possible."""

    def try_both() -> bool:
        return cheaper if works(cheaper) or not works(not cheaper) else not cheaper

    return try_both() if f.key is None else _reverse.get(f.fun, (f.key, cheaper, key), try_both)


def _is_complex(leaf: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.complexfloating)


def _rows_fit_store(leaves: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Return whether each block of rows is a block along one axis of one array."""
    return len(leaves) == 1 and leaves[0].ndim == 1


def _is_reverse(
    mode: Mode,
    leaves: Sequence[jax.ShapeDtypeStruct],
    to_disk: bool,
    works: Callable[[bool], bool],
) -> bool | None:
    """Return whether the arguments require rows (True) or columns (False); None if neither."""
    complex_ = [leaf.dtype for leaf in leaves if _is_complex(leaf)]
    awkward = to_disk and not _rows_fit_store(leaves)
    if mode == "reverse" and complex_:
        raise TypeError(
            f"{where()}: f returns {complex_[0]}, and rows of complex outputs are not defined by "
            f"JAX's reverse mode. Use mode='forward', or return real and imaginary parts."
        )
    if mode == "reverse" and awkward:
        advice = (
            "Use mode='forward', or let f return such an array."
            if works(False)
            else "Let f return such an array, or do not pass out."
        )
        raise ValueError(
            f"{where()}: rows can be written to disk if f returns one array with one axis. {advice}"
        )
    if mode != "auto" or complex_ or awkward:
        return mode == "reverse"
    return None
