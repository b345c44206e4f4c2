"""`hessian`, `hessian_diagonal` and `hessian_blocks`: second derivatives, in blocks of rows."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from curvax import _jax, _slicing
from curvax._errors import where
from curvax._types import Array, Fun, PyTree, Size
from curvax.derivatives.arguments import (
    Options,
    Point,
    TracedFunction,
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
    Part,
    Progress,
    advised_to_go_forward,
    compute_columns,
    linear_map,
    plan_blocks,
    put_on_mesh,
    run_blocks,
)
from curvax.derivatives.disk.stream import stream
from curvax.devices.mesh_axis import Axis
from curvax.maps.chunk_plan import Chunk
from curvax.maps.chunking import map_indices, reduce_indices
from curvax.memory.budget import Budget
from curvax.memory.compiled import Objective


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
    """Compute the Hessian of a scalar function `f` at `x`, a block of it at a time.

    Equal to

        flat, unflatten = jax.flatten_util.ravel_pytree(x)
        H = jax.hessian(lambda flat: f(unflatten(flat)))(flat)
        return H, unflatten

    except that one block is computed at a time, and only one triangle of the matrix. On a mesh and
    on disk, where each device or block has rows of its own, and with `jit=False`, full rows are
    computed. It is compiled once for what `f` does and each shape of `x`. Where `f` has a
    derivative rule of its own that is not its derivative, the second derivatives are not symmetric:
    take `jacobian(jax.grad(f), x)`.

    Arguments:
        f: a real scalar function of a pytree.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks. Leaves are cut apart from each other, so that there can be
            a few more.
        jit: whether to compile.
        checkpoint: whether to recompute what `f` computes on the way instead of saving it: less
            memory, more time. It helps where blocks are small; what a
            large block needs is mostly its own tangents.
        batch_size: the number of columns in a block, in place of `nbatches`.
        memory_budget: bytes, in place of both, in any form that `parse_memory` takes: what the
            call, compiled by itself, may allocate, the result included. With `out`, what it holds
            while it computes a block.
        objective: with a budget, "memory" takes the largest block that fits, "time" one that is
            expected to be fast, by a rule: on a CPU a small one, whose temporaries stay in the
            cache, elsewhere the largest.
        has_aux: whether `f` returns `(value, aux)`.
        progress: whether to show a progress bar of blocks.
        out: a directory for a Zarr array on disk. Blocks go there as they are computed, and memory
            holds one of them. Stopped at any time and run again, it goes on where it was. Several
            processes write to it together, if all of them make the call.
        overwrite: whether `out` may replace a store that belongs to something else.
        verify: whether to read what `out` has already and check it against its checksums. Without,
            it is only checked that nothing is missing. Damaged blocks are computed again, with a
            `DamagedStoreWarning`.
        mesh: devices among which rows are sharded. Each computes its shard in blocks, and sizes and
            budgets are for each. Full rows are computed there, not one triangle, so that one device
            without a mesh is about as fast as two.
        axis: the axis of the mesh to shard along, or several. With one axis it may be left out.
        replicated: whether to replicate the result on every device.

    Returns:
        `(H, unflatten)`, and with `has_aux` `(H, unflatten, aux)`: the (n, n) matrix over the
        coordinates of `x` in the order of `jax.flatten_util.ravel_pytree`, and the function that
        makes a vector of n numbers a pytree like `x`. See also `hessian_to_pytree`.

        On a mesh `H` is sharded along its first axis. It is replicated with `replicated=True`, and
        where the number of devices does not divide n. In a multi-process program each process has
        its own shards, `H.addressable_shards`; to read all of it everywhere, write it to `out`.

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
    to_disk = out is not None
    options = check_options(
        nbatches, batch_size, memory_budget, objective, jit, mesh, axis, replicated, to_disk
    )
    point, x = check_point(x, options)
    traced = _trace_scalar(f, x, has_aux, options)
    block_size = check_block_size(options, options.local_length(point.size))

    def rows(f: Fun) -> BlockProblem:
        def prepare(x: PyTree) -> tuple[Any, PyTree]:
            gradient = jax.grad(jax.checkpoint(f) if checkpoint else f, has_aux=has_aux)
            return linear_map(jax.linearize, gradient, x, has_aux)

        def column(product: Any, index: Size) -> Array:
            return point.flatten(product(point.direction(index)))

        # By symmetry a column is a row, and rows are contiguous.
        return BlockProblem(prepare, (Part(point.size, column),))

    if computes_one_triangle(options):
        groups = group_rows(traced.program, point)
        lengths = [point.part(group).size for group in groups]
    else:
        groups, lengths = None, [options.local_length(point.size)]

    def build(size: int) -> Fun:
        def program(consts: Sequence[Any], x: PyTree) -> tuple[list[Array], PyTree]:
            f = traced.bind(consts)
            if groups is None:
                return compute_columns(rows(f), x, size, options, progress)
            bar = Progress.of(lengths, size) if progress else None
            return compute_triangle(f, x, point, groups, size, has_aux, checkpoint, bar)

        return program

    with advised_to_go_forward(rows, traced, x, has_aux):
        if out is not None:
            problem = rows(traced.untraced())
            arrays, aux = stream(problem, x, options, block_size, out, overwrite, verify, progress)
        else:
            args = traced.consts, put_on_mesh([traced], rows, x, options, progress)
            key = "hessian", checkpoint, has_aux, progress
            plan = plan_blocks(build, [traced], args, options, block_size, max(lengths), key=key)
            arrays, aux = plan(*args)
    (H,) = arrays
    return (H, point.unflatten, aux) if has_aux else (H, point.unflatten)


