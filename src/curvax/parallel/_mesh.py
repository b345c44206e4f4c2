"""`MeshAxis`: the devices along an axis of a mesh, and functions that run on all of them.

A function that takes `mesh=` cuts its work into as many parts as there are devices along one axis
(or several), runs on each device with its part by `jax.shard_map`, and puts the results together.
What is cut, and how results are put together, is said by partition specs, as everywhere in JAX.
Devices along other axes of the mesh do the same as their neighbours.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from curvax import _compat
from curvax._tree import leaf_name
from curvax._types import Array, PyTree

__all__ = ["Axis", "MeshAxis"]

Axis = str | Sequence[str]
"""The name of an axis of a mesh, or of several that count as one."""


@dataclass(frozen=True)
class MeshAxis:
    """The axes of a mesh among whose devices something is split."""

    mesh: Mesh
    names: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Any, axis: Any, where: str) -> "MeshAxis | None":
        """What the user gave as `mesh` and `axis`. None is no mesh."""
        if mesh is None:
            if axis is not None:
                raise ValueError(f"{where}: axis={axis!r} is an axis of a mesh; give mesh as well.")
            return None
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"{where}: mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('data',))"
                f" makes; got {type(mesh).__name__}."
            )
        if axis is None:
            if len(mesh.axis_names) != 1:
                raise ValueError(
                    f"{where}: the mesh has the axes {mesh.axis_names}; say along which the work "
                    f"is to be split, with axis=."
                )
            return cls(mesh, tuple(mesh.axis_names))
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        missing = [name for name in names if name not in mesh.axis_names]
        if missing or not names or len(set(names)) < len(names):
            raise ValueError(
                f"{where}: axis={axis!r} must name one or more axes of the mesh, which has "
                f"{mesh.axis_names}."
            )
        return cls(mesh, names)

    @property
    def count(self) -> int:
        """How many devices there are along it."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def is_shared(self) -> bool:
        """Whether several processes have a part of the mesh."""
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def spec(self, position: int | None) -> PartitionSpec:
        """The spec of an array that is split along this axis of its own; None: that is whole."""
        if position is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * position, self.names)

    def sharding(self, position: int | None) -> NamedSharding:
        """As `spec`, with the mesh."""
        return NamedSharding(self.mesh, self.spec(position))

    def index(self) -> Array:
        """The number of the device that asks, in a function that runs on all."""
        return lax.axis_index(self.names)

    def on_all(self, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`fun` on all devices at once, each with its part of arguments and results.

        Specs are as for `jax.shard_map`: of all arguments, a tuple of pytrees that may be prefixes.
        """
        mapped = jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.names),
            check_vma=False,
        )

        def call(*args: Any) -> Any:
            if AxisType.Explicit in self.mesh.axis_types:
                # Arrays say in their types how they are split, and must say what specs do.
                args = tuple(map(self._resharded, in_specs, args))
            return mapped(*args)

        # Only compiled programs can leave other axes of the mesh alone.
        return jax.jit(call)

    def _resharded(self, specs: Any, tree: PyTree) -> PyTree:
        to = lambda spec, part: jax.tree.map(
            lambda x: jax.sharding.reshard(x, NamedSharding(self.mesh, spec)), part
        )
        return jax.tree.map(to, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def check_divides(self, length: int, what: str, where: str) -> None:
        """Check that as many can be dealt out evenly."""
        if length % self.count:
            lower = length - length % self.count
            one_of = f"{lower} or {lower + self.count}" if lower else f"{self.count}"
            raise ValueError(
                f"{where}: {what} is split evenly among {self.count} devices of the mesh, but has "
                f"{length} examples, which {self.count} does not divide. Use {one_of}."
            )

    def check_placement(self, name: str, tree: PyTree, where: str) -> None:
        """Check that arrays of which it is said where they are, are on the devices of the mesh."""
        devices = set(self.mesh.devices.flat)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not isinstance(leaf, jax.Array) or _compat.is_tracer(leaf) or not leaf.committed:
                continue
            if leaf.sharding.device_set != devices:
                found = sorted(map(str, leaf.sharding.device_set))
                raise ValueError(
                    f"{where}: {leaf_name(name, path)} is committed to {', '.join(found[:4])}"
                    f"{', …' if len(found) > 4 else ''}, which is not where the mesh is "
                    f"({len(devices)} devices). Move it there by jax.device_put(…, jax.sharding."
                    f"NamedSharding(mesh, jax.sharding.PartitionSpec()))."
                )
