"""`ShardedCurvature`: curvature of which each device keeps and inverts a share.

The estimate is that of `BlockDiagonalCurvature`. But of the factors of Kronecker-factored blocks,
and of their inverses, a device has some and not all: those pairs of which `Shard` says that they
are its own. Sums over examples are sent to whoever has the factor; products with inverses are
computed where these are, and sent to all. Blocks of other kinds are the same on all devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from curvax import _compat
from curvax._types import Array, PyTree
from curvax.blocks import (
    MatrixPower,
    Powers,
    TwoKroneckerFactored,
    powers_of,
)
from curvax.curvature._block_diagonal import BlockDiagonalCurvature, Update
from curvax.curvature._estimator import IdentityWeight
from curvax.curvature._passes import Terms, has_own_update
from curvax.curvature._shard_state import (
    all_finite_together,
    averaged,
    by_leaf,
    initial,
    of_states_of_blocks,
    product_with,
    refreshed,
    states_of_blocks,
)
from curvax.curvature._shards import Shard, shards_of
from curvax.curvature._structure import Structure

__all__ = ["ShardedCurvature", "check_split", "split_state", "whole_state"]


class ShardedCurvature(BlockDiagonalCurvature):
    """`BlockDiagonalCurvature`, of whose Kronecker factors each device has a share.

    Methods that are called with a `pmap_axis_name` are called on all devices of that axis, each
    with its own rows of the state; `specs` says which arrays are split. Without one, the state has
    all rows.

    Arguments:
        func: as in `BlockDiagonalCurvature`, and so are all that are not named here.
        num_devices: among how many devices the state is split.
        axis_name: the name of the axis of these devices. Where functions run on all of them, `init`
            makes the rows of each; elsewhere, and without a name, all rows.
    """

    @jax.tree_util.register_dataclass
    @dataclass
    class State(BlockDiagonalCurvature.State):
        """What the estimator keeps.

        Attributes:
            blocks_states: the state of each block, and None for those that are split.
            shards: the factors of all others, by their shapes.
            num_devices: among how many devices they are split.
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
        """Which blocks are split, and which device has what of them."""
        return self._shards

    @property
    def num_devices(self) -> int:
        """Among how many devices the state is split."""
        return self._num_devices

    @property
    def num_rows(self) -> list[int]:
        """How many rows the factors of each shape have: on a device, if it is one of all that run.

        Elsewhere all rows are meant.
        """
        is_one_of_all = self._axis is not None and _compat.is_bound(self._axis)
        return [shard.rows if is_one_of_all else shard.num_rows for shard in self._shards]

    def specs(self, names: Any, state: Any) -> Any:
        """How a state is split along axes of a mesh: specs in place of its arrays."""
        spec = lambda _, position: PartitionSpec() if position is None else PartitionSpec(names)
        return by_leaf(spec, state)

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
        whole = [None] * self.num_blocks
        for number in self._whole:
            whole[number] = self._known.blocks[number].init(keys[number], *options)
        powers = powers_of(exact_powers_to_cache), powers_of(approx_powers_to_cache)
        pairs = zip(self._shards, self.num_rows, strict=True)
        shards = [initial(shard, *powers, rows) for shard, rows in pairs]
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
            refreshed(shard, own, self._weights(shard, weights), powers, blocks, pmap_axis_name)
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
        own = [block.name for block in made.blocks if has_own_update(block)]
        if own:
            raise ValueError(
                f"{self._where}: a state that is split among devices goes with blocks of curvax, "
                f"but {', '.join(own)} override update_curvature_matrix_estimate."
            )
        self._shards = shards_of(made.blocks, self._num_devices)
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
            x = shard.mine(shard.units(mats, 2), axis)
            weight = shard.mine(self._weights(shard, weights), axis)
            product = product_with(shard, own, x, MatrixPower(weight, *options), axis)
            units = shard.of_blocks(shard.of_all(product, axis))
            for number, block, own_units, mat in zip(
                shard.numbers, shard.blocks, units, mats, strict=True
            ):
                scale = jnp.asarray(block.fixed_scale()).astype(shard.dtype) ** options[0]
                found[number] = block.of_matrices(scale * own_units.reshape(mat.shape))
        return found

    def _taken_in(self, state: Any, terms: Terms, sites: Sequence[Any], how: Update) -> Any:
        estimates = [
            [
                block.estimate_here(terms[number], sites[number], *how[2:])
                for number, block in shard.numbered
            ]
            for shard in self._shards
        ]
        fine = all_finite_together(self._shards, estimates, how[3])
        each = zip(self._shards, state.shards, estimates, fine, strict=True)
        shards = tuple(averaged(*of_shard, how) for of_shard in each)
        return super()._taken_in(replace(state, shards=shards), terms, sites, how)

    def _weights(self, shard: Shard, weights: Sequence[ArrayLike]) -> Array:
        """What is added to the diagonals, for each unit."""
        scaled = [jnp.asarray(weights[n]) / block.fixed_scale() for n, block in shard.numbered]
        return shard.per_unit(jnp.stack(scaled))

    def _check_no_eigenvalues(self, wanted: bool) -> None:
        if wanted:
            raise ValueError(
                f"{self._where}: a state that is split among devices has no eigenvalues in its "
                f"cache. Compute them when they are needed: use_cached=False."
            )


