"""Columns of linear maps, a block at a time.

Jacobians, Gauss-Newton matrices and full Hessians are computed as columns of a linear map; the rows
of a Jacobian are columns of its transpose, so `column` below may compute a row. The map is made
once, by `jax.linearize` or `jax.vjp`, and applied to blocks of unit vectors, by the same loop as
`chunked_vmap`. Which elements of each column are kept, and along which axis columns are stacked,
makes the result a Jacobian, a Hessian or a part of one.

A `BlockProblem` separates the two steps, so that columns can be sharded among devices, and blocks
computed by successive programs and streamed to disk.
"""

import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, ArrayLike, Fun, PyTree, Size
from curvax.derivatives.arguments import Options, TracedFunction
from curvax.devices.mesh_axis import MeshAxis, is_committed
from curvax.maps.chunking import map_indices
from curvax.memory.compiled import compile_call, plan_call

LinearMap: TypeAlias = Callable[..., PyTree]
"""A linear map as `jax.linearize` or `jax.vjp` returns it: a pytree that can be called."""


def linear_map(
    transform: Callable[..., tuple[PyTree, ...]], f: Fun, x: PyTree, has_aux: bool
) -> tuple[LinearMap, PyTree]:
    """Apply `jax.linearize` or `jax.vjp` to `f` at `x`. Return the linear map and `aux`."""
    _, mapped, *aux = transform(f, x, has_aux=has_aux)
    return mapped, aux[0] if aux else None


@dataclass(frozen=True)
class Part:
    """One result, an array or a pytree of arrays, and how its columns are computed and stacked."""

    length: int
    """Number of columns."""
    column: Callable[[PyTree, Size], PyTree]
    """Function that computes a column, from the output of `BlockProblem.prepare` and an index."""
    axis: int = 0
    """Axis along which columns are stacked: the first (0) or the last (-1)."""
    shape: tuple[int, ...] | None = None
    """Shape that the first axis is reshaped to, if any."""
    into: Callable[[Array], PyTree] | None = None
    """Function that converts the vector of all columns, which are then scalars, to the result."""

    def result(self, columns: PyTree) -> PyTree:
        """Convert the stacked columns to the result."""
        if self.into is not None:
            return self.into(columns)
        shape = self.shape
        if shape is None:
            return columns
        return jax.tree.map(lambda array: array.reshape(*shape, *array.shape[1:]), columns)


@dataclass(frozen=True)
class BlockProblem:
    """A matrix, or several, to be computed column by column.

    The result is a list with one entry per part.
    """

    prepare: Callable[[PyTree], tuple[PyTree, PyTree]]
    """Function of `x` that returns a pytree to compute columns from (linear maps), and `aux`."""
    parts: tuple[Part, ...]


def compute_columns(
    problem: BlockProblem, x: PyTree, size: int, options: Options, progress: bool
) -> tuple[list[PyTree], PyTree]:
    """Return the result of each part at `x`, computed in blocks of `size` columns, and `aux`.

    On a mesh, columns are sharded, and each device computes blocks of `size`.
    """
    lengths = [options.local_length(part.length) for part in problem.parts]
    bar = Progress.of(lengths, size) if progress else None
    if options.axis is not None:
        return _compute_sharded(problem, x, size, options, bar)
    prepared, aux = problem.prepare(x)

    def result(part: Part) -> PyTree:
        column = lambda index: part.column(prepared, index)
        tick = None if bar is None else bar.tick
        columns = map_indices(column, part.length, size, out_axes=part.axis, each_chunk=tick)
        return part.result(columns)

    return list(map(result, problem.parts)), aux


