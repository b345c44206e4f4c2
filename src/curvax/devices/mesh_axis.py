"""`MeshAxis`: the devices along an axis of a mesh, placement of arrays, and `jax.shard_map`.

A function that takes `mesh=` shards its work along one or several axes of the mesh and runs under
`jax.shard_map`. Partition specs say how arguments and results are sharded along these axes. How
arrays are sharded along other axes of the mesh does not change.

Committed arrays stay where they are. An uncommitted array is complete in a single-process program.
In a multi-process program, each process has its own examples of a batch, and the same values of
everything else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from curvax import _jax
from curvax._errors import check_divides, where
from curvax._tree import leaf_name
from curvax._types import Array, Fun, PyTree

T = TypeVar("T")

Axis: TypeAlias = str | Sequence[str]
"""The name of an axis of a mesh, or of several that count as one."""

SpecEntry: TypeAlias = str | Sequence[str] | None
"""An entry of a `PartitionSpec`: the mesh axes that an array axis is sharded along."""

_CLOSED_OVER = (
    "curvax: if the function closes over an array that is on a mesh with Explicit axes, pass it as "
    "an argument instead; JAX cannot close over such arrays under shard_map."
)


def check_is_mesh(mesh: object) -> None:
    """Check that a user-supplied `mesh` is a `jax.sharding.Mesh`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{where()}: mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',)) "
            f"makes; got {type(mesh).__name__}."
        )


