"""The states of Kronecker-factored blocks of one shape, with a row for each pair of factors.

All functions are called on all devices of an axis, each with its own rows; or without an axis, with
all rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvax._types import Array, PyTree
from curvax.blocks import MatrixPower, TwoKroneckerFactored, multiplied, power_key
from curvax.curvature._shards import Shard
from curvax.linalg import WeightedMovingAverage, all_finite, computed
from curvax.parallel import own_rows

__all__ = [
    "ShardState",
    "all_finite_together",
    "averaged",
    "by_leaf",
    "initial",
    "of_states_of_blocks",
    "product_with",
    "refreshed",
    "states_of_blocks",
]

_NAMES = ("inputs_factor", "outputs_factor")


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


def by_leaf(fun: Callable[[Any, int | None], Any], tree: PyTree) -> PyTree:
    """A function of each leaf of a state, and of the axis along which that is split, if any."""
    is_shard = lambda x: isinstance(x, ShardState)
    whole = lambda tree: jax.tree.map(lambda x: fun(x, None), tree)
    rows = lambda tree: jax.tree.map(lambda x: fun(x, 0), tree)

    def mapped(x: Any) -> Any:
        if not is_shard(x):
            return fun(x, None)
        return ShardState(rows(x.factors), rows(x.cache), whole(x.weight), whole(x.refused))

    return jax.tree.map(mapped, tree, is_leaf=is_shard)


def initial(
    shard: Shard, exact: Sequence[float], approx: Sequence[float], num_rows: int
) -> ShardState:
    """The state of a shard that has seen nothing yet, with so many rows."""
    kronecker = shard.stacked((num_rows,))
    sides = kronecker.inputs, kronecker.outputs
    zeros = lambda: [jnp.zeros(side.shape, shard.dtype) for side in sides]
    named: Callable[[], dict[str, Array]] = lambda: dict(zip(_NAMES, zeros(), strict=True))
    cache = {power_key(power): named() for power in approx}
    if exact:
        shapes = jax.eval_shape(kronecker.eigen, *zeros())
        cache["eigen"] = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
    count = len(shard.blocks)
    return ShardState(
        named(), cache, jnp.zeros((count,), shard.dtype), jnp.zeros((count,), jnp.int32)
    )


def refreshed(
    shard: Shard,
    own: ShardState,
    weights: Array,
    powers: tuple[Sequence[float], Sequence[float]],
    blocks: Sequence[int] | None,
    axis: str | None,
) -> ShardState:
    """The state with exact and approximate powers in its cache, of some blocks or of all.

    `weights` are what is added to the diagonals, for each unit.
    """
    scales = shard.mine(shard.per_unit(_scale(own)), axis)
    weights, kronecker = shard.mine(weights, axis), shard.kronecker
    exact, approx = powers

    def each(row: Array) -> dict[str, Any]:
        take = lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False)
        inputs, outputs = (take(own.factors[name]) for name in _NAMES)
        weight, scale = take(weights), take(scales)
        cache = {name: jax.tree.map(take, x) for name, x in own.cache.items()}
        for power in approx:
            tasks = kronecker.power(inputs, outputs, weight, power, scales=(scale, scale))
            cache[power_key(power)] = dict(zip(_NAMES, computed(tasks), strict=True))
        if exact:
            cache["eigen"] = kronecker.eigen(scale * inputs, scale * outputs)
        return cache

    device = jnp.zeros((), jnp.int32) if axis is None else lax.axis_index(axis)
    return replace(own, cache=own_rows(each, shard.due(blocks, axis), device, own.cache))


def product_with(
    shard: Shard, own: ShardState, x: Array, how: MatrixPower, axis: str | None
) -> Array:
    """A power of the matrices of a device's rows, times what belongs to these."""
    kronecker = shard.stacked((x.shape[0],))

    def factors() -> tuple[Array, Array]:
        rows = shard.mine(shard.per_unit(_scale(own)), axis)
        of_row = lambda x: rows.reshape(-1, *[1] * (x.ndim - 1)) * x
        inputs, outputs = (of_row(own.factors[name]) for name in _NAMES)
        return inputs, outputs

    return multiplied(kronecker, factors, lambda key: own.cache[key], x, how)


def all_finite_together(
    shards: Sequence[Shard], estimates: Sequence[Sequence[Any]], axis: str | None
) -> list[Array]:
    """For each shard, which of its blocks have estimates that are finite, on all devices."""
    if not shards:
        return []
    fine = jnp.stack(
        [
            all_finite(block.telling(found))
            for shard, own in zip(shards, estimates, strict=True)
            for block, found in zip(shard.blocks, own, strict=True)
        ]
    )
    if axis is not None:
        fine = lax.pmin(fine.astype(jnp.int32), axis) > 0
    return jnp.split(fine, np.cumsum([len(shard.blocks) for shard in shards])[:-1])


def averaged(
    shard: Shard, own: ShardState, estimates: Sequence[Any], fine: Array, how: Any
) -> ShardState:
    """The state with estimates of all blocks in its averages; see `WeightedMovingAverage`.

    `fine` says which of them are finite; the averages of others stay what they were.
    """
    old, new, _, axis = how
    old, new = (jnp.asarray(x).astype(shard.dtype) for x in (old, new))
    is_row_fine = shard.mine(shard.per_unit(fine), axis) > 0
    factors: dict[str, Array] = {}
    for k, (name, side) in enumerate(zip(_NAMES, shard.sides, strict=True)):
        ndim = len(side.shape)
        values = [found[k].astype(shard.dtype) for found in estimates]
        rows = shard.mine_of_sum(shard.units(values, ndim), axis)
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


def states_of_blocks(shard: Shard, own: ShardState) -> list[Any]:
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


def of_states_of_blocks(shard: Shard, states: Sequence[Any]) -> ShardState:
    """A state with all rows, on the host, from those of the blocks by themselves."""
    stacks = [block.kronecker.inputs.stack for block in shard.blocks]

    def rows(arrays: Sequence[Any]) -> Any:
        pairs = zip(stacks, map(np.asarray, arrays), strict=True)
        units = [x.reshape(-1, *x.shape[len(stack) :]) for stack, x in pairs]
        return shard.to_rows_on_host(np.concatenate(units))

    factors = {name: [getattr(state, name) for state in states] for name in _NAMES}
    caches = [state.cache for state in states]
    return ShardState(
        factors={name: rows([x.raw_value for x in own]) for name, own in factors.items()},
        cache={
            key: {name: rows([cache[key][name] for cache in caches]) for name in kept}
            for key, kept in caches[0].items()
        },
        weight=np.stack([np.asarray(x.weight) for x in factors[_NAMES[0]]]),
        refused=np.stack([np.asarray(x.refused) for x in factors[_NAMES[0]]]),
    )


def _scale(own: ShardState) -> Array:
    """What the weighted sums of each block are multiplied by to be averages."""
    return 1 / jnp.where(own.weight == 0, 1, own.weight)