def plan_blocks(
    build: Callable[[int], Fun],
    functions: Sequence[TracedFunction],
    args: Sequence[PyTree],
    options: Options,
    block_size: int,
    max_size: int,
    *,
    key: Hashable,
) -> Fun:
    """Return `build(size)` compiled, for `block_size` or for a size that fits the budget.

    It is compiled once for the jaxprs of the functions, the shapes of `args`, and `key`, which must
    identify what is computed from the functions. It is cached as long as the first function lives.
    With a budget, blocks have at most `max_size` columns.
    """
    fun, is_settled = functions[0].fun, all(f.is_settled for f in functions)
    key = options.axis, options.replicated, key
    if is_settled:
        key = *key, tuple(f.key for f in functions)
    if options.budget is not None:
        sizes = range(1, max(1, max_size) + 1)
        return plan_call(
            options.budget, fun, build, args, {}, sizes, key=key, is_settled=is_settled
        )
    program = build(block_size)
    if not options.jit:
        return program
    return compile_call(fun, program, args, {}, key=(*key, block_size), is_settled=is_settled)


def run_blocks(
    problem: Callable[..., BlockProblem],
    functions: Sequence[TracedFunction],
    x: PyTree,
    options: Options,
    block_size: int,
    max_size: int,
    progress: bool,
    *,
    key: Hashable,
) -> tuple[list[PyTree], PyTree]:
    """Compute the results of `problem(*functions)` at `x` in one program, and `aux`.

    `plan_blocks` chooses the block size and compiles the program.
    """

    def build(size: int) -> Fun:
        def program(
            consts: Sequence[Sequence[_jax.Value]], x: PyTree
        ) -> tuple[list[PyTree], PyTree]:
            bound = [f.bind(values) for f, values in zip(functions, consts, strict=True)]
            return compute_columns(problem(*bound), x, size, options, progress)

        return program

    args = [f.consts for f in functions], put_on_mesh(functions, problem, x, options, progress)
    key = key, progress
    plan = plan_blocks(build, functions, args, options, block_size, max_size, key=key)
    return plan(*args)


REPLICATED = PartitionSpec()


def put_on_mesh(
    functions: Sequence[TracedFunction],
    problem: Callable[..., BlockProblem],
    x: PyTree,
    options: Options,
    progress: bool,
) -> PyTree:
    """Return `x` with uncommitted arrays replicated, after checking that the mesh can be used."""
    axis = options.axis
    if axis is None:
        return x
    replicated = axis.sharding(None)
    put = lambda leaf: leaf if is_committed(leaf) else jax.device_put(leaf, replicated)
    x = jax.tree.map(put, x)
    made = problem(*(f.untraced() for f in functions))
    check_closed_over(made.prepare, x, options)
    kinds = dict(zip(axis.mesh.axis_names, axis.mesh.axis_types, strict=True))
    others = [kind for name, kind in kinds.items() if name not in axis.names]
    if progress and AxisType.Explicit in others:
        raise ValueError(
            f"{where()}: progress=True calls back from the devices, which JAX does not support "
            f"on a mesh with Explicit axes other than those along which work is sharded. Leave it "
            f"out, or make these axes Auto."
        )
    return x


def check_closed_over(fun: Fun, x: PyTree, options: Options) -> None:
    """Check that the arrays that a function closes over can be used under `shard_map`."""
    axis = options.axis
    if axis is None or AxisType.Explicit not in axis.mesh.axis_types:
        return
    for const in jax.make_jaxpr(fun)(x).consts:
        if _jax.sharding_of(const) is not None:
            raise ValueError(
                f"{where()}: f closes over an array {const.dtype}{list(const.shape)} that is "
                f"on a mesh with Explicit axes, which JAX does not support under shard_map. "
                f"Let it close over numpy.asarray(array), or use a mesh with Auto axes."
            )


