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

from curvax._types import Array, PyTree
from curvax.diffops._problem import BlockProblem, Blocks, Part
from curvax.parallel import MeshAxis

__all__ = ["SplitProblem"]

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
            own = [replace(part, device=self.axis.index()) for part in blocks]
            pairs = zip(self.problem.parts, own, strict=True)
            return [self._result(part, self._columns(part, prepared, b)) for part, b in pairs], aux

        specs = [self._specs(part, like) for part, like in self._first_columns(x)]
        results, aux = self.axis.on_all(on_device, (WHOLE,), (specs, WHOLE))(x)
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

        shapes = jax.eval_shape(self.axis.on_all(first, (WHOLE,), WHOLE), x)
        return list(zip(self.problem.parts, shapes, strict=True))

    def _columns(self, part: Part, prepared: Any, blocks: Blocks) -> PyTree:
        """The share of this device."""
        before = self.axis.index() * blocks.length
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
        joined = self.axis.joined(array, position)
        return lax.slice_in_dim(joined, 0, part.length, axis=position)

    def _own_rows(self, array: Array) -> Array:
        """The share that this device has of the first axis, if that can be split."""
        if not self._splits(array):
            return array
        rows = array.shape[0] // self.axis.count
        return lax.dynamic_slice_in_dim(array, self.axis.index() * rows, rows, 0)

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
