"""`ShardedCurvature`: curvature whose Kronecker factors and inverses are sharded over devices.

The estimate is that of `BlockDiagonalCurvature`. But each pair of Kronecker factors, and its
inverses, is on one device, which `Shard` says. Sums over examples are scattered to the devices that
have the factors; products with inverses are computed where these are, and gathered. Blocks of other
kinds are replicated.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from curvax.curvature.block_diagonal import BlockDiagonalCurvature, Structure
from curvax.curvature.blocks.base import (
    BlockState,
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

# Which device has which Kronecker factors.
#
# All pairs of factors of one shape, of several blocks or along the leading axes of one, are units
# of a `Shard`, and rows of common arrays. JAX shards arrays evenly, so every device has the same
# number of rows; rows without a unit are zero. Units are assigned once: those with the most work
# first, each to the device with the least work so far.


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
        """Return how to compute with several units at once, along leading axes."""
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

    def local_rows(self, units: Array, axis: str | None) -> Array:
        """Return the rows of this device, from all units; without an axis all rows."""
        if axis is None:
            return self.to_rows(units)
        return self._filled(units, jnp.asarray(self._slots)[lax.axis_index(axis)])

    def local_rows_of_sum(self, units: Array, axis: str | None) -> Array:
        """Return `local_rows` of the sum of all devices' units."""
        if axis is None or self.is_sparse:
            return self.local_rows(units if axis is None else lax.psum(units, axis), axis)
        return lax.psum_scatter(self.to_rows(units), axis, scatter_dimension=0, tiled=True)

    def gathered_units(self, rows: Array, axis: str | None) -> Array:
        """Gather all units, from the rows of each device; without an axis from all rows."""
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

        Then units are summed over devices instead of scattering and gathering rows, whose number
        grows with that of devices.
        """
        return self.num_rows > 2 * sum(self.lengths)

    @property
    def _row_of_unit(self) -> np.ndarray:
        row_of = {
            unit: self.rows * d + k
            for d, own in enumerate(self.places)
            for k, unit in enumerate(own)
        }
        return np.asarray([row_of[unit] for unit in range(sum(self.lengths))])

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


def _shards_of(blocks: Sequence[Any], count: int) -> list[Shard]:
    """Group all Kronecker-factored blocks by the shapes of factors; assign units to devices."""
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


# The states of Kronecker-factored blocks of one shape, with a row for each pair of factors.
#
# All functions are called on all devices of an axis, each with its own rows; or without an axis,
# with all rows.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardState:
    """The factors of blocks of one shape.

    Attributes:
        factors: weighted sums of both factors, with a row for each pair; split among devices.
        cache: powers of both, or their eigenvectors, likewise.
        weight: for each block the weight of its sums.
        refused: for each block how many batches were refused.
    """

    factors: dict[str, Array]
    cache: dict[str, dict[str, Array]]
    weight: Any
    refused: Any


def state_specs(state: PyTree, axis: str | Sequence[str]) -> PyTree:
    """Return the partition specs of a state that is sharded along an axis of a mesh.

    The rows of factors and caches are sharded; all else, in any pytree around, is replicated.
    """
    is_shard = lambda x: isinstance(x, ShardState)
    spec_of_all = lambda tree, spec: jax.tree.map(lambda _: spec, tree)
    rows, replicated = PartitionSpec(axis), PartitionSpec()

    def specs(x: Any) -> Any:
        if not is_shard(x):
            return replicated
        return ShardState(
            factors=spec_of_all(x.factors, rows),
            cache=spec_of_all(x.cache, rows),
            weight=replicated,
            refused=replicated,
        )

    return jax.tree.map(specs, state, is_leaf=is_shard)


def num_shards(state: Any) -> int | None:
    """Return among how many devices an estimator's state is sharded; None if it is replicated."""
    return state.num_devices if isinstance(state, ShardedCurvature.State) else None