def whole_state(estimator: BlockDiagonalCurvature, state: Any) -> Any:
    """The state that `BlockDiagonalCurvature` would have, from one with all rows.

    It may be split among other devices than those of the estimator, or be whole already.
    """
    blocks, states = estimator.blocks or (), list(state.blocks_states)
    is_split = isinstance(state, ShardedCurvature.State)
    shards = shards_of(blocks, state.num_devices if is_split else 1)
    if is_split:
        _check_rows(state, [shard.num_rows for shard in shards])
        for shard, own in zip(shards, state.shards, strict=True):
            for number, found in zip(shard.numbers, states_of_blocks(shard, own), strict=True):
                states[number] = found
    _check_shapes(shards, states, len(blocks))
    return BlockDiagonalCurvature.State(tuple(states))


def split_state(estimator: ShardedCurvature, state: Any) -> Any:
    """The state of the estimator with all rows, on the host, from one that is whole."""
    states = list(state.blocks_states)
    _check_shapes(estimator.shards, states, estimator.num_blocks)
    shards = [
        of_states_of_blocks(shard, [states[number] for number in shard.numbers])
        for shard in estimator.shards
    ]
    for number in [number for shard in estimator.shards for number in shard.numbers]:
        states[number] = None
    return ShardedCurvature.State(tuple(states), tuple(shards), estimator.num_devices)


def check_split(estimator: BlockDiagonalCurvature, state: Any) -> None:
    """Check that a state is split as an estimator expects it, or whole if it expects that."""
    count = state.num_devices if isinstance(state, ShardedCurvature.State) else None
    if not isinstance(estimator, ShardedCurvature):
        if count is not None:
            raise ValueError(
                f"curvax: the state was made with shard_state=True, and is split among {count} "
                f"devices. Say shard_state=True here, too, or make it whole: "
                f"state = optimizer.whole_state(state)."
            )
        return
    if count is None:
        raise ValueError(
            "curvax: the state was made without shard_state=True, and is whole on every device. "
            "Leave shard_state out, or split it: state = optimizer.split_state(state)."
        )
    if count != estimator.num_devices:
        raise ValueError(
            f"curvax: the state is split among {count} devices, but here are "
            f"{estimator.num_devices}. Split it anew: state = optimizer.split_state(state)."
        )
    _check_rows(state, estimator.num_rows)


def _check_shapes(shards: Sequence[Shard], states: Sequence[Any], num_blocks: int) -> None:
    pairs = [pair for shard in shards for pair in shard.numbered]
    if len(states) != num_blocks or not all(_fits(block, states[n]) for n, block in pairs):
        raise ValueError(
            "curvax: the state is not one of this model, whose blocks are of other shapes. Make a "
            "new one with init."
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
            f"curvax: a state of this model that is split among {state.num_devices} devices has "
            f"{expected} rows of factors, one number for each of their shapes, got {found}. It was "
            f"made for another model: make a new one with init."
        )
