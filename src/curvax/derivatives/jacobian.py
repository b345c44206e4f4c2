"""`jacobian`: all first derivatives of a function, a block of columns or rows at a time."""

import functools
from collections.abc import Callable, Hashable
from os import PathLike
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax._errors import where
from curvax._tree import leaf_name
from curvax._types import Array, Fun, PyTree, Size
from curvax.derivatives.arguments import (
    Point,
    TracedFunction,
    check_block_size,
    check_options,
    check_point,
    trace_function,
    unit_vector,
    value_shapes,
)
from curvax.derivatives.columns import (
    BlockProblem,
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
"""Columns by forward mode, rows by reverse mode, or what is cheaper."""

REVERSE_COST = 1.5
"""What a row by reverse mode costs, in columns by forward mode."""


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
) -> Any:
    """Compute the Jacobian of `f` at `x`, a block of it at a time.

    Equal to

        flat, unflatten = jax.flatten_util.ravel_pytree(x)
        J = jax.jacobian(lambda flat: f(unflatten(flat)))(flat)
        return J, unflatten

    except that `f` is linearised once, and only one block of columns (or of rows, in reverse mode)
    is computed at a time. It is compiled once for what `f` does and each shape of `x`.

    Arguments:
        f: a function of a pytree, to an array or a pytree of arrays.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks.
        jit: whether to compile.
        checkpoint: whether to recompute what `f` computes on the way instead of saving it: less
            memory, more time.
        batch_size: the number of columns or rows in a block, in place of `nbatches`.
        memory_budget: bytes, in place of both, in any form that `parse_memory` takes: what the
            call, compiled by itself, may allocate, the result included. With `out`, what it holds
            while it computes a block.
        objective: with a budget, "memory" takes the largest block that fits, "time" one that is
            expected to be fast, by a rule: on a CPU a small one, whose temporaries stay in the
            cache, elsewhere the largest.
        mode: "forward" computes columns, "reverse" rows, "auto" what costs less by their numbers,
            or the other one if `f` has no derivative in that mode.
        has_aux: whether `f` returns `(value, aux)`.
        progress: whether to show a progress bar of blocks.
        out: a directory for a Zarr array on disk. Blocks go there as they are computed, and memory
            holds one of them. Stopped at any time and run again, it goes on where it was. Several
            processes write to it together, if all of them make the call.
        overwrite: whether `out` may replace a store that belongs to something else.
        verify: whether to read what `out` has already and check it against its checksums. Without,
            it is only checked that nothing is missing. Damaged blocks are computed again, with a
            `DamagedStoreWarning`.
        mesh: devices among which columns (or rows) are sharded. Each computes its shard in blocks,
            and sizes and budgets are for each.
        axis: the axis of the mesh to shard along, or several. With one axis it may be left out.
        replicated: whether to replicate the result on every device.

    Returns:
        `(J, unflatten)`, and with `has_aux` `(J, unflatten, aux)`. `J` is like what `f` returns,
        with one more axis at the end of each array, over the n coordinates of `x` in the order of
        `jax.flatten_util.ravel_pytree`. `unflatten` makes a vector of n numbers a pytree like `x`.

        On a mesh each array is sharded along its last axis if columns are computed, and along its
        first if rows are. It is replicated with `replicated=True`, and where the number of devices
        does not divide the length of that axis. In a multi-process program each process has its own
        shards, `J.addressable_shards`; to read all of it everywhere, write it to `out`.

    Raises:
        ValueError: if there are more batches than parameters (or rows), two sizes are given, a
            budget or a mesh with `jit=False`, the store at `out` belongs to something else, the
            mesh does not have the axis, `x` is committed to other devices, processes disagree on
            shapes, or `f` has no derivative in the mode that was asked for.
        TypeError: if `x` is not real floating-point, an output is not floating-point, or a complex
            output meets reverse mode.
        MemoryBudgetError: if not even blocks of one fit the budget.

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
    reverse = _is_reverse(mode, leaves, out is not None)
    if reverse is None:
        cheaper = REVERSE_COST * sum(leaf.size for leaf in leaves) < point.size
        reverse = _possible(traced, cheaper, why_not_by, (checkpoint, has_aux))
    problem = functools.partial(by, reverse)
    lengths = [options.local_length(part.length) for part in problem(f).parts]
    block_size = check_block_size(
        options,
        sum(lengths),
        # Whoever leaves the mode to us counts in parameters.
        most=None if mode == "reverse" else options.local_length(point.size),
        what="rows" if mode == "reverse" else "parameters",
    )

    def other_mode() -> str | None:
        if any(map(_is_complex, leaves)) or why_not_by(not reverse) is not None:
            return None
        lacking, there = ("reverse", "forward") if reverse else ("forward", "reverse")
        if mode == "auto":  # The other one was ruled out.
            return (
                f"f has no derivative in {lacking} mode, and rows, by {there} mode, can be written "
                f"to disk only if f returns one array with one axis. Let it return such an array, "
                f"or leave out=None."
            )
        return (
            f"f has no derivative in {lacking} mode, but it has one in {there} mode: use "
            f"mode={there!r}, or mode='auto', which finds out."
        )

    with advised(lambda: why_not_by(reverse), other_mode):
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
    """Return a Jacobian over the coordinates of `x` as pytrees like `x`, as `jax.jacobian` does.

    Arguments:
        J: an array with a last axis over the coordinates of `x`, or a pytree of these, as
            `jacobian` returns it.
        x: the pytree, or one like it.

    Returns:
        The structure of `J` with that of `x` in place of each array, whose leaves have the shapes
        `array.shape[:-1] + leaf.shape`.

    Raises:
        ValueError: if the last axis of an array is not over the coordinates of `x`.

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
    def prepare(x: PyTree) -> tuple[Any, PyTree]:
        return linear_map(jax.linearize, jax.checkpoint(f) if checkpoint else f, x, has_aux)

    def column(push_forward: Any, index: Size) -> PyTree:
        return push_forward(point.direction(index))

    return BlockProblem(prepare, (Part(point.size, column, -1),))