def _compute_sharded(
    problem: BlockProblem, x: PyTree, size: int, options: Options, bar: "Progress | None"
) -> tuple[list[PyTree], PyTree]:
    """Return the results, sharded or replicated, and `aux`, replicated.

    Every device makes the linear maps itself, which is little work, and computes its shard of the
    columns in blocks. That needs no communication. With c devices each has n / c columns, rounded
    up. Columns beyond the last are copies of the last one, and are dropped.

    A result stays sharded along the axis of its columns. It is gathered if it is to be replicated,
    or if c does not divide that axis, because JAX shards an axis evenly or not at all.
    """
    assert options.axis is not None
    axis, sharded = options.axis, _Sharded(options.axis, options.replicated)

    def on_device(x: PyTree) -> tuple[list[PyTree], PyTree]:
        prepared, aux = problem.prepare(x)
        tick = None if bar is None else functools.partial(bar.tick, axis.axis_index())

        def result(part: Part) -> PyTree:
            length = options.local_length(part.length)
            before, last = axis.axis_index() * length, jnp.int32(part.length - 1)
            column = lambda index: part.column(prepared, jnp.minimum(before + index, last))
            shard = map_indices(column, length, size, out_axes=part.axis, each_chunk=tick)
            return sharded.result(part, shard)

        return list(map(result, problem.parts)), aux

    def first_columns(x: PyTree) -> list[PyTree]:
        prepared, _ = problem.prepare(x)
        return [part.column(prepared, 0) for part in problem.parts]

    # Traced under `shard_map`, as columns will be.
    shapes = jax.eval_shape(axis.shard_map(first_columns, (REPLICATED,), REPLICATED), x)
    specs = list(map(sharded.specs, problem.parts, shapes))
    results, aux = axis.shard_map(on_device, (REPLICATED,), (specs, REPLICATED))(x)
    is_spec = lambda spec: isinstance(spec, PartitionSpec)
    return jax.tree.map(sharded.constrained, specs, results, is_leaf=is_spec), aux