@dataclass(frozen=True)
class MeshAxis:
    """One or several axes of a mesh, along which work is sharded."""

    mesh: Mesh
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, mesh: Mesh | None, axis: Axis | None, replicated: bool = False
    ) -> "MeshAxis | None":
        """Return the axis for user-supplied arguments after checking them, None without a mesh."""
        if mesh is None:
            if axis is not None:
                raise ValueError(
                    f"{where()}: axis={axis!r} is an axis of a mesh; give mesh as well."
                )
            if replicated:
                raise ValueError(
                    f"{where()}: replicated=True asks for results on every device of a mesh; give "
                    f"mesh as well."
                )
            return None
        check_is_mesh(mesh)
        if axis is None:
            if len(mesh.axis_names) != 1:
                raise ValueError(
                    f"{where()}: the mesh has the axes {mesh.axis_names}; say along which the work "
                    f"is to be split, with axis=."
                )
            return cls(mesh, tuple(mesh.axis_names))
        names = tuple(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else (axis,)
        missing = [name for name in names if name not in mesh.axis_names]
        if missing or not names or len(set(names)) < len(names):
            raise ValueError(
                f"{where()}: axis={axis!r} must name one or more axes of the mesh, which has "
                f"{mesh.axis_names}."
            )
        return cls(mesh, names)

    @property
    def count(self) -> int:
        """Number of devices along the axis."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def local_count(self) -> int:
        """Number of shards that are on devices of this process."""
        axes = [self.mesh.axis_names.index(name) for name in self.names]
        local_indices = [
            index
            for index, device in np.ndenumerate(self.mesh.devices)
            if device.process_index == jax.process_index()
        ]
        return len({tuple(index[axis] for axis in axes) for index in local_indices})

    @property
    def is_multi_process(self) -> bool:
        """Whether the mesh has devices of several processes."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def spec(self, position: int | None) -> PartitionSpec:
        """Return the spec of an array sharded along its axis `position`; None is replicated."""
        if position is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * position, self.names)

    def sharding(self, position: int | None) -> NamedSharding:
        """Return the sharding of an array along its axis `position`; None is replicated."""
        return NamedSharding(self.mesh, self.spec(position))

    def put(
        self, leaf: ArrayLike, spec: PartitionSpec, *, is_process_local: bool = False
    ) -> ArrayLike:
        """Put an array on the devices of the mesh, unless it is committed.

        In a multi-process program, `is_process_local` says that each process has its own part of
        the sharded axis; otherwise each has the complete array. A Python scalar is returned
        unchanged: it has no dtype yet.
        """
        if is_committed(leaf) or isinstance(leaf, bool | int | float | complex):
            return leaf
        sharding = NamedSharding(self.mesh, spec)
        if not self.is_multi_process:
            return jax.device_put(leaf, sharding)
        local = np.asarray(_jax.unwrap_keys(leaf) if isinstance(leaf, jax.Array) else leaf)
        shape = None if is_process_local else local.shape
        return _jax.wrap_keys(jax.make_array_from_process_local_data(sharding, local, shape), leaf)

    def axis_index(self) -> Array:
        """Return this device's index along the axis; call under `shard_map`."""
        return lax.axis_index(self.names)

    def psum(self, x: Array) -> Array:
        """Sum over the devices along the axis; call under `shard_map`."""
        return lax.psum(x, self.names)

    def all_gather(self, x: Array, position: int) -> Array:
        """Concatenate the devices' arrays along their axis `position`; call under `shard_map`.

        Equal to `lax.all_gather` with `tiled=True`.
        """
        if _jax.can_transpose_gather(x):
            return lax.all_gather(x, self.names, axis=position, tiled=True)
        length = x.shape[position]
        shape = (*x.shape[:position], self.count * length, *x.shape[position + 1 :])
        padded = lax.dynamic_update_slice_in_dim(
            _jax.filled_like(x, shape=shape), x, self.axis_index() * length, position
        )
        return self.psum(padded).astype(x.dtype)

    def shard_map(self, fun: Fun, in_specs: tuple[PyTree, ...], out_specs: PyTree) -> Fun:
        """Map a function over shards along these axes of the mesh, and jit it.

        Equal to `jax.jit(jax.shard_map(fun, …))` over these axes, except that it also works inside
        a `jax.shard_map` over other axes, and reshards arguments on meshes with Explicit axes.

        Arguments:
            fun: Function of local shards.
            in_specs: For each argument a pytree prefix of partition specs, which name these axes
                only. Arrays keep their shardings along other axes.
            out_specs: The same for the result.

        Returns:
            A function of sharded arrays.
        """

        def call(*args: PyTree) -> PyTree:
            context_mesh = jax.sharding.get_abstract_mesh()
            is_nested = AxisType.Manual in context_mesh.axis_types
            mesh = context_mesh if is_nested else self.mesh
            if AxisType.Explicit in mesh.axis_types:
                # With Explicit axes the type of an array says how it is sharded, and must agree
                # with its spec.
                pairs = zip(in_specs, args, strict=True)
                args = tuple(self._reshard(mesh, specs, arg) for specs, arg in pairs)
            mapped = jax.shard_map(
                fun,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                axis_names=set(self.names),
                check_vma=False,
            )
            try:
                return mapped(*args)
            except (NotImplementedError, ValueError) as error:
                if AxisType.Explicit in mesh.axis_types and "Explicit" in str(error):
                    error.add_note(_CLOSED_OVER)
                raise

        # `jax.shard_map` over some of the axes of a mesh works under `jit` only.
        return jax.jit(call)

    def _reshard(self, mesh: Mesh | AbstractMesh, specs: PyTree, tree: PyTree) -> PyTree:
        """Reshard arrays by `specs` along these axes, and keep their shardings along others."""
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

        def entry(wanted: SpecEntry, current: SpecEntry) -> tuple[str, ...]:
            others = [name for name in _names(current) if name not in self.names]
            return tuple(n for n in (*_names(wanted), *others) if kinds[n] is AxisType.Explicit)

        def reshard(spec: PartitionSpec, x: Array) -> Array:
            current = getattr(jax.typeof(x).sharding, "spec", ())
            pairs = zip(*([*s, *[None] * (x.ndim - len(s))] for s in (spec, current)), strict=True)
            target = PartitionSpec(*(entry(*pair) or None for pair in pairs))
            return jax.sharding.reshard(x, NamedSharding(mesh, target))

        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda x: reshard(spec, x), part),
            specs,
            tree,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def check_outside(self) -> None:
        """Check that the call is not inside a `jax.shard_map` over the same axes."""
        context_mesh = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(context_mesh.axis_names, context_mesh.axis_types, strict=True))
        manual = [name for name, kind in kinds.items() if kind is AxisType.Manual]
        inside = [name for name in self.names if name in manual]
        if inside:
            raise ValueError(
                f"{where()}: mesh= shards work along {self.names}, but is called inside a "
                f"jax.shard_map over {tuple(manual)}, where each device has its shard already. "
                f"Leave mesh out there, or call it outside."
            )
        if manual and dict(context_mesh.shape) != dict(self.mesh.shape):
            raise ValueError(
                f"{where()}: the mesh has the axes {dict(self.mesh.shape)}, but this is called "
                f"inside a jax.shard_map over {tuple(manual)} of another mesh, which has "
                f"{dict(context_mesh.shape)}. Use one mesh for both."
            )

    def check_divides(self, length: int, what: str, *, is_of_process: bool = False) -> None:
        """Check that the number of devices divides a number of examples.

        With `is_of_process`, `length` is the number of examples of this process, and its devices
        count.
        """
        count = self.local_count if is_of_process else self.count
        whose = "this process" if is_of_process else "the mesh"
        check_divides(count, length, what, f"among {count} devices of {whose}")

    def check_placement(self, name: str, tree: PyTree) -> None:
        """Check that committed arrays live on the mesh's devices."""
        devices = set(self.mesh.devices.flat)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not isinstance(leaf, jax.Array) or _jax.is_tracer(leaf) or not leaf.committed:
                continue
            if leaf.sharding.device_set != devices:
                others = sorted(map(str, leaf.sharding.device_set))
                raise ValueError(
                    f"{where()}: {leaf_name(name, path)} is committed to {', '.join(others[:4])}"
                    f"{', …' if len(others) > 4 else ''}, which is not where the mesh is "
                    f"({len(devices)} devices). Move it there by jax.device_put(…, jax.sharding."
                    f"NamedSharding(mesh, jax.sharding.PartitionSpec()))."
                )


def _names(entry: SpecEntry) -> tuple[str, ...]:
    """Return the names of the mesh axes in an entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def is_committed(leaf: object) -> bool:
    """Return whether an array is committed to devices. Tracers count as committed."""
    return _jax.is_tracer(leaf) or (isinstance(leaf, jax.Array) and leaf.committed)


@overload
def to_host(leaf: Array) -> np.ndarray: ...
@overload
def to_host(leaf: T) -> T: ...
def to_host(leaf: T) -> T | np.ndarray:
    """Gather a JAX array from all processes, as a NumPy array; return anything else unchanged.

    Every process must make this call.
    """
    return np.asarray(_jax.gathered_to_host(leaf)) if isinstance(leaf, jax.Array) else leaf