def _initial(
    shard: Shard, exact: Sequence[float], approx: Sequence[float], num_rows: int
) -> ShardState:
    """Return the initial state of a shard, with `num_rows` rows."""
    count = len(shard.blocks)
    weight, refused = jnp.zeros((count,), shard.dtype), jnp.zeros((count,), jnp.int32)
    sides = shard.stacked((num_rows,))
    zeros = (jnp.zeros(side.shape, shard.dtype) for side in (sides.inputs, sides.outputs))
    state = ShardState(dict(zip(FACTORS, zeros, strict=True)), {}, weight, refused)
    return replace(state, cache=_entries(shard, state, (exact, approx)))


def _entries(
    shard: Shard, own: ShardState, powers: tuple[Sequence[float], Sequence[float]]
) -> dict[str, dict[str, Array]]:
    """Return the entries of a cache of exact and approximate powers, with zeros in them."""
    (exact, approx), factors = powers, [own.factors[name] for name in FACTORS]
    named = dict(zip(FACTORS, factors, strict=True))
    shapes: dict[str, Any] = {power_key(power): named for power in approx}
    if exact:
        kronecker = shard.stacked(factors[0].shape[:1])
        shapes["eigen"] = jax.eval_shape(kronecker.eigen, *factors)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _refreshed(
    shard: Shard,
    own: ShardState,
    weights: Array,
    powers: tuple[Sequence[float], Sequence[float]],
    blocks: Sequence[int] | None,
    axis: str | None,
) -> ShardState:
    """The state with exact and approximate powers in its cache, of some blocks or of all.

    `weights` are what is added to the diagonals, for each unit. An entry that there was not before
    is computed for all blocks.
    """
    scales = shard.local_rows(shard.per_unit(_scale(own)), axis)
    weights, kronecker = shard.local_rows(weights, axis), shard.kronecker
    exact, approx = powers
    before = {**_entries(shard, own, powers), **own.cache}
    due = shard.due(blocks if len(before) == len(own.cache) else None, axis)

    def each(row: Array) -> dict[str, Any]:
        take = lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False)
        inputs, outputs = (take(own.factors[name]) for name in FACTORS)
        weight, scale = take(weights), take(scales)
        cache = {name: jax.tree.map(take, x) for name, x in before.items()}
        for power in approx:
            tasks = kronecker.power(inputs, outputs, weight, power, scales=(scale, scale))
            cache[power_key(power)] = dict(zip(FACTORS, run_matrix_tasks(tasks), strict=True))
        if exact:
            cache["eigen"] = kronecker.eigen(scale * inputs, scale * outputs)
        return cache

    device = jnp.zeros((), jnp.int32) if axis is None else lax.axis_index(axis)
    return replace(own, cache=own_rows(each, due, device, before))


def _product_with(
    shard: Shard, own: ShardState, x: Array, how: MatrixPower, axis: str | None
) -> Array:
    """A power of the matrices of a device's rows, times what belongs to these."""
    kronecker = shard.stacked((x.shape[0],))

    def factors() -> tuple[Array, Array]:
        rows = shard.local_rows(shard.per_unit(_scale(own)), axis)
        of_row = lambda x: rows.reshape(-1, *[1] * (x.ndim - 1)) * x
        inputs, outputs = (of_row(own.factors[name]) for name in FACTORS)
        return inputs, outputs

    is_there = cache_key(how.power, how.is_exact) in own.cache
    how = replace(how, is_cached=how.is_cached and (how.power != 1 or is_there))
    cached = lambda key: cached_entry(own.cache, key, shard.blocks[0].name)
    return multiplied(kronecker, factors, cached, x, how)


def _all_finite_together(
    shards: Sequence[Shard], estimates: Sequence[Sequence[Any]], axis: str | None
) -> list[Array]:
    """For each shard, which of its blocks have estimates that are finite, on all devices."""
    if not shards:
        return []
    fine = jnp.stack(
        [
            all_finite(block.finiteness_probe(found))
            for shard, own in zip(shards, estimates, strict=True)
            for block, found in zip(shard.blocks, own, strict=True)
        ]
    )
    if axis is not None:
        fine = lax.pmin(fine.astype(jnp.int32), axis) > 0
    return jnp.split(fine, np.cumsum([len(shard.blocks) for shard in shards])[:-1])


