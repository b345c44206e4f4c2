"""`hessian`, `hessian_diagonal` and `hessian_blocks`: second derivatives, in blocks of rows.

Rows are Hessian-vector products, forward over reverse as in Pearlmutter (1994), "Fast exact
multiplication by the Hessian": the gradient is linearised once and applied to unit vectors.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal, TypeAlias, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from numpy.typing import NDArray

from curvax import _jax, _slicing
from curvax._errors import where
from curvax._types import Array, Float, Fun, PyTree, Size
from curvax.derivatives.arguments import (
    ColumnOptions,
    Options,
    Point,
    TracedFunction,
    Unflatten,
    check_block_size,
    check_options,
    check_point,
    check_scalar,
    trace_function,
    unit_vector,
    value_shapes,
)
from curvax.derivatives.columns import (
    BlockProblem,
    LinearMap,
    Part,
    Progress,
    advised_to_go_forward,
    compute_columns,
    linear_map,
    plan_blocks,
    put_on_mesh,
    run_blocks,
)
from curvax.derivatives.disk.store import ZarrArray
from curvax.derivatives.disk.stream import stream
from curvax.devices.mesh_axis import Axis
from curvax.maps.chunk_plan import Chunk
from curvax.maps.chunking import map_indices, reduce_indices
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective

Matrix: TypeAlias = Float[Array, "n n"] | ZarrArray
"""A Hessian, in memory or on disk."""


@overload
def hessian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    has_aux: Literal[False] = False,
    out: None = None,
    **options: Unpack[ColumnOptions],
) -> tuple[Float[Array, "n n"], Unflatten]: ...
@overload
def hessian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    has_aux: Literal[True],
    out: None = None,
    **options: Unpack[ColumnOptions],
) -> tuple[Float[Array, "n n"], Unflatten, PyTree]: ...
@overload
def hessian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    has_aux: Literal[False] = False,
    out: str | PathLike[str],
    **options: Unpack[ColumnOptions],
) -> tuple[ZarrArray, Unflatten]: ...
@overload
def hessian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    has_aux: Literal[True],
    out: str | PathLike[str],
    **options: Unpack[ColumnOptions],
) -> tuple[ZarrArray, Unflatten, PyTree]: ...
@overload
def hessian(
    f: Fun,
    x: PyTree,
    nbatches: int = 1,
    jit: bool = True,
    checkpoint: bool = False,
    *,
    has_aux: bool = False,
    out: str | PathLike[str] | None = None,
    **options: Unpack[ColumnOptions],
) -> tuple[Matrix, Unflatten] | tuple[Matrix, Unflatten, PyTree]: ...
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
) -> tuple[Matrix, Unflatten] | tuple[Matrix, Unflatten, PyTree]:
    """Compute the Hessian of a scalar function `f` at `x`, a block of it at a time.

    Equal to

        flat, unflatten = jax.flatten_util.ravel_pytree(x)
        H = jax.hessian(lambda flat: f(unflatten(flat)))(flat)
        return H, unflatten

    except that one block is computed at a time. If `x` has several leaves (and at least 64
    coordinates), only the blocks on one side of the diagonal are computed, group of leaves by
    group, and mirrored. Full rows are computed if `x` is a single array, on a mesh, on disk, with
    `jit=False`, and if `f` has side effects. The program is compiled once for the jaxpr
    of `f` and the shapes of `x`. If `f` has a custom derivative rule that is not its true
    derivative, second derivatives are not symmetric: use `jacobian(jax.grad(f), x)` instead.

    Arguments:
        f: A function of a pytree to a real scalar.
        x: A pytree of real floating-point arrays, possibly of different dtypes.
        nbatches: Number of blocks of rows, computed one after the other. Where one side of the
            diagonal is computed, there are up to seven more, because up to eight groups of leaves
            are divided separately.
        jit: Whether to compile the computation.
        checkpoint: Whether to apply `jax.checkpoint` to `f`: its intermediate values are recomputed
            instead of saved, which takes less memory and more time. It helps if blocks are
            small; the memory of a large block is mostly that of its tangents.
        batch_size: Number of rows in a block, instead of `nbatches`.
        memory_budget: Memory that the call, compiled by itself, may allocate, including the result,
            instead of `nbatches` or `batch_size`: such as "1GB", or any other form that
            `parse_memory` accepts. With `out`, the memory that is held while a block is computed.
        objective: How to choose a size within the budget. "memory" takes the largest block that
            fits; "time" takes one that is expected to be fast, by a rule: on a CPU a small one,
            whose temporaries stay in the cache, elsewhere the largest.
        has_aux: Whether `f` returns `(value, aux)`.
        progress: Whether to show a progress bar over blocks.
        out: Directory for a Zarr array on disk. Each block is written once it is computed, and
            memory holds one block. A call that was interrupted resumes when it is repeated. In a
            multi-process program all processes must make the call; they write together.
        overwrite: Whether `out` may replace a store that belongs to a different computation.
        verify: Whether to read the blocks that `out` has already and check their checksums. By
            default only their sizes are checked, and their stored checksums compared with those
            recorded when they were written; the data are not read. Damaged blocks are computed
            again, with a `DamagedStoreWarning`.
        mesh: Devices among which rows are sharded. Each device computes its shard in blocks; sizes
            and budgets are per device. Full rows are computed, not one triangle, so for an `x` of
            several leaves two devices are about as fast as one without a mesh.
        axis: Name of the mesh axis to shard along, or several names. It can be left out for a mesh
            with one axis.
        replicated: Whether to replicate the result on every device.

    Returns:
        `(H, unflatten)`, or `(H, unflatten, aux)` with `has_aux`: the (n, n) matrix over the
        coordinates of `x` in the order of `jax.flatten_util.ravel_pytree`, and the function that
        converts a vector of length n to a pytree like `x`. `hessian_to_pytree` splits `H` into
        blocks by leaves. With `out`, `H` is a `zarr.Array`.

        On a mesh `H` is sharded along its first axis. It is replicated with `replicated=True`, and
        if the number of devices does not divide n. In a multi-process program each process holds
        `H.addressable_shards` only; to read all of `H` everywhere, write it to `out`.

    Raises:
        ValueError: If there are more blocks than parameters, more than one size is given, a budget
            or a mesh is combined with `jit=False`, `out` is combined with `jit=False`,
            `objective="time"` or `replicated=True`, the store at `out` belongs to a different
            computation, the mesh does not have the axis, `x` is committed to other devices, or
            processes disagree on shapes.
        TypeError: If `x` is not real floating-point, or `f` does not return a real scalar.
        MemoryBudgetError: If not even blocks of one row fit the budget.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> rosenbrock = lambda p: (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2
        >>> H, unflatten = curvax.hessian(rosenbrock, jnp.ones(2), nbatches=2)
        >>> H
        Array([[ 802., -400.],
               [-400.,  200.]], dtype=float32)
    """
    to_disk = out is not None
    options = check_options(
        nbatches, batch_size, memory_budget, objective, jit, mesh, axis, replicated, to_disk
    )
    point, x = check_point(x, options)
    traced = _trace_scalar(f, x, has_aux, options)
    block_size = check_block_size(options, options.local_length(point.size))

    def problem(f: Fun) -> BlockProblem:
        def prepare(x: PyTree) -> tuple[LinearMap, PyTree]:
            gradient = jax.grad(jax.checkpoint(f) if checkpoint else f, has_aux=has_aux)
            return linear_map(jax.linearize, gradient, x, has_aux)

        def column(product: LinearMap, index: Size) -> Array:
            return point.flatten(product(point.direction(index)))

        # By symmetry a column is also a row, and rows are contiguous.
        return BlockProblem(prepare, (Part(point.size, column),))

    if computes_one_triangle(options):
        groups = group_rows(traced.program, point)
        lengths = [point.part(group).size for group in groups]
    else:
        groups, lengths = None, [options.local_length(point.size)]

    def build(size: int) -> Fun:
        def program(consts: Sequence[_jax.Value], x: PyTree) -> tuple[list[Array], PyTree]:
            f = traced.bind(consts)
            if groups is None:
                return compute_columns(problem(f), x, size, options, progress)
            bar = Progress.of(lengths, size) if progress else None
            return compute_triangle(f, x, point, groups, size, has_aux, checkpoint, bar)

        return program

    with advised_to_go_forward(problem, traced, x, has_aux):
        if out is not None:
            made = problem(traced.untraced())
            arrays, aux = stream(made, x, options, block_size, out, overwrite, verify, progress)
        else:
            args = traced.consts, put_on_mesh([traced], problem, x, options, progress)
            key = "hessian", checkpoint, has_aux, progress
            plan = plan_blocks(build, [traced], args, options, block_size, max(lengths), key=key)
            arrays, aux = plan(*args)
    (H,) = arrays
    return (H, point.unflatten, aux) if has_aux else (H, point.unflatten)


def computes_one_triangle(options: Options) -> bool:
    """Return whether `hessian` may compute one triangle and mirror it, rather than full rows.

    It may if one compiled program fills the matrix in the memory of one device. It does if there is
    more than one group of leaves (`group_rows`); one group is computed by full rows. On a mesh and
    on disk the mirrored elements would belong to the rows of other devices or blocks: they would
    have to be communicated, or blocks be written several times. With `jit=False`, JAX would compile
    the loop of each group of rows at each call. Full rows are about twice the work.
    """
    return options.jit and options.axis is None and not options.to_disk


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
    """Compute the exact diagonal of the Hessian of a scalar function, without the matrix.

    Equal to

        H, unflatten = hessian(f, x)
        return unflatten(jnp.diagonal(H))

    except that only one block of Hessian-vector products exists at a time.

    Arguments:
        f: A function of a pytree to a real scalar.
        x: A pytree of real floating-point arrays, possibly of different dtypes.
        nbatches: Number of blocks of columns, computed one after the other. By default there is
            one block: without a size or a budget, all products exist at once.
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
        mesh: Devices among which coordinates are sharded. Each device computes its shard in blocks;
            sizes and budgets are per device.
        axis: Name of the mesh axis to shard along, or several names. It can be left out for a mesh
            with one axis.
        replicated: Whether to replicate the result on every device.

    Returns:
        A pytree like `x`.

        On a mesh each array is sharded along its first axis. It is replicated with
        `replicated=True`, and if the number of devices does not divide the length of that axis.

    Raises:
        ValueError: If there are more blocks than elements of `x`, more than one size is given, a
            budget or a mesh is combined with `jit=False`, the mesh does not have the axis, `x` is
            committed to other devices, or processes disagree on shapes.
        TypeError: If `x` is not real floating-point, or `f` does not return a real scalar.
        MemoryBudgetError: If not even blocks of one column fit the budget.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> f = lambda p: jnp.sum(p["a"] ** 3) * p["b"]
        >>> curvax.hessian_diagonal(f, {"a": jnp.ones(2), "b": 2.0})
        {'a': Array([12., 12.], dtype=float32), 'b': Array(0., dtype=float32)}
    """
    options = check_options(
        nbatches, batch_size, memory_budget, objective, jit, mesh, axis, replicated
    )
    point, x = check_point(x, options)
    traced = _trace_scalar(f, x, False, options)
    length = options.local_length(point.size)
    block_size = check_block_size(options, length)

    def element(product: LinearMap, index: Size) -> Array:
        direction = point.direction(index)
        pairs = zip(*map(jax.tree.leaves, (direction, product(direction))), strict=True)
        # Select rather than multiply by zero: other elements may be infinite.
        parts = [
            jnp.sum(jnp.where(unit != 0, column, 0)).astype(point.dtype) for unit, column in pairs
        ]
        return sum(parts, start=jnp.zeros((), point.dtype))

    def problem(f: Fun) -> BlockProblem:
        def prepare(x: PyTree) -> tuple[LinearMap, None]:
            return jax.linearize(jax.grad(jax.checkpoint(f) if checkpoint else f), x)[1], None

        return BlockProblem(prepare, (Part(point.size, element, into=point.unflatten),))

    with advised_to_go_forward(problem, traced, x):
        key = "hessian_diagonal", checkpoint
        (diagonal,), _ = run_blocks(
            problem, [traced], x, options, block_size, length, progress, key=key
        )
    return diagonal


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
    """Compute the diagonal blocks of the Hessian of a scalar function, one for each leaf of `x`.

    Equal to

        jax.tree.map(lambda leaf: second derivatives of f with respect to that leaf alone, x)

    except that only one block of Hessian-vector products exists at a time. Second derivatives with
    respect to two different leaves are never computed.

    Arguments:
        f: A function of a pytree to a real scalar.
        x: A pytree of real floating-point arrays, possibly of different dtypes.
        nbatches: Number of blocks of columns that the largest leaf is divided into.
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
        mesh: Devices among which the rows of each leaf's block are sharded. Each device computes
            its shard in blocks; sizes and budgets are per device.
        axis: Name of the mesh axis to shard along, or several names. It can be left out for a mesh
            with one axis.
        replicated: Whether to replicate the result on every device.

    Returns:
        A pytree like `x`, with an array of shape `leaf.shape + leaf.shape` for each leaf.

        On a mesh each array is sharded along its first axis. It is replicated with
        `replicated=True`, and if the number of devices does not divide `leaf.shape[0]`.

    Raises:
        ValueError: If there are more blocks than parameters, more than one size is given, a budget
            or a mesh is combined with `jit=False`, the mesh does not have the axis, `x` is
            committed to other devices, or processes disagree on shapes.
        TypeError: If `x` is not real floating-point, or `f` does not return a real scalar.
        MemoryBudgetError: If not even blocks of one column fit the budget.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> f = lambda p: jnp.prod(p["a"]) * p["b"] ** 2
        >>> blocks = curvax.hessian_blocks(f, {"a": jnp.ones(2), "b": 2.0})
        >>> blocks["a"]
        Array([[0., 4.],
               [4., 0.]], dtype=float32)
    """
    options = check_options(
        nbatches, batch_size, memory_budget, objective, jit, mesh, axis, replicated
    )
    point, x = check_point(x, options)
    traced = _trace_scalar(f, x, False, options)
    length = options.local_length(max(point.sizes, default=0))
    block_size = check_block_size(options, length)

    def prepare(f: Fun, x: PyTree) -> tuple[list[LinearMap], None]:
        g = jax.checkpoint(f) if checkpoint else f
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(x)]

        def product(i: int) -> LinearMap:
            def of_leaf(leaf: Array) -> Array:
                filled = [*leaves[:i], leaf, *leaves[i + 1 :]]
                return g(jax.tree.unflatten(point.structure, filled))

            return jax.linearize(jax.grad(of_leaf), leaves[i])[1]

        return [product(i) for i in range(len(leaves))], None

    def part(i: int) -> Part:
        shape, dtype = point.shapes[i], point.dtypes[i]

        def column(products: list[LinearMap], index: Size) -> Array:
            return products[i](unit_vector(index, shape, dtype))

        return Part(point.sizes[i], column, shape=shape)

    def problem(f: Fun) -> BlockProblem:
        parts = tuple(map(part, range(len(point.sizes))))
        return BlockProblem(functools.partial(prepare, f), parts)

    with advised_to_go_forward(problem, traced, x):
        key = "hessian_blocks", checkpoint
        blocks, _ = run_blocks(problem, [traced], x, options, block_size, length, progress, key=key)
    return jax.tree.unflatten(point.structure, blocks)


def hessian_to_pytree(H: Array, x: PyTree) -> PyTree:
    """Convert an (n, n) matrix over the coordinates of `x` to a pytree of pytrees.

    Equal to `jax.hessian(f)(x)` for `H, _ = hessian(f, x)`.

    Arguments:
        H: A matrix over the coordinates of `x` in the order of `jax.flatten_util.ravel_pytree`,
            as `hessian` and `gauss_newton` return it.
        x: The pytree at which derivatives were taken, or one of the same shapes.

    Returns:
        A pytree with the structure of `x` twice: the block of leaves i and j has the shape
        `leaf_i.shape + leaf_j.shape`.

    Raises:
        ValueError: If the shape of `H` is not (n, n).

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> x = {"a": jnp.ones(2), "b": 1.0}
        >>> H, _ = curvax.hessian(lambda x: jnp.sum(x["a"]) * x["b"], x)
        >>> curvax.hessian_to_pytree(H, x)["a"]["b"]
        Array([1., 1.], dtype=float32)
    """
    point = Point.of(x)
    if jnp.shape(H) != (point.size, point.size):
        raise ValueError(
            f"{where()}: x has {point.size} coordinates, so H must have the shape ({point.size}, "
            f"{point.size}), got {jnp.shape(H)}."
        )
    rows = [
        H[start : start + size].reshape((*shape, point.size))
        for start, size, shape in zip(point.offsets, point.sizes, point.shapes, strict=True)
    ]
    return jax.tree.unflatten(point.structure, [point.split(row) for row in rows])


def _trace_scalar(f: Fun, x: PyTree, has_aux: bool, options: Options) -> TracedFunction:
    """Trace `f` and check that it returns a real scalar."""
    traced = trace_function(f, (x,), options)
    check_scalar(
        value_shapes(traced, has_aux),
        "f must return a real floating-point scalar",
        " If it returns (value, aux), say has_aux=True where that is taken; for a function of "
        "several values see curvax.jacobian and curvax.gauss_newton.",
    )
    return traced


MOST_GROUPS = 8
"""Maximum number of groups: the loop of each group is compiled separately."""

LEAST_COLUMNS = 32
"""Minimum number of columns per group, on average."""


_Written = tuple[Array, Array]
"""The matrix, and an element of the rows written last.

The next group can be made to wait for that element; waiting for the matrix would copy it.
"""


def group_rows(program: _jax.ClosedJaxpr, point: Point) -> Sequence[range]:
    """Return the groups of leaves whose rows are computed together, in order.

    There is one group if `x` is a single array or has fewer than `2 * LEAST_COLUMNS`
    coordinates, and if the function has side effects.
    """
    most = min(MOST_GROUPS, point.size // LEAST_COLUMNS)
    if program.effects or most < 2:  # Each group evaluates f, but side effects must happen once.
        return [range(len(point.sizes))]
    return group_leaves(point.sizes, dependents(program), most)


def compute_triangle(
    f: Fun,
    x: PyTree,
    point: Point,
    groups: Sequence[range],
    size: int,
    has_aux: bool,
    checkpoint: bool,
    bar: Progress | None,
) -> tuple[list[Array], PyTree]:
    """Return the Hessian, in a list of one, and `aux`, from one triangle of the matrix.

    The leaves of the point form a few ordered groups. The rows of a group are computed by
    linearising with respect to its leaves only, so that no work is done for zero tangents, and only
    in the columns of this group and later ones. The columns of earlier groups follow by symmetry.
    For a network whose leaves are in the order in which its layers are applied, this is less than
    half of the work of full rows.

    The groups are computed one after the other, each from a separate linearisation, into one
    matrix. The last group comes first. Then rows can be written at full length, and mirrored to
    full columns: elements that are not known yet are overwritten later.
    """
    f = _jax.trace(f, x)  # Once, since each group differentiates it.
    value = jax.checkpoint(f) if checkpoint else f
    tick = None if bar is None else bar.tick
    leaves, written, aux = jax.tree.leaves(x), None, None

    def group_of_rows(
        first: int, leaves: Sequence[Array], written: _Written | None
    ) -> tuple[_Written, PyTree]:
        """Write the rows and the columns of `groups[first]`. Return the matrix and `aux`."""
        group, *later_groups = groups[first:]
        following = [*group, *(leaf for later in later_groups for leaf in later)]

        def gradient(in_group: dict[int, Array]) -> PyTree:
            def of_some(some: dict[int, Array]) -> PyTree:
                filled = [some.get(leaf, array) for leaf, array in enumerate(leaves)]
                return value(jax.tree.unflatten(point.structure, filled))

            at = {leaf: in_group.get(leaf, leaves[leaf]) for leaf in following}
            return jax.grad(of_some, has_aux=has_aux)(at)

        at = {leaf: leaves[leaf] for leaf in group}
        product, aux = linear_map(jax.linearize, gradient, at, has_aux)
        part, zero = point.part(group), _slicing.zero_after(None if written is None else written[1])

        def row(index: Size) -> Array:
            # `zero` delays this until the temporaries of the previous group are freed.
            known = product(dict(zip(group, part.direction(index + zero), strict=True)))
            zeros = lambda leaf: jnp.zeros(point.shapes[leaf], point.dtypes[leaf])
            return point.flatten(
                [known[i] if i in known else zeros(i) for i in range(len(point.shapes))]
            )

        if len(groups) == 1:
            rows = map_indices(row, part.size, size, each_chunk=tick)
            return (rows, jnp.zeros(())), aux
        start, mirrored = point.offsets[group.start], bool(later_groups)
        into = lambda like: _Mirrored(like, written, start, mirrored)
        return reduce_indices(row, part.size, size, into, each_chunk=tick), aux

    for first in reversed(range(len(groups))):
        if len(groups) > 1 and not point.part(groups[first]).size:
            continue
        if written is not None:
            # Keep the compiler from merging the linearisations, whose residuals would stay alive.
            written, leaves = lax.optimization_barrier((written, leaves))
        written, aux = group_of_rows(first, leaves, written)
    assert written is not None
    return [written[0]], aux


@dataclass(frozen=True)
class _Mirrored:
    """A reducer that writes rows into the matrix and, if `mirrored`, also as columns."""

    like: jax.ShapeDtypeStruct
    written: _Written | None
    start: int
    mirrored: bool

    def init(self) -> _Written:
        if self.written is not None:
            return self.written
        _, n = self.like.shape
        rows = jax.eval_shape(self._everywhere, self.like)
        return _jax.filled_like(rows, shape=(n, n)), _jax.filled_like(rows, shape=(1, 1))

    def update(self, carry: _Written, value: Array, chunk: Chunk) -> _Written:
        matrix, _ = carry
        rows, start = self._everywhere(value), self.start + chunk.examples_before
        matrix = lax.dynamic_update_slice_in_dim(matrix, rows, start, 0)
        if self.mirrored:
            matrix = lax.dynamic_update_slice_in_dim(matrix, rows.T, start, 1)
        # A computed element: left of the columns of this group, elements may be constant zeros.
        return matrix, rows[:1, self.start : self.start + 1]

    def finalize(self, carry: _Written, examples: Size, sharding: object) -> _Written:
        del examples, sharding
        return carry

    def _everywhere(self, rows: Array) -> Array:
        """Return rows that are not sharded by their type, as those of a sharded point may be."""
        return _jax.unsharded_along(_jax.unsharded_along(rows, 0), 1)


def dependents(program: _jax.ClosedJaxpr) -> Sequence[int]:
    """Return the number of array elements in a program that depend on each of its inputs."""
    count = np.zeros(len(program.jaxpr.invars), np.int64)
    _count_dependents(program.jaxpr, list(np.eye(len(count), dtype=bool)), count)
    return count.tolist()


def _count_dependents(
    jaxpr: _jax.Jaxpr, inputs: Sequence[NDArray[np.bool_]], count: NDArray[np.int64]
) -> list[NDArray[np.bool_]]:
    """Add the number of elements that depend on each input of the program to `count`, in place.

    `inputs` has a mask for each input of the jaxpr: the inputs of the program that it depends on.
    Return these masks for the outputs.
    """
    none = np.zeros(len(count), bool)
    depends = dict(zip(jaxpr.invars, inputs, strict=True))
    known = lambda atoms: [none if _jax.is_literal(a) else depends.get(a, none) for a in atoms]
    for eqn in jaxpr.eqns:
        read = known(eqn.invars)
        programs = map(_jax.as_program, _jax.parameters(eqn).values())
        called = [program.jaxpr for program in programs if program is not None]
        if len(called) == 1 and len(called[0].invars) == len(read):
            written = _count_dependents(called[0], read, count)
        else:
            of_any = np.any(read, axis=0) if read else none
            count += of_any * sum(getattr(v.aval, "size", 0) for v in eqn.outvars)
            written = [of_any] * len(eqn.outvars)
        depends.update(zip(eqn.outvars, written, strict=True))
    return known(jaxpr.outvars)


def group_leaves(sizes: Sequence[int], weights: Sequence[int], most: int) -> list[range]:
    """Return at most `most` groups of successive leaves, sorted by how much depends on them.

    Arguments:
        sizes: Number of coordinates of each leaf.
        weights: Number of array elements that depend on each leaf.
        most: Maximum number of groups. Neighbours are merged greedily, where that adds the fewest
            elements of the matrix to be computed.
    """
    groups = [range(leaf, leaf + 1) for leaf in range(len(sizes))]
    total = lambda group: sum(sizes[leaf] for leaf in group)
    weight = lambda group: max(weights[leaf] for leaf in group)

    def area(group: range) -> int:
        rest = sum(size for size, w in zip(sizes, weights, strict=True) if w <= weight(group))
        return total(group) * rest

    def added(left: int) -> int:
        a, b = groups[left], groups[left + 1]
        return area(range(a.start, b.stop)) - area(a) - area(b)

    while len(groups) > most:
        left = min(range(len(groups) - 1), key=added)
        groups[left : left + 2] = [range(groups[left].start, groups[left + 1].stop)]
    return sorted(groups, key=weight, reverse=True)
