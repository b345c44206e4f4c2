"""`MeshAxis`: the devices along an axis of a mesh, arrays put on them, and `jax.shard_map`.

A function that takes `mesh=` shards its work along one axis of the mesh, or several, and runs on
every device by `jax.shard_map`. Partition specs say how arguments and results are sharded. Along
other axes of the mesh nothing is sharded that was not before.

Committed arrays stay where they are. Of others, a program with one process has all; in a
multi-process program each process has its own examples of a batch, and the same values of all else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from curvax import _jax
from curvax._errors import check_divides, where
from curvax._tree import leaf_name
from curvax._types import Array, PyTree

Axis = str | Sequence[str]
"""The name of an axis of a mesh, or of several that count as one."""

_CLOSED_OVER = (
    "curvax: if the function closes over an array that is on a mesh with Explicit axes, pass it as "
    "an argument instead; JAX cannot close over such arrays in what runs on several devices."
)


def check_is_mesh(mesh: Any) -> None:
    """Check that what the user gave as `mesh` is one."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{where()}: mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',)) "
            f"makes; got {type(mesh).__name__}."
        )


@dataclass(frozen=True)
class MeshAxis:
    """The axes of a mesh along which work is sharded."""

    mesh: Mesh
    names: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Any, axis: Any, replicated: bool = False) -> "MeshAxis | None":
        """Check `mesh`, `axis` and `replicated` as the user gave them. None is no mesh."""
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
        is_one = isinstance(axis, str) or not isinstance(axis, Sequence)
        names: tuple[Any, ...] = (axis,) if is_one else tuple(axis)
        missing = [name for name in names if name not in mesh.axis_names]
        if missing or not names or len(set(names)) < len(names):
            raise ValueError(
                f"{where()}: axis={axis!r} must name one or more axes of the mesh, which has "
                f"{mesh.axis_names}."
            )
        return cls(mesh, names)

    @property
    def count(self) -> int:
        """The number of devices along it."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def local_count(self) -> int:
        """The number of shards that are on devices of this process."""
        axes = [self.mesh.axis_names.index(name) for name in self.names]
        each = np.ndenumerate(self.mesh.devices)
        here = [place for place, device in each if device.process_index == jax.process_index()]
        return len({tuple(place[axis] for axis in axes) for place in here})

    @property
    def is_multi_process(self) -> bool:
        """Whether the mesh has devices of several processes."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def spec(self, position: int | None) -> PartitionSpec:
        """Return the spec of an array that is sharded along its axis `position`, or replicated."""
        if position is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * position, self.names)

    def sharding(self, position: int | None) -> NamedSharding:
        """Return the sharding of such an array."""
        return NamedSharding(self.mesh, self.spec(position))

    def put(self, leaf: Any, spec: PartitionSpec, *, is_process_local: bool = False) -> Any:
        """Put an array on the devices of the mesh, unless it is committed.

        With `is_process_local`, each process of several has its own part of what is sharded;
        otherwise each has all of it. A Python number stays one: it has no dtype yet.
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
        """`lax.axis_index`, under `shard_map`."""
        return lax.axis_index(self.names)

    def psum(self, x: Array) -> Array:
        """`lax.psum`, under `shard_map`."""
        return lax.psum(x, self.names)

    def all_gather(self, x: Array, position: int) -> Array:
        """`lax.all_gather` along an axis that is there already (`tiled`), under `shard_map`."""
        if _jax.can_transpose_gather(x):
            return lax.all_gather(x, self.names, axis=position, tiled=True)
        length = x.shape[position]
        shape = (*x.shape[:position], self.count * length, *x.shape[position + 1 :])
        own = lax.dynamic_update_slice_in_dim(
            _jax.filled_like(x, shape=shape), x, self.axis_index() * length, position
        )
        return self.psum(own).astype(x.dtype)

    def shard_map(
        self, fun: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`jax.shard_map` along these axes of the mesh, compiled.

        Specs name these axes only: `in_specs` is a tuple with a pytree prefix for each argument.
        How arrays are sharded along other axes is left to them.
        """

        def call(*args: Any) -> Any:
            around = jax.sharding.get_abstract_mesh()
            mesh: Any = around if AxisType.Manual in around.axis_types else self.mesh
            if AxisType.Explicit in mesh.axis_types:
                # Their types say how arrays are sharded, and must agree with the specs.
                args = tuple(self._typed(mesh, *pair) for pair in zip(in_specs, args, strict=True))
            options: Any = {"mesh": mesh, "axis_names": set(self.names), "check_vma": False}
            mapped = jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs, **options)
            try:
                return mapped(*args)
            except (NotImplementedError, ValueError) as error:
                if AxisType.Explicit in mesh.axis_types and "Explicit" in str(error):
                    error.add_note(_CLOSED_OVER)
                raise

        # Only compiled programs can leave other axes of the mesh alone.
        return jax.jit(call)

    def _typed(self, mesh: Any, specs: Any, tree: PyTree) -> PyTree:
        """Reshard arrays as specs say, and keep how they are sharded along other axes."""
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

        def entry(wanted: Any, found: Any) -> tuple[str, ...]:
            others = [name for name in _names(found) if name not in self.names]
            return tuple(n for n in (*_names(wanted), *others) if kinds[n] is AxisType.Explicit)

        def reshard(spec: PartitionSpec, x: Array) -> Array:
            found = getattr(jax.typeof(x).sharding, "spec", ())
            pairs = zip(*([*s, *[None] * (x.ndim - len(s))] for s in (spec, found)), strict=True)
            to = PartitionSpec(*(entry(*pair) or None for pair in pairs))
            return jax.sharding.reshard(x, NamedSharding(mesh, to))

        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda x: reshard(spec, x), part),
            specs,
            tree,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def check_outside(self) -> None:
        """Check that this is not called inside a `jax.shard_map` over the same axes."""
        around = jax.sharding.get_abstract_mesh()
        kinds = dict(zip(around.axis_names, around.axis_types, strict=True))
        manual = [name for name, kind in kinds.items() if kind is AxisType.Manual]
        inside = [name for name in self.names if name in manual]
        if inside:
            raise ValueError(
                f"{where()}: mesh= splits work along {self.names}, but is called inside of a "
                f"jax.shard_map over {tuple(manual)}, where each device has its part already. "
                f"Leave mesh out there, or call it outside."
            )
        if manual and dict(around.shape) != dict(self.mesh.shape):
            raise ValueError(
                f"{where()}: the mesh has the axes {dict(self.mesh.shape)}, but this is called "
                f"inside of a jax.shard_map over {tuple(manual)} of another mesh, which has "
                f"{dict(around.shape)}. Use one mesh for both."
            )

    def check_divides(self, length: int, what: str, *, is_of_process: bool = False) -> None:
        """Check that devices divide a number of examples: all of them, or those of this process."""
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
                found = sorted(map(str, leaf.sharding.device_set))
                raise ValueError(
                    f"{where()}: {leaf_name(name, path)} is committed to {', '.join(found[:4])}"
                    f"{', …' if len(found) > 4 else ''}, which is not where the mesh is "
                    f"({len(devices)} devices). Move it there by jax.device_put(…, jax.sharding."
                    f"NamedSharding(mesh, jax.sharding.PartitionSpec()))."
                )


def _names(entry: Any) -> tuple[str, ...]:
    """Return the names of the axes in an entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def is_committed(leaf: Any) -> bool:
    """Return whether an array is committed to devices. Tracers are: they go where they run."""
    return _jax.is_tracer(leaf) or (isinstance(leaf, jax.Array) and leaf.committed)


def to_host(leaf: Any) -> Any:
    """Return all of a JAX array, also what other processes have of it, as a NumPy array.

    All processes must call this. What is not a JAX array is returned as it is.
    """
    return np.asarray(_jax.gathered_whole(leaf)) if isinstance(leaf, jax.Array) else leaf