def computes_one_triangle(options: Options) -> bool:
    """Whether a Hessian is computed by one triangle and mirrored, rather than by full rows.

    It is where one compiled program fills the matrix in the memory of one device. On a mesh and on
    disk each device or block has rows of its own, and mirrored elements would belong to others: on
    a mesh they would have to be communicated, and on disk a block would be written several times.
    With `jit=False`, each group of rows has a loop that JAX would compile at each call. There full
    rows are computed, which is about twice the work.
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
    """Compute the diagonal of the Hessian of a scalar function, exactly, and never the matrix.

    Equal to

        H, unflatten = hessian(f, x)
        return unflatten(jnp.diagonal(H))

    except that only one block of Hessian-vector products exists at a time.

    Arguments:
        f: a real scalar function of a pytree.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks.
        jit: whether to compile.
        checkpoint: whether to recompute what `f` computes on the way instead of saving it: less
            memory, more time.
        batch_size: the number of columns in a block, in place of `nbatches`.
        memory_budget: bytes, in place of both, in any form that `parse_memory` takes: what the
            call, compiled by itself, may allocate, the result included.
        objective: with a budget, "memory" takes the largest block that fits, "time" one that is
            expected to be fast, by a rule: on a CPU a small one, whose temporaries stay in the
            cache, elsewhere the largest.
        progress: whether to show a progress bar of blocks.
        mesh: devices among which coordinates are sharded. Each computes its shard in blocks, and
            sizes and budgets are for each.
        axis: the axis of the mesh to shard along, or several. With one axis it may be left out.
        replicated: whether to replicate the result on every device.

    Returns:
        A pytree like `x`.

        On a mesh each array is sharded along its first axis. It is replicated with
        `replicated=True`, and where the number of devices does not divide the length of that axis.

    Raises:
        ValueError: if there are more batches than parameters, two sizes are given, a budget or a
            mesh with `jit=False`, the mesh does not have the axis, `x` is committed to other
            devices, or processes disagree on shapes.
        TypeError: if `x` is not real floating-point, or `f` no real scalar.
        MemoryBudgetError: if not even single columns fit the budget.

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

    except that only one block of Hessian-vector products exists at a time. What is between two
    leaves is never computed.

    Arguments:
        f: a real scalar function of a pytree.
        x: a pytree of real floating-point arrays, of any dtypes.
        nbatches: the number of blocks for the largest leaf.
        jit: whether to compile.
        checkpoint: whether to recompute what `f` computes on the way instead of saving it: less
            memory, more time.
        batch_size: the number of columns in a block, in place of `nbatches`.
        memory_budget: bytes, in place of both, in any form that `parse_memory` takes: what the
            call, compiled by itself, may allocate, the result included.
        objective: with a budget, "memory" takes the largest block that fits, "time" one that is
            expected to be fast, by a rule: on a CPU a small one, whose temporaries stay in the
            cache, elsewhere the largest.
        progress: whether to show a progress bar of blocks.
        mesh: devices among which the rows of each leaf's block are sharded. Each computes its
            shard in blocks, and sizes and budgets are for each.
        axis: the axis of the mesh to shard along, or several. With one axis it may be left out.
        replicated: whether to replicate the result on every device.

    Returns:
        A pytree like `x`, with an array of shape `leaf.shape + leaf.shape` for each leaf.

        On a mesh each array is sharded along its first axis. It is replicated with
        `replicated=True`, and where the number of devices does not divide `leaf.shape[0]`.

    Raises:
        ValueError: if there are more batches than parameters, two sizes are given, a budget or a
            mesh with `jit=False`, the mesh does not have the axis, `x` is committed to other
            devices, or processes disagree on shapes.
        TypeError: if `x` is not real floating-point, or `f` no real scalar.
        MemoryBudgetError: if not even single columns fit the budget.

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
            return products[number](unit_vector(index, shape, dtype))

        return Part(point.sizes[number], column, shape=shape)

    def problem(f: Fun) -> BlockProblem:
        parts = tuple(map(part, range(len(point.sizes))))
        return BlockProblem(functools.partial(prepare, f), parts)

    with advised_to_go_forward(problem, traced, x):
        key = "hessian_blocks", checkpoint
        blocks, _ = run_blocks(problem, [traced], x, options, block_size, length, progress, key=key)
    return jax.tree.unflatten(point.structure, blocks)