def _averaged(
    shard: Shard, own: ShardState, estimates: Sequence[Any], fine: Array, update: AverageUpdate
) -> ShardState:
    """The state with estimates of all blocks in its averages; see `WeightedMovingAverage`.

    `fine` says which of them are finite; the averages of others stay what they were.
    """
    axis = update.axis_name
    weights = update.ema_old, update.ema_new
    old, new = (jnp.asarray(x).astype(shard.dtype) for x in weights)
    is_row_fine = shard.local_rows(shard.per_unit(fine), axis) > 0
    factors: dict[str, Array] = {}
    for k, (name, side) in enumerate(zip(FACTORS, shard.sides, strict=True)):
        ndim = len(side.shape)
        values = [found[k].astype(shard.dtype) for found in estimates]
        rows = shard.local_rows_of_sum(shard.units(values, ndim), axis)
        if axis is not None:
            rows = rows / lax.axis_size(axis)
        before = own.factors[name]
        is_fine = jnp.broadcast_to(is_row_fine.reshape(-1, *[1] * ndim), before.shape)
        factors[name] = jnp.where(is_fine, old * before + new * rows, before)
    return replace(
        own,
        factors=factors,
        weight=jnp.where(fine, old * own.weight + new, own.weight),
        refused=own.refused + (~fine).astype(own.refused.dtype),
    )


def _states_of_blocks(shard: Shard, own: ShardState) -> list[Any]:
    """The states that the blocks would have by themselves, from a state with all rows.

    They are on the host if that is.
    """
    split = lambda x: shard.of_blocks(shard.from_rows(x))
    factors = {name: split(x) for name, x in own.factors.items()}
    caches = {key: {name: split(x) for name, x in kept.items()} for key, kept in own.cache.items()}

    def state(number: int, block: TwoKroneckerFactored) -> Any:
        stack = block.kronecker.inputs.stack
        shaped = lambda units: units[number].reshape(*stack, *units[number].shape[1:])
        weight, refused = own.weight[number, ...], own.refused[number, ...]
        averages = {
            name: WeightedMovingAverage(weight, shaped(x), refused) for name, x in factors.items()
        }
        cache = {key: {name: shaped(x) for name, x in kept.items()} for key, kept in caches.items()}
        return block.State(cache=cache, **averages)

    return [state(number, block) for number, block in enumerate(shard.blocks)]


def _of_states_of_blocks(shard: Shard, states: Sequence[Any]) -> ShardState:
    """A state with all rows, on the host, from those of the blocks by themselves."""
    stacks = [block.kronecker.inputs.stack for block in shard.blocks]

    def rows(arrays: Sequence[Any]) -> Any:
        pairs = zip(stacks, map(np.asarray, arrays), strict=True)
        units = [x.reshape(-1, *x.shape[len(stack) :]) for stack, x in pairs]
        return shard.to_rows_on_host(np.concatenate(units))

    factors = {name: [getattr(state, name) for state in states] for name in FACTORS}
    caches = [state.cache for state in states]
    return ShardState(
        factors={name: rows([x.raw_value for x in own]) for name, own in factors.items()},
        cache={
            key: {name: rows([cache[key][name] for cache in caches]) for name in kept}
            for key, kept in caches[0].items()
        },
        weight=np.stack([np.asarray(x.weight) for x in factors[FACTORS[0]]]),
        refused=np.stack([np.asarray(x.refused) for x in factors[FACTORS[0]]]),
    )


def _scale(own: ShardState) -> Array:
    """What the weighted sums of each block are multiplied by to be averages."""
    return 1 / jnp.where(own.weight == 0, 1, own.weight)


