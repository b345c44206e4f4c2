"""What all functions of this package are given, checked in one place.

These are the point at which derivatives are taken (`Point`), the sizes of blocks, the memory budget
and the mesh (`Options`), and the function itself (`TracedFunction`).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._errors import check_count, check_size, where
from curvax._tree import leaf_name
from curvax._types import Array, Fun, PyTree, Size, TreeDef
from curvax.devices.agreement import check_agreement, describe
from curvax.devices.mesh_axis import MeshAxis
from curvax.memory.budget import Budget
from curvax.memory.compiled import BudgetRequest, Objective, check_budget

ADVICE = "What else helps: checkpoint=True."
ADVICE_WITH_DISK = "What else helps: checkpoint=True, or streaming the result to disk with out=."


@dataclass(frozen=True)
class Options:
    """The validated options that the functions of this package share.

    On a mesh, sizes and budget are those of each device.
    """

    nbatches: int
    batch_size: int | None
    budget: BudgetRequest | None
    jit: bool
    axis: MeshAxis | None
    """Devices among which columns are sharded; None for JAX's default device."""
    replicated: bool
    to_disk: bool
    """Whether results go to disk. Devices then compute one block after the other of all columns."""

    @property
    def has_size(self) -> bool:
        """Whether the user named a size or a number of blocks."""
        return self.batch_size is not None or self.nbatches != 1

    def local_length(self, length: int) -> int:
        """Return how many of `length` columns each device computes, at most."""
        return length if self.axis is None or self.to_disk else -(-length // self.axis.count)


def check_options(
    nbatches: Any,
    batch_size: Any,
    memory_budget: Budget | None,
    objective: Objective,
    jit: bool,
    mesh: Any,
    axis: Any,
    replicated: bool = False,
    to_disk: bool | None = None,
) -> Options:
    """Check the options that do not depend on the point.

    `to_disk` is None for a function that cannot write to disk.
    """
    along = MeshAxis.of(mesh, axis, replicated)
    if replicated and to_disk:
        raise ValueError(
            f"{where()}: replicated=True asks for results in the memory of every device, and "
            f"out= for results on disk. Leave one of them out."
        )
    if along is not None:
        along.check_outside()
        _check_processes(along)
    number = check_count("nbatches", nbatches)
    size = check_size("batch_size", batch_size)
    if size is not None and number != 1:
        raise ValueError(
            f"{where()}: give nbatches or batch_size, not both; got nbatches={number} and "
            f"batch_size={size}."
        )
    budget = check_budget(
        memory_budget,
        {"nbatches": None if number == 1 else number, "batch_size": size},
        objective=objective,
        advice=ADVICE if to_disk is None else ADVICE_WITH_DISK,
        is_multi_process=along is not None and along.is_multi_process,
    )
    if budget is not None and not jit:
        raise ValueError(
            f"{where()}: a memory budget is for a compiled program; it cannot be kept with "
            "jit=False."
        )
    if along is not None and not jit:
        raise ValueError(
            f"{where()}: what runs on a mesh is a compiled program; mesh= does not go with "
            "jit=False."
        )
    return Options(number, size, budget, jit, along, replicated, bool(to_disk))


def check_block_size(
    options: Options, length: int, *, most: int | None = None, what: str = "parameters"
) -> int:
    """Return the number of columns in a block of the `length` columns of a device.

    `nbatches` is at most `most`, by default the number of columns.
    """
    most = length if most is None else most
    if options.nbatches > max(1, most):
        count = 1 if options.axis is None else options.axis.count
        each = f" on each of {count} devices" if count > 1 and not options.to_disk else ""
        raise ValueError(
            f"{where()}: nbatches={options.nbatches} is more than there are {what} to share "
            f"out{each}: {most}."
        )
    if options.batch_size is None:
        return max(1, -(-length // options.nbatches))
    return max(1, min(options.batch_size, length))


def _check_processes(axis: MeshAxis) -> None:
    """Check that a mesh belongs to one process or to all, since all take part in collectives."""
    found = {device.process_index for device in axis.mesh.devices.flat}
    if 1 < len(found) < jax.process_count():
        raise ValueError(
            f"{where()}: the mesh has devices of the processes {sorted(found)}, but there are "
            f"{jax.process_count()} processes. Use a mesh with devices of all of them, or of one."
        )


def check_on_mesh(name: str, tree: PyTree, options: Options) -> PyTree:
    """Check that arrays can be used on the mesh, and replicate those of `Explicit` sharding.

    Unit vectors are replicated, and tangents have the types of what they are tangent to.
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
    """Check that `x` can be differentiated with respect to; return its structure, and its arrays.

    Python numbers become arrays: another number is then other data, not another program.
    """
    point = Point.of(x)
    return point, check_on_mesh("x", jax.tree.map(jnp.asarray, x), options)


def unit_vector(index: Size, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array that is one at a flat index and zero elsewhere, or everywhere if outside."""
    indices = jnp.arange(math.prod(shape), dtype=jnp.int32)
    return (indices == index).astype(dtype).reshape(shape)


@dataclass(frozen=True)
class Point:
    """The structure of a pytree of floats, with its `size` coordinates in order.

    Coordinates are numbered as the leaves are, each leaf in row-major order. Leaves may be of
    several dtypes: they are never put into one vector to be differentiated, so each keeps its
    precision. Only results that are vectors over all coordinates are of a common dtype.
    """

    structure: TreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, x: PyTree, name: str = "x") -> "Point":
        """Check that `x` has only what derivatives are taken by: real floating-point arrays."""
        leaves = []
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
    def dtype(self) -> Any:
        """Dtype of vectors over all coordinates."""
        widest = jnp.finfo(jnp.float32).dtype if not self.dtypes else self.dtypes[0]
        # Strict promotion is for what users compute; a vector over all leaves has one dtype.
        with jax.numpy_dtype_promotion("standard"):
            for dtype in self.dtypes:
                widest = jnp.promote_types(widest, dtype)
        return widest

    @property
    def offsets(self) -> list[int]:
        """First coordinate of each leaf."""
        return [0, *accumulate(self.sizes)][:-1]

    def part(self, leaves: range) -> "Point":
        """Return the point of some of the leaves, as a list."""
        structure = jax.tree.structure([0] * len(leaves))
        return Point(
            structure,
            self.shapes[leaves.start : leaves.stop],
            self.dtypes[leaves.start : leaves.stop],
        )

    def unflatten(self, vector: Array) -> PyTree:
        """Return a vector over all coordinates as a pytree like the point, in its dtypes."""
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
        """Return an array whose last axis is over all coordinates as a pytree like the point."""
        parts = [
            array[..., start : start + size].reshape((*array.shape[:-1], *shape))
            for start, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, parts)

    def flatten(self, tree: PyTree) -> Array:
        """Return a pytree like the point as a vector over all coordinates."""
        leaves = [leaf.reshape(-1).astype(self.dtype) for leaf in jax.tree.leaves(tree)]
        return jnp.concatenate(leaves) if leaves else jnp.zeros((0,), self.dtype)

    def direction(self, index: Size) -> PyTree:
        """Return the unit tangent along a coordinate."""
        leaves = zip(self.offsets, self.shapes, self.dtypes, strict=True)
        parts = [unit_vector(index - start, shape, dtype) for start, shape, dtype in leaves]
        return jax.tree.unflatten(self.structure, parts)


def _as_array(leaf: Any) -> Any:
    """Return what has the shape and dtype of a leaf, or None if it is nothing like an array."""
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
    """A function, and what it does with arguments like some.

    What a function reads may change between two calls: attributes of the object whose method it is,
    variables that it closes over, globals. So it is traced at each call, which takes little time
    compared with tracing its derivatives. Derivatives are taken of what was traced, with the arrays
    that it closed over as arguments, and what was compiled for the same jaxpr before is used again
    (`_jax.program_key`).

    A derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) is Python that runs when derivatives are
    traced. It may read what has changed as well. With rules that are not JAX's own, the function is
    not settled: the whole program is traced at each call, to be compared with what was compiled.
    """

    fun: Fun
    """The function itself, not what `jax.jit` made of it."""
    program: Any
    outputs: PyTree
    """The shapes of what it returns."""
    key: Hashable | None
    """What its derivatives depend on, except constants; None if only tracing them would tell."""
    is_settled: bool
    """Whether the compiled program is that of the traced function, which `key` identifies."""

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that it closes over, if they are arguments of the compiled program."""
        return tuple(self.program.consts) if self.is_settled else ()

    def bind(self, consts: Sequence[Any]) -> Fun:
        """Return the function to differentiate, with these in place of its `consts`."""
        return self._traced(consts) if self.is_settled else self.untraced()

    def traced(self) -> Fun:
        """Return what was traced as a function."""
        return self._traced(self.program.consts)

    def untraced(self) -> Fun:
        """Return the function, to be traced again."""
        return _jax.untraced(self.fun)

    def _traced(self, consts: Sequence[Any]) -> Fun:
        run, structure = _jax.with_constants(self.program), jax.tree.structure(self.outputs)
        return lambda *args: jax.tree.unflatten(structure, run(*consts, *jax.tree.leaves(args)))


def trace_function(fun: Fun, args: Sequence[PyTree], options: Options) -> TracedFunction:
    """Trace a function for arguments like these."""
    fun = _jax.unjitted(fun)
    program, outputs = _jax.trace_with_constants(fun, *args)
    key = _jax.program_key(program, differentiated=True)
    if key is not None:
        key = key, jax.tree.structure(outputs)
    # On a mesh, types say where arrays are, and those of a trace outside it do not fit.
    is_settled = key is not None and options.jit and options.axis is None
    return TracedFunction(fun, program, outputs, key, is_settled)


def value_shapes(f: TracedFunction, has_aux: bool) -> PyTree:
    """Return the shapes of the value of `f`, without those of its auxiliary value."""
    returned = f.outputs
    if not has_aux:
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{where()}: with has_aux=True, f must return a pair (value, aux), got {returned}."
        )
    return returned[0]


def check_scalar(returned: Any, what: str, advice: str = "") -> None:
    """Check that a function returns one real floating-point number."""
    real = hasattr(returned, "dtype") and jnp.issubdtype(returned.dtype, jnp.floating)
    if not real or returned.shape != ():
        raise TypeError(f"{where()}: {what}, got {returned}.{advice}")
