"""`ShardedCurvature`: curvature whose Kronecker factors and inverses are sharded over devices.

The estimate is that of `BlockDiagonalCurvature`. But each pair of Kronecker factors, with its
inverses, lives on one device. Sums over examples are reduce-scattered to the devices that hold the
factors; products with inverses are computed where these are, and gathered. Blocks of other kinds
are replicated.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from curvax import _jax
from curvax._cpu import all_finite
from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.curvature.backward_passes import AverageUpdate
from curvax.curvature.block_diagonal import (
    BlockDiagonalCurvature,
    BlockDiagonalState,
    PowerOptions,
    Structure,
)
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    MatrixPower,
    Powers,
    cached_entry,
    power_key,
    powers_of,
)
from curvax.curvature.blocks.kronecker import (
    FACTORS,
    TwoKroneckerFactored,
    cache_key,
    multiplied,
)
from curvax.curvature.estimator import IdentityWeight
from curvax.curvature.linalg.kronecker import Kronecker, Side
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.tasks import run_matrix_tasks
from curvax.devices.task_assignment import own_rows
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse

ArrayT = TypeVar("ArrayT", Array, np.ndarray)
"""An array on devices or on the host."""

# The assignment of Kronecker factors to devices.
#
# All pairs of factors of one shape, from several blocks or along the leading axes of one, are
# *units* of a `Shard`, and rows of common arrays. JAX shards arrays evenly, so every device has the
# same number of rows; rows without a unit are zero. Units are assigned once: those with the most
# work first, each to the device with the least work so far.


@dataclass(frozen=True)
class Shard:
    """Blocks whose pairs of factors have the same shape, and the devices that hold these.

    Attributes:
        block_indices: Indices of the blocks.
        blocks: The blocks.
        units_of_device: For each device, the units in its first rows.
        rows: Number of rows on each device.
    """

    block_indices: tuple[int, ...]
    blocks: tuple[TwoKroneckerFactored, ...]
    units_of_device: tuple[tuple[int, ...], ...]
    rows: int

    @property
    def indexed_blocks(self) -> list[tuple[int, TwoKroneckerFactored]]:
        """The blocks with their indices."""
        return list(zip(self.block_indices, self.blocks, strict=True))

    @property
    def lengths(self) -> list[int]:
        """The number of units of each block."""
        return [_num_units(block) for block in self.blocks]

    @property
    def kronecker(self) -> Kronecker:
        """The Kronecker product of one unit."""
        return self.stacked(())

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the factors."""
        return self.blocks[0].dtype

    @property
    def num_rows(self) -> int:
        """The number of rows on all devices."""
        return self.rows * len(self.units_of_device)

    def stacked(self, stack: tuple[int, ...]) -> Kronecker:
        """Return the Kronecker product of several units, along leading axes of shape `stack`."""
        kronecker = self.blocks[0].kronecker
        along = lambda side: dataclasses.replace(side, stack=stack)
        return Kronecker(along(kronecker.inputs), along(kronecker.outputs))

    @property
    def sides(self) -> tuple[Side, Side]:
        """The sides of one unit."""
        return self.kronecker.inputs, self.kronecker.outputs

    def units(self, arrays: Sequence[Array], ndim: int) -> Array:
        """Stack the arrays of all blocks: one unit per row, with its `ndim` trailing axes."""
        return jnp.concatenate([x.reshape(-1, *x.shape[x.ndim - ndim :]) for x in arrays])

    def per_unit(self, values: Array) -> Array:
        """Repeat the value of each block for each of its units."""
        return values.astype(self.dtype)[np.repeat(np.arange(len(self.blocks)), self.lengths)]

    def of_blocks(self, units: ArrayT) -> list[ArrayT]:
        """Return the units of each block."""
        ends = np.cumsum(self.lengths).tolist()
        return [units[end - n : end] for end, n in zip(ends, self.lengths, strict=True)]

    def to_rows(self, units: Array) -> Array:
        """Return the rows of all devices; those without a unit are zero."""
        return self._filled(units, self._slots.reshape(-1))

    def to_rows_on_host(self, units: np.ndarray) -> np.ndarray:
        """Equal to `to_rows`, except that it runs on the host."""
        rows = np.zeros((self.num_rows, *units.shape[1:]), units.dtype)
        rows[self._row_of_unit] = units
        return rows

    def from_rows(self, rows: ArrayT) -> ArrayT:
        """Inverse of `to_rows`."""
        return rows[self._row_of_unit]

    def local_rows(self, units: Array, axis: str | None) -> Array:
        """Return the rows of this device; without an axis, all rows."""
        if axis is None:
            return self.to_rows(units)
        return self._filled(units, jnp.asarray(self._slots)[lax.axis_index(axis)])

    def local_rows_of_sum(self, units: Array, axis: str | None) -> Array:
        """Return `local_rows` of the sum over devices of their units."""
        if axis is None or self.is_sparse:
            return self.local_rows(units if axis is None else lax.psum(units, axis), axis)
        return lax.psum_scatter(self.to_rows(units), axis, scatter_dimension=0, tiled=True)

    def gathered_units(self, rows: Array, axis: str | None) -> Array:
        """Gather all units from the local rows of each device; without an axis, from all rows."""
        if axis is None or not self.is_sparse:
            all_rows = rows if axis is None else lax.all_gather(rows, axis, tiled=True)
            return self.from_rows(all_rows)
        count = sum(self.lengths)
        slots = np.where(self._slots < 0, count, self._slots)
        units = jnp.zeros((count, *rows.shape[1:]), rows.dtype)
        units = units.at[jnp.asarray(slots)[lax.axis_index(axis)]].set(rows, mode="drop")
        return lax.psum(units, axis)

    @property
    def is_sparse(self) -> bool:
        """Whether most rows have no unit, as with many devices.

        Units are then summed over devices. Scattering and gathering rows would communicate more,
        because their number grows with the number of devices.
        """
        return self.num_rows > 2 * sum(self.lengths)

    @property
    def _row_of_unit(self) -> np.ndarray:
        row_of = {
            unit: self.rows * device + k
            for device, units in enumerate(self.units_of_device)
            for k, unit in enumerate(units)
        }
        return np.asarray([row_of[unit] for unit in range(sum(self.lengths))])

    @property
    def _slots(self) -> np.ndarray:
        """For each device, the unit in each of its rows; -1 where there is none."""
        padding = [[-1] * (self.rows - len(units)) for units in self.units_of_device]
        pairs = zip(self.units_of_device, padding, strict=True)
        return np.asarray([[*units, *rest] for units, rest in pairs])

    def _filled(self, units: Array, slots: Array | np.ndarray) -> Array:
        """Return rows with the units of these slots; zero where a slot is negative."""
        rows = units[jnp.maximum(slots, 0)]
        is_filled = (jnp.asarray(slots) >= 0).reshape(-1, *[1] * (units.ndim - 1))
        return jnp.where(jnp.broadcast_to(is_filled, rows.shape), rows, 0)

    def rows_to_update(self, blocks: Sequence[int] | None, axis: str | None) -> list[list[int]]:
        """Return, for each device, its rows with units of these blocks; None means all blocks.

        Without an axis, there is a single list, of rows of all devices.
        """
        block_of_unit = [
            index
            for index, count in zip(self.block_indices, self.lengths, strict=True)
            for _ in range(count)
        ]
        rows = [
            [k for k, unit in enumerate(units) if blocks is None or block_of_unit[unit] in blocks]
            for units in self.units_of_device
        ]
        if axis is not None:
            return rows
        return [[self.rows * device + k for device, local in enumerate(rows) for k in local]]