def hessian_to_pytree(H: Array, x: PyTree) -> PyTree:
    """Return an (n, n) matrix over the coordinates of `x` as a pytree of pytrees, as `jax.hessian`.

    Arguments:
        H: a matrix over the coordinates of `x` in the order of `jax.flatten_util.ravel_pytree`,
            as `hessian` and `gauss_newton` return it.
        x: the pytree, or one like it.

    Returns:
        A pytree with the structure of `x` twice: the block of leaves i and j has the shape
        `leaf_i.shape + leaf_j.shape`.

    Raises:
        ValueError: if `H` is not of shape (n, n).

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
    """Trace `f` and check that it returns one real number."""
    traced = trace_function(f, (x,), options)
    check_scalar(
        value_shapes(traced, has_aux),
        "f must return a real floating-point scalar",
        " If it returns (value, aux), say has_aux=True where that is taken; for a function of "
        "several values see curvax.jacobian and curvax.gauss_newton.",
    )
    return traced


MOST_GROUPS = 8
"""Each group has a program of its own to compile."""

LEAST_COLUMNS = 32
"""With fewer columns for each group on average, there are fewer groups."""


_Written = tuple[Array, Array]
"""The matrix, and an element of what was written to it last.

What comes next can wait for that element; to wait for the matrix would be to make a copy of it.
"""


def group_rows(program: Any, point: Point) -> Sequence[range]:
    """Return the groups of leaves whose rows are computed together, in order."""
    most = min(MOST_GROUPS, point.size // LEAST_COLUMNS)
    if program.effects or most < 2:  # Side effects of a function happen once.
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
    """Return the matrix, alone in a list, and the auxiliary value.

    The leaves of the point are put into a few groups, and the groups in order. A group's rows are
    computed by differentiating by its own leaves alone, so nothing is done for tangents that are
    zero, and only up to the columns of the groups that follow. What is left of that is a mirror
    image of what is right of it elsewhere. For a network, with its layers in the order in which
    they are applied, that is less than half of the work.

    The groups are computed one after the other, each from a linearisation of its own, into one
    matrix. The last comes first: then a row may be written from end to end, and a column too, since
    what is not known yet is written later.
    """
    f = _jax.trace(f, x)  # Each group differentiates it.
    value = jax.checkpoint(f) if checkpoint else f
    tick = None if bar is None else bar.tick
    leaves, written, aux = jax.tree.leaves(x), None, None

    def group_of_rows(
        number: int, leaves: Sequence[Array], written: _Written | None
    ) -> tuple[_Written, PyTree]:
        """Return the matrix with the rows and the columns of a group, and the auxiliary value."""
        group = groups[number]
        following = [leaf for later in groups[number:] for leaf in later]

        def gradient(own: dict[int, Array]) -> Any:
            def of_some(some: dict[int, Array]) -> Any:
                filled = [some.get(leaf, array) for leaf, array in enumerate(leaves)]
                return value(jax.tree.unflatten(point.structure, filled))

            at = {leaf: own.get(leaf, leaves[leaf]) for leaf in following}
            return jax.grad(of_some, has_aux=has_aux)(at)

        at = {leaf: leaves[leaf] for leaf in group}
        product, aux = linear_map(jax.linearize, gradient, at, has_aux)
        part, zero = point.part(group), _slicing.zero_after(None if written is None else written[1])

        def row(index: Size) -> Array:
            # After the groups before, of which nothing is held any more but the matrix.
            known = product(dict(zip(group, part.direction(index + zero), strict=True)))
            zeros = lambda leaf: jnp.zeros(point.shapes[leaf], point.dtypes[leaf])
            return point.flatten(
                [known[i] if i in known else zeros(i) for i in range(len(point.shapes))]
            )

        if len(groups) == 1:
            rows = map_indices(row, part.size, size, each_chunk=tick)
            return (rows, jnp.zeros(())), aux
        is_last, start = number + 1 == len(groups), point.offsets[group.start]
        into = lambda like: _Mirrored(like, written, start, mirrored=not is_last)
        return reduce_indices(row, part.size, size, into, each_chunk=tick), aux

    for number in reversed(range(len(groups))):
        if len(groups) > 1 and not point.part(groups[number]).size:
            continue
        if written is not None:
            # Each group is linearised again, and not at the same time as the others.
            written, leaves = lax.optimization_barrier((written, leaves))
        written, aux = group_of_rows(number, leaves, written)
    assert written is not None
    return [written[0]], aux


@dataclass(frozen=True)
class _Mirrored:
    """A reducer that writes rows to their place in the matrix and, mirrored, to the columns."""

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
        # An element that is computed; left of the group's own columns it may be a constant zero.
        return matrix, rows[:1, self.start : self.start + 1]

    def finalize(self, carry: _Written, examples: Size, sharding: object) -> _Written:
        del examples, sharding
        return carry

    def _everywhere(self, rows: Array) -> Array:
        """Return rows that can also be columns: those of a sharded point may be sharded."""
        return _jax.unsharded_along(_jax.unsharded_along(rows, 0), 1)


def dependents(program: Any) -> Sequence[int]:
    """Return how many of the numbers that a program computes depend on each of its inputs."""
    count = np.zeros(len(program.jaxpr.invars), np.int64)
    _count_dependents(program.jaxpr, list(np.eye(len(count), dtype=bool)), count)
    return count.tolist()


def _count_dependents(jaxpr: Any, inputs: Sequence[Any], count: Any) -> list[Any]:
    """Add what depends on each input to `count`; return which inputs each output depends on."""
    none = np.zeros(len(count), bool)
    depends = dict(zip(jaxpr.invars, inputs, strict=True))
    known = lambda atoms: [none if _jax.is_literal(a) else depends.get(a, none) for a in atoms]
    for eqn in jaxpr.eqns:
        read = known(eqn.invars)
        programs = map(_jax.as_program, _jax.parameters(eqn).values())
        called = [program[0] for program in programs if program is not None]
        if len(called) == 1 and len(called[0].invars) == len(read):
            written = _count_dependents(called[0], read, count)
        else:
            of_any = np.any(read, axis=0) if read else none
            count += of_any * sum(getattr(v.aval, "size", 0) for v in eqn.outvars)
            written = [of_any] * len(eqn.outvars)
        depends.update(zip(eqn.outvars, written, strict=True))
    return known(jaxpr.outvars)


def group_leaves(sizes: Sequence[int], weights: Sequence[int], most: int) -> list[range]:
    """Return at most `most` groups of successive leaves, ordered by how much depends on them.

    Neighbours are merged where that adds least to the part of the matrix to be computed.
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
