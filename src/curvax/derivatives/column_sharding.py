"""Columns split among the devices of a mesh.

Every device makes the linear maps for itself, which is little work, and computes its share of the
columns, in blocks, as one device would compute all. Nothing has to be sent for that. With c devices
each has n / c columns, rounded up, so that the last of them may have some too many; those are the
last column again, and dropped.

A result stays split along the axis of its columns, unless it is wanted whole, or cannot be split:
JAX splits an axis evenly or not at all. Then each device sends its share to all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from curvax import _jax
from curvax._types import Array, Fun, PyTree
from curvax.derivatives.columns import BlockProblem, Blocks, Part
from curvax.devices.agreement import check_agreement, describe
from curvax.devices.mesh_axis import MeshAxis
from curvax.devices.placement import is_committed

__all__ = ["Devices", "SplitProblem"]


WHOLE = PartitionSpec()


@dataclass(frozen=True)
class SplitProblem:
    """A problem whose parts are split, each by itself, among the devices along an axis."""

    problem: BlockProblem
    axis: MeshAxis
    replicated: bool

    def lengths(self) -> Sequence[int]:
        """The number of columns of each part that a device computes."""
        return [-(-length // self.axis.count) for length in self.problem.lengths()]

    def compute(self, x: PyTree, blocks: Sequence[Blocks]) -> tuple[list[PyTree], PyTree]:
        """The results, split or whole, and the auxiliary value, whole."""

        def on_device(x: PyTree) -> tuple[list[PyTree], PyTree]:
            prepared, aux = self.problem.prepare(x)
            own = [replace(part, device=self.axis.axis_index()) for part in blocks]
            pairs = zip(self.problem.parts, own, strict=True)
            return [self._result(part, self._columns(part, prepared, b)) for part, b in pairs], aux

        specs = [self._specs(part, like) for part, like in self._first_columns(x)]
        results, aux = self.axis.shard_map(on_device, (WHOLE,), (specs, WHOLE))(x)
        is_spec = lambda spec: isinstance(spec, PartitionSpec)
        return jax.tree.map(self._constrained, specs, results, is_leaf=is_spec), aux

    def _constrained(self, spec: PartitionSpec, result: Array) -> Array:
        """A result that is split as the spec says, and not along other axes of the mesh besides.

        What is split along explicit axes is so by its type already.
        """
        mesh, names = self.axis.mesh, self.axis.names
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if AxisType.Auto not in kinds.values():
            return result
        if any(kinds[name] is AxisType.Explicit for name in names):
            spec = WHOLE
        return lax.with_sharding_constraint(result, NamedSharding(mesh, spec))

    def _first_columns(self, x: PyTree) -> Sequence[tuple[Part, PyTree]]:
        """Each part with the shapes of one of its columns, traced where it will be computed."""

        def first(x: PyTree) -> list[PyTree]:
            prepared, _ = self.problem.prepare(x)
            return [part.column(prepared, 0) for part in self.problem.parts]

        shapes = jax.eval_shape(self.axis.shard_map(first, (WHOLE,), WHOLE), x)
        return list(zip(self.problem.parts, shapes, strict=True))

    def _columns(self, part: Part, prepared: Any, blocks: Blocks) -> PyTree:
        """The share of this device."""
        before = self.axis.axis_index() * blocks.length
        last = jnp.int32(part.length - 1)
        column = lambda index: part.column(prepared, jnp.minimum(before + index, last))
        return blocks.collect(column, part.axis)

    def _result(self, part: Part, own: PyTree) -> PyTree:
        """What becomes of the columns of this device, or if need be of those of all."""
        if self._stays(part):
            rows = part.shape and (part.shape[0] // self.axis.count, *part.shape[1:])
            return replace(part, shape=rows).result(own)
        joined = jax.tree.map(lambda array: self._joined(array, part), own)
        result = part.result(joined)
        return result if part.into is None else jax.tree.map(self._own_rows, result)

    def _stays(self, part: Part) -> bool:
        """Whether devices keep their columns for themselves."""
        if part.into is not None or self.replicated or part.shape == ():
            return False
        length = part.length if part.shape is None else part.shape[0]
        return length % self.axis.count == 0

    def _joined(self, array: Array, part: Part) -> Array:
        """The columns of all devices, of an array that has those of this one."""
        if self.axis.count == 1:
            return array
        position = part.axis % array.ndim
        joined = self.axis.all_gather(array, position)
        return lax.slice_in_dim(joined, 0, part.length, axis=position)

    def _own_rows(self, array: Array) -> Array:
        """The share that this device has of the first axis, if that can be split."""
        if not self._splits(array):
            return array
        rows = array.shape[0] // self.axis.count
        return lax.dynamic_slice_in_dim(array, self.axis.axis_index() * rows, rows, 0)

    def _splits(self, like: Any) -> bool:
        return not self.replicated and like.ndim > 0 and like.shape[0] % self.axis.count == 0

    def _specs(self, part: Part, column: PyTree) -> PyTree:
        """How the arrays of the result are split, for columns of these shapes."""
        if part.into is not None:
            vector = jax.ShapeDtypeStruct((part.length, *column.shape), column.dtype)
            result = jax.eval_shape(part.into, vector)
            return jax.tree.map(lambda x: self.axis.spec(0) if self._splits(x) else WHOLE, result)
        if not self._stays(part):
            return jax.tree.map(lambda _: WHOLE, column)
        position = lambda x: 0 if part.axis == 0 else x.ndim
        return jax.tree.map(lambda x: self.axis.spec(position(x)), column)


# Among which devices columns are split, as the user says with `mesh`, `axis` and `replicated`.


@dataclass(frozen=True)
class Devices:
    """The devices along an axis of a mesh; without a mesh, JAX's default device."""

    axis: MeshAxis | None
    replicated: bool
    """Whether results are to be replicated."""
    to_disk: bool
    """Whether results go to disk. Then each device takes the next block, and none has columns."""

    @classmethod
    def of(
        cls, mesh: Any, axis: Any, replicated: bool, where: str, *, to_disk: bool = False
    ) -> "Devices":
        """Check what the user gave."""
        along = MeshAxis.of(mesh, axis, where, replicated)
        if replicated and to_disk:
            raise ValueError(
                f"{where}: replicated=True asks for results in the memory of every device, and "
                f"out= for results on disk. Leave one of them out."
            )
        if along is not None:
            along.check_outside(where)
            _check_processes(along, where)
        return cls(along, replicated, to_disk)

    @property
    def count(self) -> int:
        """The number of devices."""
        return 1 if self.axis is None else self.axis.count

    @property
    def is_shared(self) -> bool:
        """Whether the mesh is multi-process."""
        return self.axis is not None and self.axis.is_multi_process

    def share(self, length: int) -> int:
        """Return how many of `length` columns each of them computes, at most."""
        return length if self.to_disk else -(-length // self.count)

    def checked(self, name: str, tree: PyTree, where: str) -> PyTree:
        """Check that arrays can be used on these devices, and replicate them along explicit axes.

        Tangents must have the types of their primals, and unit vectors are replicated.
        """
        axis = self.axis
        if axis is None:
            return tree
        if axis.is_multi_process and not any(map(_jax.is_tracer, jax.tree.leaves(tree))):
            check_agreement(describe(name, tree), where)
        axis.check_placement(name, tree, where)
        return jax.tree.map(lambda leaf: _replicated(leaf, axis), tree)

    def placed(self, tree: PyTree) -> PyTree:
        """Replicate arrays on all devices; committed ones stay where they are."""
        if self.axis is None:
            return tree
        replicated = self.axis.sharding(None)
        return jax.tree.map(lambda x: x if is_committed(x) else jax.device_put(x, replicated), tree)

    def check_closed_over(self, fun: Fun, x: PyTree, where: str) -> None:
        """Check that a function closes over no arrays that `shard_map` rejects."""
        if self.axis is None or AxisType.Explicit not in self.axis.mesh.axis_types:
            return
        for const in jax.make_jaxpr(fun)(x).consts:
            if _jax.sharding_of(const) is not None:
                raise ValueError(
                    f"{where}: f closes over an array {const.dtype}{list(const.shape)} that is on "
                    f"a mesh with Explicit axes, which JAX does not let into what runs on the "
                    f"devices of a mesh. Let it close over numpy.asarray(array), or use a mesh "
                    f"with Auto axes."
                )

    def check_progress(self, where: str) -> None:
        """Check that programs on this mesh can call back, for a progress bar."""
        if self.axis is None:
            return
        kinds = dict(zip(self.axis.mesh.axis_names, self.axis.mesh.axis_types, strict=True))
        if any(kinds[n] is AxisType.Explicit for n in kinds if n not in self.axis.names):
            raise ValueError(
                f"{where}: progress=True calls back from the devices, which JAX does not do where "
                f"a mesh has other Explicit axes than those along which work is split. Leave it "
                f"out, or make these axes Auto."
            )


def _replicated(x: Array, axis: MeshAxis) -> Array:
    """Return an array that is replicated by its type; others than on explicit axes are."""
    if _jax.sharding_of(x) is None:
        return x
    move = jax.sharding.reshard if _jax.is_tracer(x) else jax.device_put
    return move(x, axis.sharding(None))


def _check_processes(axis: MeshAxis, where: str) -> None:
    """Check that a mesh has devices of one process or of all, which then make the same calls."""
    found = {device.process_index for device in axis.mesh.devices.flat}
    if 1 < len(found) < jax.process_count():
        raise ValueError(
            f"{where}: the mesh has devices of the processes {sorted(found)}, but there are "
            f"{jax.process_count()} processes. Use a mesh with devices of all of them, or of one."
        )