class ShardedCurvature(BlockDiagonalCurvature):
    """`BlockDiagonalCurvature` with Kronecker factors that are sharded over devices.

    Methods that are called with a `pmap_axis_name` are called on all devices of that axis, each
    with its own rows of the state; `state_specs` says which arrays are sharded. Without one, the
    state has all rows.

    Arguments:
        func: as in `BlockDiagonalCurvature`, and so are all that are not named here.
        num_devices: the number of devices over which the state is sharded.
        axis_name: the name of the axis of these devices. Under a `shard_map` over it, `init` makes
            the rows of each device; elsewhere, and without a name, all rows.
    """

    @jax.tree_util.register_dataclass
    @dataclass
    class State(BlockDiagonalCurvature.State):
        """What the estimator keeps.

        Attributes:
            blocks_states: the state of each block, and None for those that are sharded.
            shards: the factors of these, by their shapes.
            num_devices: the number of devices over which they are sharded.
        """

        shards: tuple[Any, ...]
        num_devices: int = field(metadata={"static": True})

    def __init__(
        self, *args: Any, num_devices: int, axis_name: str | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._num_devices, self._axis = num_devices, axis_name
        self._shards: list[Shard] = []

    @property
    def shards(self) -> Sequence[Shard]:
        """Which blocks are sharded, and which device has which of their units."""
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
    ) -> Any:
        self.finalize(func_args)
        self._check_no_eigenvalues(cache_eigenvalues)
        keys = jax.random.split(rng, self.num_blocks)
        options = exact_powers_to_cache, approx_powers_to_cache, False
        whole: list[BlockState | None] = [None] * self.num_blocks
        for number in self._whole:
            whole[number] = self._known.blocks[number].init(keys[number], *options)
        powers = powers_of(exact_powers_to_cache), powers_of(approx_powers_to_cache)
        pairs = zip(self._shards, self.num_rows, strict=True)
        shards = [_initial(shard, *powers, rows) for shard, rows in pairs]
        return self.State(tuple(whole), tuple(shards), self._num_devices)

    def update_cache(
        self,
        state: Any,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
        *,
        blocks: Sequence[int] | None = None,
    ) -> Any:
        self._check_no_eigenvalues(eigenvalues)
        weights = self._per_block(identity_weight)
        powers = powers_of(exact_powers), powers_of(approx_powers)
        shards = [
            _refreshed(shard, own, self._weights(shard, weights), powers, blocks, pmap_axis_name)
            for shard, own in zip(self._shards, state.shards, strict=True)
        ]
        state = replace(state, shards=tuple(shards))
        options = (exact_powers, approx_powers, eigenvalues, pmap_axis_name)
        return super().update_cache(state, identity_weight, *options, blocks=blocks)

    def block_eigenvalues(self, state: Any, use_cached: bool) -> tuple[Array, ...]:
        self._check_no_eigenvalues(use_cached)
        return super().block_eigenvalues(whole_state(self, state), use_cached)

    def to_diagonal_block_dense_matrix(self, state: Any) -> tuple[Array, ...]:
        return super().to_diagonal_block_dense_matrix(whole_state(self, state))

    def _make(self, func_args: Sequence[PyTree]) -> Structure:
        made = super()._make(func_args)
        own = [block.name for block in made.blocks if block.has_own_update]
        if own:
            raise ValueError(
                f"{where()}: a state that is split among devices goes with blocks of curvax, "
                f"but {', '.join(own)} override update_curvature_matrix_estimate."
            )
        self._shards = _shards_of(made.blocks, self._num_devices)
        return made

    @property
    def _whole(self) -> Sequence[int]:
        split = {number for shard in self._shards for number in shard.numbers}
        return [number for number in range(self.num_blocks) if number not in split]

    def _products(
        self,
        state: Any,
        vectors: Sequence[Any],
        weights: Sequence[ArrayLike],
        options: tuple[float | int, bool, bool],
        axis: str | None,
    ) -> dict[int, Sequence[Array]]:
        found = super()._products(state, vectors, weights, options, axis)
        for shard, own in zip(self._shards, state.shards, strict=True):
            mats = [
                block.as_matrices([jnp.asarray(x).astype(shard.dtype) for x in vectors[number]])
                for number, block in shard.numbered
            ]
            x = shard.local_rows(shard.units(mats, 2), axis)
            weight = shard.local_rows(self._weights(shard, weights), axis)
            product = _product_with(shard, own, x, MatrixPower(weight, *options), axis)
            units = shard.of_blocks(shard.gathered_units(product, axis))
            for number, block, own_units, mat in zip(
                shard.numbers, shard.blocks, units, mats, strict=True
            ):
                scale = jnp.asarray(block.fixed_scale()).astype(shard.dtype) ** options[0]
                found[number] = block.of_matrices(scale * own_units.reshape(mat.shape))
        return found

    def _update_averages(
        self, state: Any, terms: Sequence[Sums], uses: Sequence[Any], update: AverageUpdate
    ) -> Any:
        estimates = [
            [
                block.estimate_here(
                    terms[number], uses[number], update.batch_size, update.axis_name
                )
                for number, block in shard.numbered
            ]
            for shard in self._shards
        ]
        fine = _all_finite_together(self._shards, estimates, update.axis_name)
        each = zip(self._shards, state.shards, estimates, fine, strict=True)
        shards = tuple(_averaged(*of_shard, update) for of_shard in each)
        return super()._update_averages(replace(state, shards=shards), terms, uses, update)

    def _weights(self, shard: Shard, weights: Sequence[ArrayLike]) -> Array:
        """What is added to the diagonals, for each unit."""
        scaled = [jnp.asarray(weights[n]) / block.fixed_scale() for n, block in shard.numbered]
        return shard.per_unit(jnp.stack(scaled))

    def _check_no_eigenvalues(self, wanted: bool) -> None:
        if wanted:
            raise ValueError(
                f"{where()}: a state that is split among devices has no eigenvalues in its "
                f"cache. Compute them when they are needed: use_cached=False."
            )


