"""A batch that is split among devices: who has which examples, and how results become one.

`Parts` is plain Python. N examples on D devices are N // D for each, successive ones, and one more
for the first N % D devices. JAX splits arrays into equal parts only. So where there is a rest, all
devices have places for the most, and where one has an example less, its last place is filled with
another's. Nothing is ever computed from that: the last chunk of the plan is optional.

A `Share` is what a device knows of the batch, and how it gets at what the others have.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from curvax import _jax
from curvax._types import Array, Order, Size
from curvax.devices.mesh_axis import MeshAxis
from curvax.maps.chunk_plan import ChunkPlan

__all__ = ["Parts", "Share", "number_on_each"]


@dataclass(frozen=True)
class Parts:
    """`length` examples, dealt out to `count` devices as evenly as can be."""

    length: int
    count: int

    @property
    def each(self) -> int:
        """How many examples every device has."""
        return self.length // self.count

    @property
    def rest(self) -> int:
        """How many devices, the first ones, have one more."""
        return self.length % self.count

    @property
    def is_even(self) -> bool:
        """Whether all devices have equally many."""
        return self.rest == 0

    def examples(self) -> np.ndarray:
        """The example in each place: a row for each device, all of the same length."""
        device, place = self._grid()
        first = device * self.each + np.minimum(device, self.rest)
        return np.minimum(first + place, self.length - 1)

    def places(self) -> np.ndarray:
        """The place of each example, counted through all rows."""
        device, place = self._grid()
        return np.flatnonzero((place < self.each) | (device < self.rest))

    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        most = self.each if self.is_even else self.each + 1
        device, place = np.indices((self.count, most))
        return device, place


@dataclass(frozen=True)
class Share:
    """A device's part of a batch that is split along an axis of a mesh.

    `replicated` says that all devices shall have all of a result. What returns arrays is for
    functions that run on all devices, but for `deal`.
    """

    devices: MeshAxis
    parts: Parts
    replicated: bool

    @classmethod
    def of(cls, devices: MeshAxis | None, length: int, replicated: bool) -> "Share | None":
        """A share of so many examples, if there are devices to split them among."""
        if devices is None:
            return None
        return cls(devices, Parts(length, devices.count), replicated)

    def plan(self, size: int | None, order: Order) -> ChunkPlan:
        """What each device does, for a size as the user gave it."""
        plan = ChunkPlan.of(self.parts.each, size, order)
        if self.parts.is_even:
            return plan
        return (plan.balanced() if order == "strided" else plan).with_optional()

    def check_limit(self, limit: Size | None, plan: ChunkPlan, where: str) -> None:
        """Check that the first microbatches of all devices are the first of the batch."""
        parts = self.parts
        if limit is None or parts.count == 1 or (parts.is_even and plan.num_chunks == 1):
            return
        if plan.order == "contiguous" and parts.is_even:
            raise ValueError(
                f"{where}: num_real_microbatches on a mesh needs order='strided', with which each "
                f"microbatch has examples of all {parts.count} devices. With order='contiguous', "
                f"the first examples of the batch are all on the first device."
            )
        if not parts.is_even or len(plan.runs()) > 1:
            raise ValueError(
                f"{where}: num_real_microbatches on a mesh needs microbatches that come out even; "
                f"got {parts.length} examples on {parts.count} devices in microbatches of at most "
                f"{plan.size} on each. Choose a microbatch size whose product with {parts.count} "
                f"divides the number of examples."
            )

    def deal(self, x: Array, axis: int) -> Array:
        """An array with the examples along `axis`, so that equal parts are those of devices."""
        if self.parts.is_even:
            return x
        numbers = self.parts.examples().ravel()
        return jnp.take(_jax.unsharded_along(x, axis), numbers, axis, mode="clip")

    def has_last(self) -> Array:
        """Whether the device has the optional last example."""
        return self.devices.axis_index() < self.parts.rest

    def spec(self, axis: int | None) -> PartitionSpec:
        """The spec of a result with the examples along `axis`, or without such an axis."""
        is_whole = self.replicated or not self.parts.is_even
        return self.devices.spec(None if is_whole else axis)

    def rows(self, x: Array, axis: int) -> Array:
        """What `spec` says of the rows that devices have in their places along `axis`."""
        if self.parts.is_even:
            return self.devices.all_gather(x, axis) if self.replicated else x
        return jnp.take(self.devices.all_gather(x, axis), self.parts.places(), axis, mode="clip")

    def total(self, examples: Size) -> Size:
        """How many examples there are on all devices, of which so many on this one."""
        return examples * self.parts.count if self.parts.is_even else self.parts.length

    def stacked(self, x: Array) -> Array:
        """What the devices that have examples have, along a new first axis."""
        return self.devices.all_gather(x[None], 0)[
            : max(1, min(self.parts.length, self.parts.count))
        ]


def number_on_each(devices: MeshAxis | None, length: int) -> int:
    """How many of so many examples a device computes; without a mesh there is one."""
    return length if devices is None else Parts(length, devices.count).each
