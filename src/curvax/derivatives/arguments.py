"""Arguments that the functions of this package have in common, and their checks.

These are the point at which derivatives are taken (`Point`), the block size, the memory budget and
the mesh (`Options`), and the function itself (`TracedFunction`).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax import _jax
from curvax._errors import check_count, check_size, where
from curvax._tree import leaf_name
from curvax._types import Array, DType, Fun, PyTree, Size, TreeDef
from curvax.devices.agreement import check_agreement, describe
from curvax.devices.mesh_axis import Axis, MeshAxis
from curvax.memory.budget import Budget
from curvax.memory.compiled import BudgetRequest, Objective, check_budget

Unflatten: TypeAlias = Callable[[Array], PyTree]
"""A function that converts a vector over all coordinates to a pytree like the point."""


class ColumnOptions(TypedDict, total=False):
    """Keyword arguments of `hessian` and `jacobian` that do not affect the type of the result."""

    batch_size: int | None
    memory_budget: Budget | None
    objective: Objective
    progress: bool
    overwrite: bool
    verify: bool
    mesh: Mesh | None
    axis: Axis | None
    replicated: bool


ADVICE = "What else helps: checkpoint=True."
ADVICE_WITH_DISK = "What else helps: checkpoint=True, or streaming the result to disk with out=."


@dataclass(frozen=True)
class Options:
    """Validated options that the functions of this package have in common.

    On a mesh, sizes and budget are per device.
    """

    nbatches: int
    batch_size: int | None
    budget: BudgetRequest | None
    jit: bool
    axis: MeshAxis | None
    """Devices among which columns are sharded; None for JAX's default device."""
    replicated: bool
    to_disk: bool
    """Whether results go to disk. Columns are then not sharded: each block runs on one device."""

    @property
    def has_size(self) -> bool:
        """Whether the user chose a block size or a number of blocks."""
        return self.batch_size is not None or self.nbatches != 1

    def local_length(self, length: int) -> int:
        """Return the number of columns per device, rounded up, if there are `length` in all."""
        return length if self.axis is None or self.to_disk else -(-length // self.axis.count)


def check_options(
    nbatches: int,
    batch_size: int | None,
    memory_budget: Budget | None,
    objective: Objective,
    jit: bool,
    mesh: Mesh | None,
    axis: Axis | None,
    replicated: bool = False,
    to_disk: bool | None = None,
) -> Options:
    """Check the user's options, without knowing the point yet, and return them as `Options`.

    `to_disk` is None for a function that cannot write to disk.
    """
    mesh_axis = MeshAxis.of(mesh, axis, replicated)
    if replicated and to_disk:
        raise ValueError(
            f"{where()}: replicated=True asks for results in the memory of every device, and "
            f"out= for results on disk. Leave one of them out."
        )
    if mesh_axis is not None:
        mesh_axis.check_outside()
        _check_processes(mesh_axis)
    count = check_count("nbatches", nbatches)
    size = check_size("batch_size", batch_size)
    if size is not None and count != 1:
        raise ValueError(
            f"{where()}: give nbatches or batch_size, not both; got nbatches={count} and "
            f"batch_size={size}."
        )
    budget = check_budget(
        memory_budget,
        # 1 is the default, so it counts as not given.
        {"nbatches": None if count == 1 else count, "batch_size": size},
        objective=objective,
        advice=ADVICE if to_disk is None else ADVICE_WITH_DISK,
        is_multi_process=mesh_axis is not None and mesh_axis.is_multi_process,
    )
    if budget is not None and not jit:
        raise ValueError(
            f"{where()}: a memory budget applies to a compiled program; it cannot be kept with "
            "jit=False."
        )
    if mesh_axis is not None and not jit:
        raise ValueError(
            f"{where()}: programs that run on a mesh are compiled; mesh= does not go with "
            "jit=False."
        )
    return Options(count, size, budget, jit, mesh_axis, replicated, bool(to_disk))


def check_block_size(
    options: Options, length: int, *, most: int | None = None, what: str = "parameters"
) -> int:
    """Return the number of columns in a block, for the `length` columns of a device.

    `nbatches` must be at most `most`, by default the number of columns.
    """
    most = length if most is None else most
    if options.nbatches > max(1, most):
        count = 1 if options.axis is None else options.axis.count
        each = f" on each of {count} devices" if count > 1 and not options.to_disk else ""
        raise ValueError(
            f"{where()}: nbatches={options.nbatches} is more than there are {what} to "
            f"divide{each}: {most}."
        )
    if options.batch_size is None:
        return max(1, -(-length // options.nbatches))
    return max(1, min(options.batch_size, length))


def _check_processes(axis: MeshAxis) -> None:
    """Check that a mesh has devices of one process or of all, since all must join collectives."""
    found = {device.process_index for device in axis.mesh.devices.flat}
    if 1 < len(found) < jax.process_count():
        raise ValueError(
            f"{where()}: the mesh has devices of the processes {sorted(found)}, but there are "
            f"{jax.process_count()} processes. Use a mesh with devices of all of them, or of one."
        )


def check_on_mesh(name: str, tree: PyTree, options: Options) -> PyTree:
    """Check that arrays can be used on the mesh, and replicate those sharded by their type.

    Unit vectors are replicated, and a tangent must have the type of its primal.
    """
    axis = options.axis
    if axis is None:
        return tree
    if axis.is_multi_process and not any(map(_jax.is_tracer, jax.tree.leaves(tree))):
        check_agreement(describe(name, tree))
    axis.check_placement(name, tree)

    def replicate(leaf: Array) -> Array:
        if _jax.sharding_of(leaf) is None:
            return leaf
        put = jax.sharding.reshard if _jax.is_tracer(leaf) else jax.device_put
        return put(leaf, axis.sharding(None))

    return jax.tree.map(replicate, tree)


def check_point(x: PyTree, options: Options) -> tuple["Point", PyTree]:
    """Check that `x` can be differentiated with respect to. Return its structure and its arrays.

    Python numbers become arrays, so that a different number does not need a different program.
    """
    point = Point.of(x)
    return point, check_on_mesh("x", jax.tree.map(jnp.asarray, x), options)


def unit_vector(index: Size, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return an array with a one at a flat index, or nowhere if the index is out of bounds."""
    indices = jnp.arange(math.prod(shape), dtype=jnp.int32)
    return (indices == index).astype(dtype).reshape(shape)


@dataclass(frozen=True)
class Point:
    """The structure of a pytree of floating-point arrays, and the order of its coordinates.

    Coordinates are ordered as in `jax.flatten_util.ravel_pytree`: leaf by leaf, each in row-major
    order. Leaves may have different dtypes. They are never concatenated to be differentiated, so
    each keeps its precision; only results that are vectors over all coordinates have one dtype.
    """

    structure: TreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]

    @classmethod
    def of(cls, x: PyTree, name: str = "x") -> "Point":
        """Return the structure of `x`, whose leaves must be real floating-point arrays."""
        leaves: list[Array | jax.ShapeDtypeStruct] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            array = _as_array(leaf)
            if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
                kind = type(leaf).__name__ if array is None else array.dtype
                raise TypeError(
                    f"{where()}: {leaf_name(name, path)} is of type {kind}, but derivatives are "
                    f"taken of and with respect to real floating-point numbers. Convert it, or let "
                    f"the function close over it; split a complex number into its two parts."
                )
            leaves.append(array)
        shapes, dtypes = tuple(a.shape for a in leaves), tuple(a.dtype for a in leaves)
        return cls(jax.tree.structure(x), shapes, dtypes)

    @property
    def sizes(self) -> list[int]:
        """Number of coordinates of each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(self.sizes)

    @property
    def dtype(self) -> DType:
        """Dtype of vectors over all coordinates."""
        widest = jnp.finfo(jnp.float32).dtype if not self.dtypes else self.dtypes[0]
        # A user's strict promotion must not apply here: a vector over all leaves has one dtype.
        with jax.numpy_dtype_promotion("standard"):
            for dtype in self.dtypes:
                widest = jnp.promote_types(widest, dtype)
        return widest

    @property
    def offsets(self) -> list[int]:
        """First coordinate of each leaf."""
        return [0, *accumulate(self.sizes)][:-1]

    def part(self, leaves: range) -> "Point":
        """Return the point of a list of some of the leaves."""
        structure = jax.tree.structure([0] * len(leaves))
        return Point(
            structure,
            self.shapes[leaves.start : leaves.stop],
            self.dtypes[leaves.start : leaves.stop],
        )

    def unflatten(self, vector: Array) -> PyTree:
        """Convert a vector over all coordinates to a pytree like the point, with its dtypes."""
        vector = jnp.asarray(vector)
        if vector.shape != (self.size,):
            raise ValueError(
                f"curvax: a vector over the {self.size} coordinates has the shape ({self.size},), "
                f"got {vector.shape}."
            )
        parts = [
            vector[start : start + size].reshape(shape).astype(dtype)
            for start, size, shape, dtype in zip(
                self.offsets, self.sizes, self.shapes, self.dtypes, strict=True
            )
        ]
        return jax.tree.unflatten(self.structure, parts)

    def split(self, array: Array) -> PyTree:
        """Split the last axis of an array, which is over all coordinates, into the leaves."""
        parts = [
            array[..., start : start + size].reshape((*array.shape[:-1], *shape))
            for start, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, parts)

    def flatten(self, tree: PyTree) -> Array:
        """Convert a pytree like the point to a vector over all coordinates."""
        leaves = [leaf.reshape(-1).astype(self.dtype) for leaf in jax.tree.leaves(tree)]
        return jnp.concatenate(leaves) if leaves else jnp.zeros((0,), self.dtype)

    def direction(self, index: Size) -> PyTree:
        """Return the unit tangent along a coordinate, a pytree like the point."""
        leaves = zip(self.offsets, self.shapes, self.dtypes, strict=True)
        parts = [unit_vector(index - start, shape, dtype) for start, shape, dtype in leaves]
        return jax.tree.unflatten(self.structure, parts)


def _as_array(leaf: object) -> Array | jax.ShapeDtypeStruct | None:
    """Return a leaf as an array, or None if it cannot be one. Shapes are returned as they are."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, str | bytes):  # JAX would take it for the name of a dtype.
        return None
    try:
        return jnp.asarray(leaf)
    except TypeError:
        return None


@dataclass(frozen=True)
class TracedFunction:
    """A user-supplied function and its jaxpr, for arguments of some shapes.

    What a function reads may change between two calls: attributes of the object whose method it is,
    variables that it closes over, globals. So it is traced at each call, which takes little time
    compared with tracing its derivatives. The traced function is differentiated, with the arrays
    that it closes over as arguments, and programs compiled for an equal jaxpr are reused
    (`_jax.program_key`).

    A derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) is Python that runs while derivatives are
    traced, and what it reads may change as well. A function with rules that are not part of JAX is
    not settled: its derivatives are traced at each call, and their jaxpr is compared.
    """

    fun: Fun
    """The function, without `jax.jit` around it."""
    program: _jax.ClosedJaxpr
    outputs: PyTree
    """The shapes of its outputs."""
    key: Hashable | None
    """Key for all that its derivatives depend on but constants; None if that is not known."""
    is_settled: bool
    """Whether `key` identifies the compiled program, so that derivatives need not be traced."""

    @property
    def consts(self) -> tuple[_jax.Value, ...]:
        """The arrays that it closes over, if they are arguments of the compiled program."""
        return tuple(self.program.consts) if self.is_settled else ()

    def bind(self, consts: Sequence[_jax.Value]) -> Fun:
        """Return the function to differentiate, with `consts` replaced by these."""
        return self._traced(consts) if self.is_settled else self.untraced()

    def traced(self) -> Fun:
        """Return a function that evaluates the jaxpr."""
        return self._traced(self.program.consts)

    def untraced(self) -> Fun:
        """Return the user-supplied function, to be traced again."""
        return _jax.untraced(self.fun)

    def _traced(self, consts: Sequence[_jax.Value]) -> Fun:
        run, structure = _jax.with_constants(self.program), jax.tree.structure(self.outputs)
        return lambda *args: jax.tree.unflatten(structure, run(*consts, *jax.tree.leaves(args)))


def trace_function(fun: Fun, args: Sequence[PyTree], options: Options) -> TracedFunction:
    """Trace a function for arguments like these."""
    fun = _jax.unjitted(fun)
    program, outputs = _jax.trace_with_constants(fun, *args)
    key = _jax.program_key(program, differentiated=True)
    if key is not None:
        key = key, jax.tree.structure(outputs)
    # On a mesh the types of arrays include their sharding, which a trace outside it lacks.
    is_settled = key is not None and options.jit and options.axis is None
    return TracedFunction(fun, program, outputs, key, is_settled)


def value_shapes(f: TracedFunction, has_aux: bool) -> PyTree:
    """Return the shapes of the value of `f`, without those of the auxiliary output."""
    returned = f.outputs
    if not has_aux:
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{where()}: with has_aux=True, f must return a pair (value, aux), got {returned}."
        )
    return returned[0]


def check_scalar(returned: PyTree, what: str, advice: str = "") -> None:
    """Check that a function returns a real floating-point scalar."""
    real = hasattr(returned, "dtype") and jnp.issubdtype(returned.dtype, jnp.floating)
    if not real or returned.shape != ():
        raise TypeError(f"{where()}: {what}, got {returned}.{advice}")