def whole_state(estimator: BlockDiagonalCurvature, state: Any) -> Any:
    """Return the state that `BlockDiagonalCurvature` would have, from one with all rows.

    It may be sharded over another number of devices than the estimator's, or replicated already.
    """
    blocks, states = estimator.blocks or (), list(state.blocks_states)
    is_split = isinstance(state, ShardedCurvature.State)
    shards = _shards_of(blocks, state.num_devices if is_split else 1)
    if is_split:
        _check_rows(state, [shard.num_rows for shard in shards])
        for shard, own in zip(shards, state.shards, strict=True):
            for number, found in zip(shard.numbers, _states_of_blocks(shard, own), strict=True):
                states[number] = found
    _check_shapes(shards, states, len(blocks))
    return BlockDiagonalCurvature.State(tuple(states))


def split_state(
    estimator: ShardedCurvature, state: Any, exact_powers: Powers, approx_powers: Powers
) -> Any:
    """Return the estimator's state with all rows, on the host, from a replicated one.

    The powers are those that the estimator's `init` would be given, which its cache must have.
    """
    states = list(state.blocks_states)
    _check_shapes(estimator.shards, states, estimator.num_blocks)
    _check_caches(estimator.blocks or (), states, exact_powers, approx_powers)
    shards = [
        _of_states_of_blocks(shard, [states[number] for number in shard.numbers])
        for shard in estimator.shards
    ]
    for number in [number for shard in estimator.shards for number in shard.numbers]:
        states[number] = None
    return ShardedCurvature.State(tuple(states), tuple(shards), estimator.num_devices)


def check_rows(estimator: ShardedCurvature, state: Any) -> None:
    """Check that a sharded state has the rows of the estimator's model."""
    _check_rows(state, estimator.num_rows)


def _check_shapes(shards: Sequence[Shard], states: Sequence[Any], num_blocks: int) -> None:
    pairs = [pair for shard in shards for pair in shard.numbered]
    if len(states) != num_blocks or not all(_fits(block, states[n]) for n, block in pairs):
        raise ValueError(
            f"{where()}: the state is not one of this model, whose blocks are of other shapes. "
            f"Make a new one with init."
        )


def _check_caches(
    blocks: Sequence[Any], states: Sequence[Any], exact: Powers, approx: Powers
) -> None:
    """Check that the blocks' states cache these powers, as their shapes show."""
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


def _fits(block: TwoKroneckerFactored, state: Any) -> bool:
    sides = block.kronecker.inputs, block.kronecker.outputs
    return isinstance(state, block.State) and [side.shape for side in sides] == [
        np.shape(average.raw_value) for average in block.averages(state)
    ]


def _check_rows(state: Any, expected: Sequence[int]) -> None:
    found = [own.factors["inputs_factor"].shape[0] for own in state.shards]
    if found != expected:
        raise ValueError(
            f"{where()}: a state of this model that is split among {state.num_devices} devices has "
            f"{expected} rows of factors, one number for each of their shapes, got {found}. It was "
            f"made for another model: make a new one with init."
        )
