"""Batches sharded along an axis of a mesh: which device has which examples.

Of N examples on D devices, each device has N // D successive ones, and each of the first N % D
devices one more. JAX shards arrays evenly only. If there is a remainder, every device therefore has
as many slots as the first, and the last slot of the others is padding: a copy of another example,
from which nothing is ever computed, because the last chunk of the plan is optional.

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
    """`length` examples on `count` devices, as evenly as possible."""

    length: int
    count: int

    @property
    def each(self) -> int:
        """Number of examples that every device has at least."""
        return self.length // self.count

    @property
    def remainder(self) -> int:
        """Number of devices that have one example more: the first ones."""
        return self.length % self.count

    @property
    def is_even(self) -> bool:
        """Whether all devices have the same number of examples."""
        return self.remainder == 0

    def example_of_slot(self) -> np.ndarray:
        """Return the index of the example in each slot, of shape (devices, slots)."""
        device, slot = self._grid()
        first = device * self.each + np.minimum(device, self.remainder)
        return np.minimum(first + slot, self.length - 1)

    def slot_of_example(self) -> np.ndarray:
        """Return the index of each example's slot among the slots of all devices, flattened."""
        device, slot = self._grid()
        return np.flatnonzero((slot < self.each) | (device < self.remainder))

    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        slots = self.each if self.is_even else self.each + 1
        device, slot = np.indices((self.count, slots))
        return device, slot


@dataclass(frozen=True)
class BatchSharding:
    """The sharding of a batch along an axis of a mesh, and of its results.

    With `replicated`, results are replicated on all devices. Methods that return arrays must be
    called under `shard_map`, except `pad`.
    """

    axis: MeshAxis
    partition: Partition
    replicated: bool

    @classmethod
    def of(cls, axis: MeshAxis | None, length: int, replicated: bool) -> "BatchSharding | None":
        """Return the sharding of `length` examples, or None without a mesh."""
        if axis is None:
            return None
        return cls(axis, Partition(length, axis.count), replicated)

    def plan(self, size: int | None, order: Order) -> ChunkPlan:
        """Return the chunk plan that every device runs, for a user-supplied size."""
        plan = ChunkPlan.of(self.partition.each, size, order)
        if self.partition.is_even:
            return plan
        return (plan.balanced() if order == "strided" else plan).with_optional()

    def check_limit(self, limit: Size | None, plan: ChunkPlan) -> None:
        """Check that `limit` means the same as on one device with chunks D times as large.

        It does if the order is strided and all chunks have the same size: chunk i of that device
        then holds the examples of the chunks i of all D devices.
        """
        partition = self.partition
        has_one_chunk = partition.is_even and plan.num_chunks == 1
        if limit is None or partition.count == 1 or has_one_chunk:
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
        """Return an array with one row for each slot, given one row for each example."""
        if self.partition.is_even:
            return x
        examples = self.partition.example_of_slot().ravel()
        return jnp.take(_jax.unsharded_along(x, axis), examples, axis, mode="clip")

    def has_optional(self) -> Array:
        """Return whether this device's last slot holds an example, not padding."""
        return self.axis.axis_index() < self.partition.remainder

    def spec(self, axis: int | None) -> PartitionSpec:
        """Return the spec of a result with its example axis at `axis`, None if it has none."""
        is_replicated = self.replicated or not self.partition.is_even
        return self.axis.spec(None if is_replicated else axis)

    def collect(self, x: Array, axis: int) -> Array:
        """Return a result sharded as `spec(axis)` says, given the local slots along `axis`."""
        if self.partition.is_even:
            return self.axis.all_gather(x, axis) if self.replicated else x
        slots = self.partition.slot_of_example()
        return jnp.take(self.axis.all_gather(x, axis), slots, axis, mode="clip")

    def total(self, examples: Size) -> Size:
        """Return the number of examples run on all devices, given the number run on this one."""
        is_even = self.partition.is_even
        return examples * self.partition.count if is_even else self.partition.length

    def stack_devices(self, x: Array) -> Array:
        """Gather `x` along a new leading axis, from those devices that have examples."""
        count = max(1, min(self.partition.length, self.partition.count))
        return self.axis.all_gather(x[None], 0)[:count]


def examples_per_device(axis: MeshAxis | None, length: int) -> int:
    """Return the number of examples that every device has at least; all without a mesh."""
    return length if axis is None else Partition(length, axis.count).each
