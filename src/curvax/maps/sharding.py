"""A batch that is sharded along an axis of a mesh: which device has which examples.

N examples on D devices are N // D successive ones for each, and one more for the first N % D
devices. JAX shards arrays evenly only. So where that leaves a remainder, every device has as many
slots as the first, and the last slot of a device with an example less is padding: a copy of another
example, from which nothing is ever computed, because the last chunk of the plan is optional.

`Partition` is plain Python; `BatchSharding` shards arrays by it and gathers results.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Order, Size
from curvax.devices.mesh_axis import MeshAxis
from curvax.maps.chunk_plan import ChunkPlan


@dataclass(frozen=True)
class Partition:
    """`length` examples on `count` devices, as evenly as can be."""

    length: int
    count: int

    @property
    def each(self) -> int:
        """The number of examples that every device has."""
        return self.length // self.count

    @property
    def remainder(self) -> int:
        """The number of devices, the first ones, that have one more."""
        return self.length % self.count

    @property
    def is_even(self) -> bool:
        """Whether all devices have the same number."""
        return self.remainder == 0

    def example_of_slot(self) -> np.ndarray:
        """Return the example in each slot: a row for each device, all of the same length."""
        device, slot = self._grid()
        first = device * self.each + np.minimum(device, self.remainder)
        return np.minimum(first + slot, self.length - 1)

    def slot_of_example(self) -> np.ndarray:
        """Return the slot of each example, counted through the rows of all devices."""
        device, slot = self._grid()
        return np.flatnonzero((slot < self.each) | (device < self.remainder))

    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        most = self.each if self.is_even else self.each + 1
        device, slot = np.indices((self.count, most))
        return device, slot


@dataclass(frozen=True)
class BatchSharding:
    """How a batch is sharded along an axis of a mesh, and what becomes of its results.

    `replicated` asks for all of a result on every device. Methods that return arrays are for use
    under `shard_map`, except `pad`.
    """

    axis: MeshAxis
    partition: Partition
    replicated: bool

    @classmethod
    def of(cls, axis: MeshAxis | None, length: int, replicated: bool) -> "BatchSharding | None":
        """Return the sharding of `length` examples; None without a mesh."""
        if axis is None:
            return None
        return cls(axis, Partition(length, axis.count), replicated)

    def plan(self, size: int | None, order: Order) -> ChunkPlan:
        """Return the plan that every device runs, for a size as the user gave it."""
        plan = ChunkPlan.of(self.partition.each, size, order)
        if self.partition.is_even:
            return plan
        return (plan.balanced() if order == "strided" else plan).with_optional()

    def check_limit(self, limit: Size | None, plan: ChunkPlan) -> None:
        """Check that the first microbatches of all devices are the first of the batch."""
        partition = self.partition
        is_all = partition.is_even and plan.num_chunks == 1
        if limit is None or partition.count == 1 or is_all:
            return
        if plan.order == "contiguous" and partition.is_even:
            raise ValueError(
                f"{where()}: num_real_microbatches on a mesh needs order='strided', with which "
                f"each microbatch has examples of all {partition.count} devices. With "
                f"order='contiguous', the first examples of the batch are all on the first device."
            )
        if not partition.is_even or len(plan.runs()) > 1:
            raise ValueError(
                f"{where()}: num_real_microbatches on a mesh needs microbatches that come out "
                f"even; got {partition.length} examples on {partition.count} devices in "
                f"microbatches of at most {plan.size} on each. Choose a microbatch size whose "
                f"product with {partition.count} divides the number of examples."
            )

    def pad(self, x: Array, axis: int) -> Array:
        """Return an array with a row for each slot, from one with a row for each example."""
        if self.partition.is_even:
            return x
        examples = self.partition.example_of_slot().ravel()
        return jnp.take(_jax.unsharded_along(x, axis), examples, axis, mode="clip")

    def has_optional(self) -> Array:
        """Return whether the last slot of this device has an example."""
        return self.axis.axis_index() < self.partition.remainder

    def spec(self, axis: int | None) -> PartitionSpec:
        """Return the spec of a result with the examples along `axis`, or without such an axis."""
        is_replicated = self.replicated or not self.partition.is_even
        return self.axis.spec(None if is_replicated else axis)

    def rows(self, x: Array, axis: int) -> Array:
        """Return what `spec` says, from the rows in the slots of this device along `axis`."""
        if self.partition.is_even:
            return self.axis.all_gather(x, axis) if self.replicated else x
        slots = self.partition.slot_of_example()
        return jnp.take(self.axis.all_gather(x, axis), slots, axis, mode="clip")

    def total(self, examples: Size) -> Size:
        """Return the number of examples on all devices, when this one has run `examples`."""
        is_even = self.partition.is_even
        return examples * self.partition.count if is_even else self.partition.length

    def stacked(self, x: Array) -> Array:
        """Stack what the devices have that have examples, along a new leading axis."""
        count = max(1, min(self.partition.length, self.partition.count))
        return self.axis.all_gather(x[None], 0)[:count]


def examples_per_device(axis: MeshAxis | None, length: int) -> int:
    """Return the number of examples that every device computes; without a mesh there is one."""
    return length if axis is None else Partition(length, axis.count).each
