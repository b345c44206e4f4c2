"""Which Kronecker factors lie on which device, where each device has a share of them.

All pairs of factors of one shape, of several blocks or along the axes in front of one, are units of
a `Shard`, and rows of common arrays. Each device has as many rows of these, so that JAX can split
them; those without a unit are zero. Which unit is where is settled once: units that are the most
work first, each on the device that has the least to do so far.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax._types import Array
from curvax.blocks import TwoKroneckerFactored
from curvax.linalg import Kronecker, Side

__all__ = ["Shard", "shards_of"]


@dataclass(frozen=True)
class Shard:
    """Blocks whose pairs of factors are of one shape, and where each pair is."""

    numbers: tuple[int, ...]
    """Which of all blocks these are."""
    blocks: tuple[TwoKroneckerFactored, ...]
    places: tuple[tuple[int, ...], ...]
    """For each device the units that it has, first in its rows."""
    rows: int
    """How many rows each device has."""

    @property
    def numbered(self) -> list[tuple[int, TwoKroneckerFactored]]:
        """The blocks with their numbers."""
        return list(zip(self.numbers, self.blocks, strict=True))

    @property
    def lengths(self) -> list[int]:
        """How many units each block has."""
        return [_num_units(block) for block in self.blocks]

    @property
    def kronecker(self) -> Kronecker:
        """How to compute with one unit."""
        return self.stacked(())

    @property
    def dtype(self) -> Any:
        """The dtype of the factors."""
        return self.blocks[0].dtype

    @property
    def num_rows(self) -> int:
        """How many rows all devices have."""
        return self.rows * len(self.places)

    def stacked(self, stack: tuple[int, ...]) -> Kronecker:
        """How to compute with several units at once, along axes in front."""
        kronecker = self.blocks[0].kronecker
        along = lambda side: dataclasses.replace(side, stack=stack)
        return Kronecker(along(kronecker.inputs), along(kronecker.outputs))

    @property
    def sides(self) -> tuple[Side, Side]:
        """The sides of one unit."""
        return self.kronecker.inputs, self.kronecker.outputs

    def units(self, arrays: Sequence[Array], ndim: int) -> Array:
        """What all blocks have, along all axes but the last `ndim`, as one unit after another."""
        return jnp.concatenate([x.reshape(-1, *x.shape[x.ndim - ndim :]) for x in arrays])

    def per_unit(self, values: Array) -> Array:
        """A number for each block, as one for each unit."""
        return values.astype(self.dtype)[np.repeat(np.arange(len(self.blocks)), self.lengths)]

    def of_blocks(self, units: Array) -> list[Array]:
        """The units of each block; also on the host."""
        ends = np.cumsum(self.lengths).tolist()
        return [units[end - n : end] for end, n in zip(ends, self.lengths, strict=True)]

    def to_rows(self, units: Array) -> Array:
        """The rows of all devices, from all units; the others are zero."""
        return self._filled(units, self._slots.reshape(-1))

    def to_rows_on_host(self, units: np.ndarray) -> np.ndarray:
        """As `to_rows`, by NumPy."""
        rows = np.zeros((self.num_rows, *units.shape[1:]), units.dtype)
        rows[self._row_of_unit] = units
        return rows

    def from_rows(self, rows: Array) -> Array:
        """All units, from the rows of all devices; also on the host."""
        return rows[self._row_of_unit]

    def mine(self, units: Array, axis: str | None) -> Array:
        """The rows of the device that asks, from all units; without an axis all rows."""
        if axis is None:
            return self.to_rows(units)
        return self._filled(units, jnp.asarray(self._slots)[lax.axis_index(axis)])

    def mine_of_sum(self, units: Array, axis: str | None) -> Array:
        """As `mine`, of the sum over devices of the units that each has."""
        if axis is None or self.is_sparse:
            return self.mine(units if axis is None else lax.psum(units, axis), axis)
        return lax.psum_scatter(self.to_rows(units), axis, scatter_dimension=0, tiled=True)

    def of_all(self, rows: Array, axis: str | None) -> Array:
        """All units, from the rows of each device; without an axis from all rows."""
        if axis is None or not self.is_sparse:
            whole = rows if axis is None else lax.all_gather(rows, axis, tiled=True)
            return self.from_rows(whole)
        number = sum(self.lengths)
        slots = np.where(self._slots < 0, number, self._slots)
        own = jnp.zeros((number, *rows.shape[1:]), rows.dtype)
        own = own.at[jnp.asarray(slots)[lax.axis_index(axis)]].set(rows, mode="drop")
        return lax.psum(own, axis)

    @property
    def is_sparse(self) -> bool:
        """Whether most rows have no unit, as on many devices.

        What is sent is then a sum of all units, twice, and not rows of which there would be the
        more the more devices there are.
        """
        return self.num_rows > 2 * sum(self.lengths)

    @property
    def _row_of_unit(self) -> np.ndarray:
        where = {
            unit: self.rows * d + k
            for d, own in enumerate(self.places)
            for k, unit in enumerate(own)
        }
        return np.asarray([where[unit] for unit in range(sum(self.lengths))])

    @property
    def _slots(self) -> np.ndarray:
        """For each device the unit in each of its rows; -1 where there is none."""
        return np.asarray([[*own, *[-1] * (self.rows - len(own))] for own in self.places])

    def _filled(self, units: Array, numbers: Any) -> Array:
        """Rows with the units of these numbers; zero where there is none."""
        found = units[jnp.maximum(numbers, 0)]
        is_there = (jnp.asarray(numbers) >= 0).reshape(-1, *[1] * (units.ndim - 1))
        return jnp.where(jnp.broadcast_to(is_there, found.shape), found, 0)

    def due(self, blocks: Sequence[int] | None, axis: str | None) -> list[list[int]]:
        """For each device, which of its rows have units of these blocks; without an axis of all."""
        owner = [
            n for n, count in zip(self.numbers, self.lengths, strict=True) for _ in range(count)
        ]
        found = [
            [k for k, unit in enumerate(own) if blocks is None or owner[unit] in blocks]
            for own in self.places
        ]
        if axis is not None:
            return found
        return [[self.rows * device + k for device, own in enumerate(found) for k in own]]


def shards_of(blocks: Sequence[Any], count: int) -> list[Shard]:
    """All Kronecker-factored blocks, by the shapes of their factors, shared out among devices."""
    kinds: dict[Any, list[int]] = {}
    for number, block in enumerate(blocks):
        if isinstance(block, TwoKroneckerFactored) and block.is_plain:
            kinds.setdefault(_kind(block), []).append(number)
    loads = [0.0] * count
    shards = []
    for (inputs, outputs, _), numbers in sorted(kinds.items(), key=lambda item: -_work(item[0])):
        own = tuple(blocks[number] for number in numbers)
        total = sum(map(_num_units, own))
        places = _placed(total, inputs.work + outputs.work, loads)
        shards.append(Shard(tuple(numbers), own, places, -(-total // count)))
    return shards


def _placed(total: int, work: float, loads: list[float]) -> tuple[tuple[int, ...], ...]:
    """Units that are equally much work, on devices that have something to do already."""
    count = len(loads)
    places: list[list[int]] = [[] for _ in range(count)]
    for unit in range(total):
        free = [d for d in range(count) if len(places[d]) < -(-total // count)]
        device = min(free, key=lambda d: loads[d])
        places[device].append(unit)
        loads[device] += work
    return tuple(map(tuple, places))


def _kind(block: TwoKroneckerFactored) -> tuple[Side, Side, Any]:
    alone = lambda side: dataclasses.replace(side, stack=())
    return alone(block.kronecker.inputs), alone(block.kronecker.outputs), jnp.dtype(block.dtype)


def _work(kind: tuple[Side, Side, Any]) -> float:
    return kind[0].work + kind[1].work


def _num_units(block: TwoKroneckerFactored) -> int:
    return int(np.prod(block.kronecker.inputs.stack, dtype=int))