Kind = tuple[Side, Side, jnp.dtype]
"""The shape and the dtype of a pair of factors."""


def _shards_of(blocks: Sequence[CurvatureBlock], count: int) -> list[Shard]:
    """Group Kronecker-factored blocks by the shapes of factors; assign units to `count` devices."""
    blocks_of_kind: dict[Kind, list[tuple[int, TwoKroneckerFactored]]] = {}
    for index, block in enumerate(blocks):
        if isinstance(block, TwoKroneckerFactored) and block.is_plain:
            blocks_of_kind.setdefault(_kind(block), []).append((index, block))
    loads = [0.0] * count
    shards = []
    for kind, members in sorted(blocks_of_kind.items(), key=lambda item: -_work(item[0])):
        indices, same_kind = zip(*members, strict=True)
        total = sum(map(_num_units, same_kind))
        assignment = _assign_units(total, _work(kind), loads)
        shards.append(Shard(indices, same_kind, assignment, -(-total // count)))
    return shards


def _assign_units(total: int, work: float, loads: list[float]) -> tuple[tuple[int, ...], ...]:
    """Assign units of equal work to devices with these loads, and add to the loads."""
    count = len(loads)
    units_of_device: list[list[int]] = [[] for _ in range(count)]
    for unit in range(total):
        free = [d for d in range(count) if len(units_of_device[d]) < -(-total // count)]
        device = min(free, key=lambda d: loads[d])
        units_of_device[device].append(unit)
        loads[device] += work
    return tuple(map(tuple, units_of_device))


def _kind(block: TwoKroneckerFactored) -> Kind:
    single = lambda side: dataclasses.replace(side, stack=())
    return single(block.kronecker.inputs), single(block.kronecker.outputs), jnp.dtype(block.dtype)


def _work(kind: Kind) -> float:
    return kind[0].work + kind[1].work


def _num_units(block: TwoKroneckerFactored) -> int:
    return int(np.prod(block.kronecker.inputs.stack, dtype=int))


# The states of Kronecker-factored blocks of one shape, with a row for each pair of factors.
#
# All functions are SPMD over an axis, each device with its local rows; or, without an axis, they
# have all rows.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardState:
    """The factors of blocks of one shape.

    Attributes:
        factors: Weighted sums of both factors, with a row for each pair; sharded over devices.
        cache: Powers or eigenvectors of both factors; sharded likewise.
        weight: For each block, the sum of the weights.
        refused: For each block, the number of batches that were rejected as not finite.
    """

    factors: dict[str, Array]
    cache: dict[str, dict[str, Array]]
    weight: Array | np.ndarray
    refused: Array | np.ndarray


def state_specs(state: PyTree, axis: str | Sequence[str]) -> PyTree:
    """Return the partition specs of a state that is sharded along an axis of a mesh.

    The rows of factors and caches are sharded; all other leaves of the pytree are replicated.

    Arguments:
        state: A pytree that contains the state of a `ShardedCurvature`.
        axis: Name of the mesh axis, or several.

    Returns:
        A pytree like `state` of `PartitionSpec`s.
    """
    is_shard = lambda x: isinstance(x, ShardState)
    rows, replicated = PartitionSpec(axis), PartitionSpec()

    def specs(x: PyTree) -> PyTree:
        if not is_shard(x):
            return replicated
        return replace(
            jax.tree.map(lambda _: replicated, x),
            factors=jax.tree.map(lambda _: rows, x.factors),
            cache=jax.tree.map(lambda _: rows, x.cache),
        )

    return jax.tree.map(specs, state, is_leaf=is_shard)


def num_shards(state: BlockDiagonalState) -> int | None:
    """Return the number of devices that a state is sharded over; None if it is replicated."""
    return state.num_devices if isinstance(state, ShardedState) else None


def _initial(
    shard: Shard, exact: Sequence[float], approx: Sequence[float], num_rows: int
) -> ShardState:
    """Return the initial state of a shard, with `num_rows` rows."""
    count = len(shard.blocks)
    weight, refused = jnp.zeros((count,), shard.dtype), jnp.zeros((count,), jnp.int32)
    sides = shard.stacked((num_rows,))
    zeros = (jnp.zeros(side.shape, shard.dtype) for side in (sides.inputs, sides.outputs))
    state = ShardState(dict(zip(FACTORS, zeros, strict=True)), {}, weight, refused)
    return replace(state, cache=_empty_cache(shard, state, exact, approx))


def _empty_cache(
    shard: Shard, state: ShardState, exact: Sequence[float], approx: Sequence[float]
) -> dict[str, dict[str, Array]]:
    """Return a cache of exact and approximate powers, filled with zeros."""
    factors = {name: state.factors[name] for name in FACTORS}
    shapes: dict[str, PyTree] = {power_key(power): factors for power in approx}
    if exact:
        kronecker = shard.stacked(state.factors[FACTORS[0]].shape[:1])
        shapes["eigen"] = jax.eval_shape(kronecker.eigen, *factors.values())
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _with_cache(
    shard: Shard,
    state: ShardState,
    weights: Array,
    exact: Sequence[float],
    approx: Sequence[float],
    blocks: Sequence[int] | None,
    axis: str | None,
) -> ShardState:
    """Return the state with exact and approximate powers of some blocks, or of all, in its cache.

    `weights` are the identity weights of each unit. If the cache lacks one of the entries, they are
    computed for all blocks.
    """
    scales = shard.local_rows(shard.per_unit(_scale(state)), axis)
    weights, kronecker = shard.local_rows(weights, axis), shard.kronecker
    before = {**_empty_cache(shard, state, exact, approx), **state.cache}
    rows = shard.rows_to_update(blocks if len(before) == len(state.cache) else None, axis)

    def each(row: Array) -> dict[str, dict[str, Array]]:
        take = lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False)
        inputs, outputs = (take(state.factors[name]) for name in FACTORS)
        weight, scale = take(weights), take(scales)
        cache = {name: jax.tree.map(take, x) for name, x in before.items()}
        for power in approx:
            tasks = kronecker.power(inputs, outputs, weight, power, scales=(scale, scale))
            cache[power_key(power)] = dict(zip(FACTORS, run_matrix_tasks(tasks), strict=True))
        if exact:
            cache["eigen"] = kronecker.eigen(scale * inputs, scale * outputs)
        return cache

    device = jnp.zeros((), jnp.int32) if axis is None else lax.axis_index(axis)
    return replace(state, cache=own_rows(each, rows, device, before))


def _multiply(
    shard: Shard, state: ShardState, x: Array, power: MatrixPower, axis: str | None
) -> Array:
    """Multiply the local rows of `x` by a power of the matrices in the local rows of the state."""
    kronecker = shard.stacked((x.shape[0],))

    def factors() -> tuple[Array, Array]:
        scales = shard.local_rows(shard.per_unit(_scale(state)), axis)
        scaled = lambda x: scales.reshape(-1, *[1] * (x.ndim - 1)) * x
        inputs, outputs = (scaled(state.factors[name]) for name in FACTORS)
        return inputs, outputs

    has_entry = cache_key(power.power, power.is_exact) in state.cache
    power = replace(power, is_cached=power.is_cached and (power.power != 1 or has_entry))
    cached = lambda key: cached_entry(state.cache, key, shard.blocks[0].name)
    return multiplied(kronecker, factors, cached, x, power)


def _are_finite(
    shards: Sequence[Shard], estimates: Sequence[Sequence[Sequence[Array]]], axis: str | None
) -> list[Array]:
    """Return, for each shard, which of its blocks have finite estimates on all devices."""
    if not shards:
        return []
    finite = jnp.stack(
        [
            all_finite(block.finiteness_probe(estimate))
            for shard, of_shard in zip(shards, estimates, strict=True)
            for block, estimate in zip(shard.blocks, of_shard, strict=True)
        ]
    )
    if axis is not None:
        finite = lax.pmin(finite.astype(jnp.int32), axis) > 0
    return jnp.split(finite, np.cumsum([len(shard.blocks) for shard in shards])[:-1])


def _with_estimates(
    shard: Shard,
    state: ShardState,
    estimates: Sequence[Sequence[Array]],
    finite: Array,
    update: AverageUpdate,
) -> ShardState:
    """Return the state with the estimates of all blocks in its averages.

    Equal to `WeightedMovingAverage.updated` for each block: `finite` says which estimates are, and
    the averages of the other blocks do not change.
    """
    axis = update.axis_name
    weights = update.ema_old, update.ema_new
    old, new = (jnp.asarray(x).astype(shard.dtype) for x in weights)
    is_finite_row = shard.local_rows(shard.per_unit(finite), axis) > 0
    factors: dict[str, Array] = {}
    for k, (name, side) in enumerate(zip(FACTORS, shard.sides, strict=True)):
        ndim = len(side.shape)
        values = [estimate[k].astype(shard.dtype) for estimate in estimates]
        rows = shard.local_rows_of_sum(shard.units(values, ndim), axis)
        if axis is not None:
            rows = rows / lax.axis_size(axis)
        before = state.factors[name]
        is_finite = jnp.broadcast_to(is_finite_row.reshape(-1, *[1] * ndim), before.shape)
        factors[name] = jnp.where(is_finite, old * before + new * rows, before)
    return replace(
        state,
        factors=factors,
        weight=jnp.where(finite, old * state.weight + new, state.weight),
        refused=state.refused + (~finite).astype(state.refused.dtype),
    )


def _to_block_states(shard: Shard, state: ShardState) -> list[BlockState]:
    """Return the states that the blocks have in a replicated state, from one with all rows.

    They are on the host if `state` is.
    """
    split = lambda x: shard.of_blocks(shard.from_rows(x))
    factors = {name: split(x) for name, x in state.factors.items()}
    caches = {key: jax.tree.map(split, entry) for key, entry in state.cache.items()}

    def of_block(k: int, block: TwoKroneckerFactored) -> BlockState:
        stack = block.kronecker.inputs.stack
        shaped = lambda units: units[k].reshape(*stack, *units[k].shape[1:])
        weight, refused = state.weight[k, ...], state.refused[k, ...]
        averages = {
            name: WeightedMovingAverage(weight, shaped(x), refused) for name, x in factors.items()
        }
        cache = {
            key: {name: shaped(x) for name, x in entry.items()} for key, entry in caches.items()
        }
        return block.State(cache=cache, **averages)

    return [of_block(k, block) for k, block in enumerate(shard.blocks)]


def _from_block_states(shard: Shard, states: Sequence[BlockState]) -> ShardState:
    """Inverse of `_to_block_states`, on the host."""
    stacks = [block.kronecker.inputs.stack for block in shard.blocks]

    def rows(arrays: Sequence[ArrayLike]) -> Any:  # NumPy arrays stand in for JAX arrays.
        pairs = zip(stacks, map(np.asarray, arrays), strict=True)
        units = [x.reshape(-1, *x.shape[len(stack) :]) for stack, x in pairs]
        return shard.to_rows_on_host(np.concatenate(units))

    averages = {name: [getattr(state, name) for state in states] for name in FACTORS}
    caches = [state.cache or {} for state in states]
    first = averages[FACTORS[0]]
    return ShardState(
        factors={name: rows([x.raw_value for x in each]) for name, each in averages.items()},
        cache={
            key: {name: rows([cache[key][name] for cache in caches]) for name in entry}
            for key, entry in caches[0].items()
        },
        weight=np.stack([np.asarray(average.weight) for average in first]),
        refused=np.stack([np.asarray(average.refused) for average in first]),
    )


def _scale(state: ShardState) -> Array:
    """Return, for each block, the factor between its weighted sums and its averages."""
    return 1 / jnp.where(state.weight == 0, 1, state.weight)


@jax.tree_util.register_dataclass
@dataclass
class ShardedState(BlockDiagonalState):
    """The state of a `ShardedCurvature`.

    Attributes:
        blocks_states: The state of each block; None for those that are sharded.
        shards: The factors of the sharded blocks, by their shapes.
        num_devices: Number of devices over which they are sharded.
    """

    shards: tuple[ShardState, ...]
    num_devices: int = field(metadata={"static": True})


class ShardedCurvature(BlockDiagonalCurvature):
    """`BlockDiagonalCurvature` with Kronecker factors that are sharded over devices.

    Methods with a `pmap_axis_name` are SPMD: all devices of that axis call them, each with the
    local shard of the state; `state_specs` returns which arrays are sharded. Without an axis name,
    the state has all rows.

    Arguments:
        args: Positional arguments of `BlockDiagonalCurvature`.
        num_devices: Number of devices over which the state is sharded.
        axis_name: Name of the axis of these devices. Under `shard_map` over this axis, `init`
            returns the local rows; elsewhere, or without a name, all rows.
        options: Keyword arguments of `BlockDiagonalCurvature`.
    """

    State = ShardedState

    def __init__(
        self, *args: Any, num_devices: int, axis_name: str | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._num_devices, self._axis = num_devices, axis_name
        self._shards: list[Shard] = []

    @property
    def shards(self) -> Sequence[Shard]:
        """The sharded blocks, grouped by the shapes of their factors."""
        return self._shards

    @property
    def num_devices(self) -> int:
        """The number of devices over which the state is sharded."""
        return self._num_devices

    @property
    def num_rows(self) -> list[int]:
        """The number of rows of the factors of each shape; under `shard_map`, of local ones."""
        is_local = self._axis is not None and _jax.is_bound(self._axis)
        return [shard.rows if is_local else shard.num_rows for shard in self._shards]

    def init(
        self,
        rng: Array,
        func_args: Sequence[PyTree],
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool = False,
    ) -> ShardedState:
        self.finalize(func_args)
        self._check_no_eigenvalues(cache_eigenvalues)
        keys = jax.random.split(rng, self.num_blocks)
        options = exact_powers_to_cache, approx_powers_to_cache, False
        states: list[BlockState | None] = [None] * self.num_blocks
        for n in self._replicated:
            states[n] = self._structure.blocks[n].init(keys[n], *options)
        powers = powers_of(exact_powers_to_cache), powers_of(approx_powers_to_cache)
        pairs = zip(self._shards, self.num_rows, strict=True)
        shards = [_initial(shard, *powers, rows) for shard, rows in pairs]
        return self.State(tuple(states), tuple(shards), self._num_devices)

    def update_cache(
        self,
        state: BlockDiagonalState,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
        *,
        blocks: Sequence[int] | None = None,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> BlockDiagonalState:
        self._check_no_eigenvalues(eigenvalues)
        norm_type = norm_to_scale_identity_weight_per_block
        weights = self._scaled_weights(state, identity_weight, norm_type)
        powers = powers_of(exact_powers), powers_of(approx_powers)
        shards = []
        for shard, x in zip(self._shards, _sharded(state).shards, strict=True):
            of_units = self._unit_weights(shard, weights)
            shards.append(_with_cache(shard, x, of_units, *powers, blocks, pmap_axis_name))
        state = replace(_sharded(state), shards=tuple(shards))
        options = (exact_powers, approx_powers, eigenvalues, pmap_axis_name)
        return super().update_cache(state, weights, *options, blocks=blocks)

    def block_eigenvalues(self, state: BlockDiagonalState, use_cached: bool) -> tuple[Array, ...]:
        self._check_no_eigenvalues(use_cached)
        return super().block_eigenvalues(whole_state(self, state), use_cached)

    def block_norms(self, state: BlockDiagonalState, norm_type: str) -> tuple[Array, ...]:
        raise NotImplementedError(
            f"{where()}: norms of the blocks of a sharded state are not implemented. Leave "
            f"norm_to_scale_identity_weight_per_block out, or replicate the state."
        )

    def to_diagonal_block_dense_matrix(self, state: BlockDiagonalState) -> tuple[Array, ...]:
        return super().to_diagonal_block_dense_matrix(whole_state(self, state))

    def _make_structure(self, func_args: Sequence[PyTree]) -> Structure:
        structure = super()._make_structure(func_args)
        overriding = [block.name for block in structure.blocks if block.has_own_update]
        if overriding:
            raise ValueError(
                f"{where()}: a sharded state requires blocks of curvax, but "
                f"{', '.join(overriding)} override update_curvature_matrix_estimate."
            )
        self._shards = _shards_of(structure.blocks, self._num_devices)
        return structure

    @property
    def _replicated(self) -> Sequence[int]:
        sharded = {index for shard in self._shards for index in shard.block_indices}
        return [index for index in range(self.num_blocks) if index not in sharded]

    def _products(
        self,
        state: BlockDiagonalState,
        vectors: Sequence[Sequence[Array]],
        weights: Sequence[ArrayLike],
        options: PowerOptions,
        axis: str | None,
    ) -> dict[int, Sequence[Array]]:
        products = super()._products(state, vectors, weights, options, axis)
        for shard, shard_state in zip(self._shards, _sharded(state).shards, strict=True):
            matrices = [
                block.as_matrices([jnp.asarray(x).astype(shard.dtype) for x in vectors[index]])
                for index, block in shard.indexed_blocks
            ]
            x = shard.local_rows(shard.units(matrices, 2), axis)
            weight = shard.local_rows(self._unit_weights(shard, weights), axis)
            rows = _multiply(shard, shard_state, x, MatrixPower(weight, *options), axis)
            units_of_blocks = shard.of_blocks(shard.gathered_units(rows, axis))
            for (index, block), units, matrix in zip(
                shard.indexed_blocks, units_of_blocks, matrices, strict=True
            ):
                scale = jnp.asarray(block.fixed_scale()).astype(shard.dtype) ** options.power
                products[index] = block.of_matrices(scale * units.reshape(matrix.shape))
        return products

    def _update_averages(
        self,
        state: BlockDiagonalState,
        terms: Sequence[Sums],
        uses: Sequence[Sequence[LayerUse]],
        update: AverageUpdate,
    ) -> BlockDiagonalState:
        estimates = [
            [
                block.estimate_here(terms[index], uses[index], update.batch_size, update.axis_name)
                for index, block in shard.indexed_blocks
            ]
            for shard in self._shards
        ]
        finite = _are_finite(self._shards, estimates, update.axis_name)
        each = zip(self._shards, _sharded(state).shards, estimates, finite, strict=True)
        shards = tuple(_with_estimates(*of_shard, update) for of_shard in each)
        state = replace(_sharded(state), shards=shards)
        return super()._update_averages(state, terms, uses, update)

    def _unit_weights(self, shard: Shard, weights: Sequence[ArrayLike]) -> Array:
        """Return the identity weight of each unit, from those of all blocks."""
        scaled = [
            jnp.asarray(weights[n]) / block.fixed_scale() for n, block in shard.indexed_blocks
        ]
        return shard.per_unit(jnp.stack(scaled))

    def _check_no_eigenvalues(self, is_requested: bool) -> None:
        if is_requested:
            raise ValueError(
                f"{where()}: a sharded state has no eigenvalues in its cache. Compute them when "
                f"they are needed: use_cached=False."
            )


def _sharded(state: BlockDiagonalState) -> ShardedState:
    return cast(ShardedState, state)


def whole_state(estimator: BlockDiagonalCurvature, state: BlockDiagonalState) -> BlockDiagonalState:
    """Return the state in the layout of `BlockDiagonalCurvature`.

    Inverse of `split_state`.

    Arguments:
        estimator: The estimator.
        state: A state sharded over any number of devices, as global arrays (not the local shard
            inside `shard_map`); or one in the layout of `BlockDiagonalCurvature` already.

    Returns:
        The state in that layout.

    Raises:
        ValueError: If the state belongs to a different model.
    """
    blocks, states = estimator.blocks or (), list(state.blocks_states)
    # A replicated state has no number of shards: any will do, to check the shapes of its factors.
    shards = _shards_of(blocks, num_shards(state) or 1)
    if isinstance(state, ShardedState):
        _check_rows(state, [shard.num_rows for shard in shards])
        for shard, shard_state in zip(shards, state.shards, strict=True):
            block_states = _to_block_states(shard, shard_state)
            for index, block_state in zip(shard.block_indices, block_states, strict=True):
                states[index] = block_state
    _check_shapes(shards, states, len(blocks))
    return BlockDiagonalState(tuple(states))


def split_state(
    estimator: ShardedCurvature,
    state: BlockDiagonalState,
    exact_powers: Powers,
    approx_powers: Powers,
) -> ShardedState:
    """Return the sharded state, as global arrays, from one of `BlockDiagonalCurvature`.

    Inverse of `whole_state`.

    Arguments:
        estimator: The estimator.
        state: A state in the layout of `BlockDiagonalCurvature`.
        exact_powers: Exact powers that were listed in `init`, which the cache must hold.
        approx_powers: Approximate powers that were listed in `init`, which the cache must hold.

    Returns:
        The state, not yet sharded: pass it to `jax.device_put` with `state_specs`.

    Raises:
        ValueError: If the state belongs to a different model, or its cache holds other powers.
    """
    states = [x for x in state.blocks_states if x is not None]
    _check_shapes(estimator.shards, states, estimator.num_blocks)
    _check_caches(estimator.blocks or (), states, exact_powers, approx_powers)
    shards = [
        _from_block_states(shard, [states[index] for index in shard.block_indices])
        for shard in estimator.shards
    ]
    sharded = {index for shard in estimator.shards for index in shard.block_indices}
    replicated = tuple(None if n in sharded else x for n, x in enumerate(states))
    return ShardedState(replicated, tuple(shards), estimator.num_devices)


def check_rows(estimator: ShardedCurvature, state: ShardedState) -> None:
    """Check that a sharded state has the rows of the estimator's model."""
    _check_rows(state, estimator.num_rows)


def _check_shapes(
    shards: Sequence[Shard], states: Sequence[BlockState | None], num_blocks: int
) -> None:
    """Check that the factors in the blocks' states have the shapes of the blocks."""
    pairs = [pair for shard in shards for pair in shard.indexed_blocks]
    if len(states) != num_blocks or not all(_fits(block, states[n]) for n, block in pairs):
        raise ValueError(
            f"{where()}: the state is not one of this model, whose blocks have other shapes. Make "
            f"a new one with init."
        )


def _check_caches(
    blocks: Sequence[CurvatureBlock], states: Sequence[BlockState], exact: Powers, approx: Powers
) -> None:
    """Check that the blocks' states cache these powers, by the shapes of their entries."""
    for block, state in zip(blocks, states, strict=True):
        init = functools.partial(block.init, jax.random.key(0), exact, approx, False)
        expected, found = (jax.tree.map(np.shape, x.cache) for x in (jax.eval_shape(init), state))
        if expected != found:
            raise ValueError(
                f"{where()}: the state of the block {block.name} has {sorted(found or ())} in its "
                f"cache, where {sorted(expected or ())} is needed: other powers, or exact ones "
                f"instead of approximate ones. Compute the same ones as before, or make a new "
                f"state with init."
            )


def _fits(block: TwoKroneckerFactored, state: BlockState | None) -> bool:
    sides = block.kronecker.inputs, block.kronecker.outputs
    return isinstance(state, block.State) and [side.shape for side in sides] == [
        np.shape(average.raw_value) for average in block.averages(state)
    ]


def _check_rows(state: ShardedState, expected: Sequence[int]) -> None:
    found = [x.factors[FACTORS[0]].shape[0] for x in state.shards]
    if found != expected:
        raise ValueError(
            f"{where()}: a state of this model that is sharded over {state.num_devices} devices "
            f"has {expected} rows of factors, one number for each of their shapes, got {found}. It "
            f"was made for another model: make a new one with init."
        )