def _by_rows(
    f: Fun, point: Point, outputs: PyTree, checkpoint: bool, has_aux: bool
) -> BlockProblem:
    leaves, structure = jax.tree.flatten(outputs)

    def prepare(x: PyTree) -> tuple[Any, PyTree]:
        return linear_map(jax.vjp, jax.checkpoint(f) if checkpoint else f, x, has_aux)

    def part(number: int) -> Part:
        leaf = leaves[number]

        def row(pull_back: Any, index: Size) -> Array:
            cotangents = [jnp.zeros(other.shape, other.dtype) for other in leaves]
            cotangents[number] = unit_vector(index, leaf.shape, leaf.dtype)
            (gradient,) = pull_back(jax.tree.unflatten(structure, cotangents))
            return point.flatten(gradient).astype(leaf.dtype)

        return Part(leaf.size, row, shape=leaf.shape)

    return BlockProblem(prepare, tuple(map(part, range(len(leaves)))))


def _outputs(f: TracedFunction, has_aux: bool) -> PyTree:
    """The shapes of what `f` returns, checked to be something that has derivatives."""
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
    why_not: Callable[[bool], Exception | None],
    key: Hashable,
) -> bool:
    """Whether to compute rows: if that is cheaper, unless `f` has only the other derivative."""

    def try_both() -> bool:
        return cheaper if why_not(cheaper) is None or why_not(not cheaper) else not cheaper

    return try_both() if f.key is None else _reverse.get(f.fun, (f.key, cheaper, key), try_both)


def _is_complex(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.complexfloating)


def _is_reverse(mode: Mode, leaves: Any, to_disk: bool) -> bool | None:
    """Whether to compute rows, by what was asked for; None if both may be."""
    complex_ = [leaf.dtype for leaf in leaves if _is_complex(leaf)]
    # On disk a block of rows has to be a block of one axis.
    awkward = to_disk and (len(leaves) != 1 or leaves[0].ndim != 1)
    if mode == "reverse" and complex_:
        raise TypeError(
            f"{where()}: f returns {complex_[0]}, and rows of complex outputs are not defined by "
            f"JAX's reverse mode. Use mode='forward', or return real and imaginary parts."
        )
    if mode == "reverse" and awkward:
        raise ValueError(
            f"{where()}: rows can be written to disk if f returns one array with one axis. Use "
            f"mode='forward', or let f return such an array."
        )
    if mode != "auto" or complex_ or awkward:
        return mode == "reverse"
    return None