@dataclass(frozen=True)
class _Sharded:
    """The sharding of results along an axis of the mesh."""

    axis: MeshAxis
    replicated: bool

    def result(self, part: Part, shard: PyTree) -> PyTree:
        """Return the result from the local shard of columns, gathered if necessary."""
        if self._stays(part):
            rows = part.shape and (part.shape[0] // self.axis.count, *part.shape[1:])
            return replace(part, shape=rows).result(shard)
        gathered = jax.tree.map(lambda array: self._gathered(array, part), shard)
        result = part.result(gathered)
        return result if part.into is None else jax.tree.map(self._local_rows, result)

    def specs(self, part: Part, column: PyTree) -> PyTree:
        """Return the partition specs of a result, for columns of these shapes."""
        if part.into is not None:
            vector = jax.ShapeDtypeStruct((part.length, *column.shape), column.dtype)
            result = jax.eval_shape(part.into, vector)
            spec = lambda x: self.axis.spec(0) if self._divides(x) else REPLICATED
            return jax.tree.map(spec, result)
        if not self._stays(part):
            return jax.tree.map(lambda _: REPLICATED, column)
        position = lambda x: 0 if part.axis == 0 else x.ndim
        return jax.tree.map(lambda x: self.axis.spec(position(x)), column)

    def constrained(self, spec: PartitionSpec, result: Array) -> Array:
        """Constrain a result to be sharded as the spec says, and not along other axes of the mesh.

        A sharding along explicit axes is part of the type already.
        """
        mesh, names = self.axis.mesh, self.axis.names
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if AxisType.Auto not in kinds.values():
            return result
        if any(kinds[name] is AxisType.Explicit for name in names):
            spec = REPLICATED
        return lax.with_sharding_constraint(result, NamedSharding(mesh, spec))

    def _stays(self, part: Part) -> bool:
        """Return whether a result stays sharded by columns."""
        if part.into is not None or self.replicated or part.shape == ():
            return False
        length = part.length if part.shape is None else part.shape[0]
        return length % self.axis.count == 0

    def _gathered(self, array: Array, part: Part) -> Array:
        """Return the columns of all devices."""
        if self.axis.count == 1:
            return array
        position = part.axis % array.ndim
        joined = self.axis.all_gather(array, position)
        return lax.slice_in_dim(joined, 0, part.length, axis=position)

    def _local_rows(self, array: Array) -> Array:
        """Return the local shard of a replicated array along its first axis, if it divides."""
        if not self._divides(array):
            return array
        rows = array.shape[0] // self.axis.count
        return lax.dynamic_slice_in_dim(array, self.axis.axis_index() * rows, rows, 0)

    def _divides(self, like: Array | jax.ShapeDtypeStruct) -> bool:
        return not self.replicated and like.ndim > 0 and like.shape[0] % self.axis.count == 0


def why_not(problem: BlockProblem, x: PyTree) -> Exception | None:
    """Return the error that tracing the derivatives of a problem raises, or None."""
    if not problem.parts:
        return None
    return raised(lambda x: problem.parts[0].column(problem.prepare(x)[0], 0), x)


def has_derivative(derivative: Fun, *args: PyTree) -> bool:
    """Return whether a function that computes a derivative can be traced and lowered."""
    return raised(derivative, *args) is None


def raised(fun: Fun, *args: PyTree) -> Exception | None:
    """Return the error that a function raises when it is traced and lowered, or None.

    A `while_loop` cannot be differentiated in reverse mode, nor a `jax.custom_vjp` function in
    forward mode. JAX raises an error when it reaches that operation: while derivatives are traced,
    or only while they are lowered. So both are tried.
    """
    try:
        program, _ = _jax.trace_with_constants(fun, *args)
        leaves = [*program.consts, *jax.tree.leaves(args)]
        jax.jit(_jax.with_constants(program)).lower(*map(_jax.shape_of, leaves))
    except Exception as error:  # noqa: BLE001  Its type depends on the operation.
        return error
    return None


@contextmanager
def advised(
    reason: Callable[[], Exception | None], advice: Callable[[], str | None]
) -> Generator[None]:
    """Explain an error inside the block if the function lacks the derivatives taken there.

    If the block raises, `reason` tries these derivatives alone. If they also fail, `advice` tries
    alternatives and returns what works, which becomes the error message. Any other error, of JAX or
    of the user-supplied function, propagates unchanged.
    """
    try:
        yield
    except Exception as error:
        lacking = reason()
        known = None if lacking is None else advice()
        if known is None:
            raise
        said = str(lacking).strip().split("\n", 1)[0]
        raise ValueError(f"{where()}: {known} JAX says: {said}") from error


def advised_to_go_forward(
    problem: Callable[[Fun], BlockProblem],
    f: TracedFunction,
    x: PyTree,
    has_aux: bool = False,
) -> AbstractContextManager[None]:
    """Return `advised` for second derivatives, which are taken forward over reverse."""
    g = f.traced()
    value = (lambda x: g(x)[0]) if has_aux else g

    def advice() -> str | None:
        along = lambda of: lambda x: jax.jvp(of, (x,), (x,))[1]
        if not has_derivative(along(along(value)), x):
            return None
        return (
            "f has no derivative in reverse mode, which its gradient takes. It has second "
            "derivatives by forward mode alone: curvax.jacobian(lambda x: curvax.jacobian(f, x, "
            "mode='forward')[0], x, mode='forward')[0] is the Hessian."
        )

    return advised(lambda: why_not(problem(g), x), advice)


class Progress:
    """A progress bar over `total` blocks, of which some may be done already.

    The program calls back after each block. The bar opens with the first block of a run and closes
    with the last, so that a compiled program can run several times. Devices of a mesh compute
    equally many blocks; the first device advances the bar. Only the first process shows it.
    """

    def __init__(self, description: str, total: int, done: int = 0) -> None:
        self._total = total
        self._done = done
        self._description = description
        self._bar: Any = None

    @classmethod
    def of(cls, lengths: Sequence[int], size: int) -> "Progress":
        """Return the bar of the current public function, for columns in blocks of `size`."""
        blocks = [max(1, -(-length // size)) for length in lengths]
        return cls(where().partition(".")[2], sum(blocks))

    def tick(self, device: Array | None = None) -> None:
        """Insert a callback that advances the bar into the program; with a device, on the first."""
        if device is None:
            jax.debug.callback(self.advance)
        else:
            jax.debug.callback(self._advance_on_first, device)

    def _advance_on_first(self, device: ArrayLike) -> None:
        if device == 0:
            self.advance()

    def advance(self, blocks: int = 1) -> None:
        """Advance the bar by some blocks, while the program runs."""
        if not blocks or jax.process_index() > 0:
            return
        from tqdm.auto import tqdm  # Imported here, because it takes as long as all of curvax.

        if self._bar is None:
            self._bar = tqdm(
                total=self._total, desc=self._description, unit="block", initial=self._done
            )
        self._bar.update(blocks)
        if self._bar.n >= self._total:
            self._bar.close()
            self._bar = None
