"""`BlockDiagonalCurvature`: a curvature matrix with a block for each layer of a model."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._tree import Static
from curvax._types import Array, Fun, PyTree
from curvax.batching import AccumulationType, microbatch
from curvax.blocks import CurvatureBlock, Powers, finished, full_name, in_step
from curvax.curvature._blockwise import BlockwiseCurvature
from curvax.curvature._estimator import IdentityWeight
from curvax.curvature._microbatches import (
    BatchArgument,
    axes_of,
    by_example,
    check_separate,
    length_of,
)
from curvax.curvature._modes import check_mode, draws, num_passes
from curvax.curvature._passes import (
    Layers,
    Terms,
    at_devices,
    has_own_update,
    sum_of_terms,
    updated_by_data,
    with_batch_terms,
)
from curvax.curvature._rows import Share
from curvax.curvature._structure import BlockCtor, Structure
from curvax.linalg import computed
from curvax.parallel import share_out
from curvax.tracing import TracedFunction

__all__ = ["BlockDiagonalCurvature", "Update"]

Update = tuple[ArrayLike, ArrayLike, ArrayLike, str | None]
"""How an update is taken in: the weights of old and new, the batch size, an axis of devices."""


class BlockDiagonalCurvature(BlockwiseCurvature):
    """An estimate of curvature with a block for each layer, and zeros between layers.

    The layers are those that the function registers, and those that are found in it. Which class of
    blocks a layer gets depends on its tag.

    Arguments:
        func: the model function, which registers at least one loss.
        params_index: which of its arguments are the parameters.
        default_estimation_mode: the mode of `update_curvature_matrix_estimate` if none is given.
        layer_tag_to_block_ctor: classes of blocks for layers of some tags, by their names
            ("dense_tag", or "dense" for short), in place of the default ones.
        index_to_block_ctor: classes of blocks for single layers, by the numbers of their
            parameters; see `indices_to_block_map`.
        auto_register_tags: whether to look for layers that the function does not register.
        distributed_multiplies: whether products with blocks are shared out among devices, where a
            method is called with a `pmap_axis_name`.
        distributed_cache_updates: whether updates of the cache are.
        microbatch_size: how many examples to take at a time. The result is the same.
        memory_budget: how much memory an update may use, as in `curvax.microbatch`; the size is
            chosen accordingly.
        batch_index: which argument, or arguments, are the batch that is split for that; by default
            the last one that is not the parameters.
        examples_interact: with microbatches, whether it is fine that a batch is not the sum of its
            examples, as with batch normalisation in training. Each microbatch is then taken for a
            batch.
        num_samples: how many samples an update takes for each example, in modes that draw. They
            share a forward pass.
        auto_register_kwargs: as in `curvax.auto_register_tags`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(params, x, y):
        ...     prediction = curvax.register_squared_error_loss(x @ params["w"] + params["b"], y)
        ...     return jnp.mean(jnp.sum((prediction - y) ** 2, axis=1))
        >>> args = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3)), jnp.ones((4, 2))
        >>> estimator = curvax.BlockDiagonalCurvature(loss)
        >>> state = estimator.init(jax.random.key(0), args, None, -1)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     state, 0.0, 1.0, 4, jax.random.key(1), args, None, "ggn_exact"
        ... )
        >>> state = estimator.update_cache(state, 1e-3, None, -1, False, None)
        >>> gradient = jax.grad(loss)(*args)
        >>> step = estimator.multiply_inverse(state, gradient, 1e-3, False, True, None)
        >>> jax.tree.map(jnp.shape, step)
        {'b': (2,), 'w': (3, 2)}
    """

    @jax.tree_util.register_dataclass
    @dataclass
    class State:
        """What the estimator keeps.

        Attributes:
            blocks_states: the state of each block.
        """

        blocks_states: tuple[Any, ...]

    def __init__(
        self,
        func: Fun,
        params_index: int = 0,
        default_estimation_mode: str = "fisher_gradients",
        layer_tag_to_block_ctor: Mapping[str, BlockCtor] | None = None,
        index_to_block_ctor: Mapping[tuple[int, ...], BlockCtor] | None = None,
        auto_register_tags: bool = True,
        distributed_multiplies: bool = True,
        distributed_cache_updates: bool = True,
        *,
        microbatch_size: int | None = None,
        memory_budget: int | float | str | None = None,
        batch_index: int | Sequence[int] | None = None,
        examples_interact: bool = False,
        num_samples: int = 1,
        **auto_register_kwargs: Any,
    ) -> None:
        super().__init__(func, params_index, default_estimation_mode)
        self._num_samples = num_samples
        self._where = f"curvax.{type(self).__name__}"
        self._tag_ctors = {
            full_name(name): ctor for name, ctor in (layer_tag_to_block_ctor or {}).items()
        }
        self._index_ctors = {
            tuple(index): ctor for index, ctor in (index_to_block_ctor or {}).items()
        }
        self._distributed_multiplies = distributed_multiplies
        self._distributed_cache_updates = distributed_cache_updates
        options = {"auto_register_tags": auto_register_tags, **auto_register_kwargs}
        self._traced = TracedFunction.of(func, params_index, self._where, True, **options)
        self._batch = BatchArgument(params_index, batch_index, self._where)
        self._at_once = microbatch_size is None and memory_budget is None
        self._examples_interact = examples_interact
        self._sizes: dict[str, Any] = {
            "microbatch_size": microbatch_size,
            "memory_budget": memory_budget,
        }

    @property
    def batch_argument(self) -> int | Sequence[int] | None:
        """Which arguments of the function are the batch; None for the last but the parameters."""
        return self._batch.index

    def init(
        self,
        rng: Array,
        func_args: Sequence[PyTree],
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool = False,
    ) -> Any:
        self.finalize(func_args)
        keys = jax.random.split(rng, self.num_blocks)
        options = exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues
        states = [b.init(key, *options) for b, key in zip(self._known.blocks, keys, strict=True)]
        return self.State(blocks_states=tuple(states))

    def multiply_matpower(
        self,
        state: Any,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
    ) -> PyTree:
        vectors = self.params_vector_to_blocks_vectors(parameter_structured_vector)
        weights = self._per_block(identity_weight)
        options = (power, exact_power, use_cached)
        products = self._products(state, vectors, weights, options, pmap_axis_name)
        found = self.blocks_vectors_to_params_vector(
            [products[number] for number in range(self.num_blocks)]
        )
        return jax.tree.map(
            lambda x, v: x.astype(jnp.asarray(v).dtype), found, parameter_structured_vector
        )

    def block_eigenvalues(self, state: Any, use_cached: bool) -> tuple[Array, ...]:
        """The eigenvalues of each block.

        Arguments:
            state: the state of the estimator.
            use_cached: whether to use what `update_cache` computed last.

        Returns:
            For each block, in the order of `blocks`, as many numbers as its parameters have
            elements.
        """
        each = zip(self._known.blocks, state.blocks_states, strict=True)
        return tuple(block.eigenvalues(own, use_cached) for block, own in each)

    def eigenvalues(self, state: Any, use_cached: bool) -> Array:
        return jnp.concatenate(self.block_eigenvalues(state, use_cached))

    def update_curvature_matrix_estimate(
        self,
        state: Any,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        pmap_axis_name: str | None,
        estimation_mode: str | None = None,
    ) -> Any:
        mode = check_mode(estimation_mode or self.default_estimation_mode)
        self.finalize(func_args)
        how = (ema_old, ema_new, batch_size, pmap_axis_name)
        return self._updated(state, mode, rng, func_args, how)

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
        """As in `CurvatureEstimator`; of some `blocks` only, by number, if they are given."""
        weights = self._per_block(identity_weight)
        options = (exact_powers, approx_powers, eigenvalues)
        numbers = range(self.num_blocks) if blocks is None else blocks
        axis = pmap_axis_name if self._distributed_cache_updates else None
        states = list(state.blocks_states)
        updates: dict[int, Any] = {}
        for number in sorted({*numbers} & {*self._whole}):
            block, own = self._known.blocks[number], states[number]
            if type(block).update_cache is not CurvatureBlock.update_cache:
                states[number] = block.update_cache(own, weights[number], *options)
            else:
                updates[number] = block.cache_update(own, weights[number], *options)
        together = in_step(list(updates.values()))
        found = finished(together, functools.partial(computed, axis_name=axis))
        for number, own in zip(updates, found, strict=True):
            states[number] = own
        return replace(state, blocks_states=tuple(states))

    def _updated(
        self, state: Any, mode: str, rng: Array, func_args: Sequence[PyTree], how: Update
    ) -> Any:
        """The state after an update."""
        layers, blocks = self._layers(func_args), self._known.blocks
        states = state.blocks_states
        drawn = draws(layers.at, mode, rng, self._share(func_args, how), self._num_samples)
        if any(map(has_own_update, blocks)):
            self._check_at_once()
            passes = num_passes(mode, drawn)
            found = updated_by_data(layers, states, mode, drawn, passes, how, self._where)
            return replace(state, blocks_states=tuple(found))
        if self._at_once:
            terms, batch_sums = sum_of_terms(layers, states, mode, drawn, self._where)
        else:
            terms, batch_sums = self._in_microbatches(layers, states, mode, drawn, func_args)
        terms = with_batch_terms(layers, states, terms, batch_sums, how[3])
        return self._taken_in(state, terms, layers.sites, how)

    def _share(self, func_args: Sequence[PyTree], how: Update) -> Share:
        """What there is of the batch, if devices share it."""
        return Share(length_of(self._batch.of(func_args)), how[3])

    @property
    def _whole(self) -> Sequence[int]:
        """The numbers of the blocks whose states every device has."""
        return range(self.num_blocks)

    def _products(
        self,
        state: Any,
        vectors: Sequence[Any],
        weights: Sequence[ArrayLike],
        options: tuple[float | int, bool, bool],
        axis: str | None,
    ) -> dict[int, Sequence[Array]]:
        """By the number of a block, a power of it times its part of a vector."""

        def task(number: int) -> Callable[[], Any]:
            block, own = self._known.blocks[number], state.blocks_states[number]
            return lambda: block.multiply_matpower(own, vectors[number], weights[number], *options)

        work = [self._known.blocks[number].multiply_work for number in self._whole]
        shared = axis if self._distributed_multiplies else None
        found = share_out([task(number) for number in self._whole], work, shared)
        return dict(zip(self._whole, found, strict=True))

    def _taken_in(self, state: Any, terms: Terms, sites: Sequence[Any], how: Update) -> Any:
        """The state with a sum of terms of each block in its averages."""
        states = list(state.blocks_states)
        for number in self._whole:
            block, own = self._known.blocks[number], states[number]
            states[number] = block.take_in(own, terms[number], sites[number], *how)
        return replace(state, blocks_states=tuple(states))

    def _layers(self, func_args: Sequence[PyTree]) -> Layers:
        at = at_devices(self._traced, func_args, self.params_index)
        return Layers(at, self._known.blocks)

    def _per_block(self, identity_weight: IdentityWeight) -> Sequence[ArrayLike]:
        count, given = self.num_blocks, identity_weight
        several: Any = given if isinstance(given, list | tuple) else jnp.asarray(given)
        if not isinstance(several, list | tuple) and several.ndim == 0:
            return [several] * count
        if len(several) != count:
            raise ValueError(
                f"{self._where}: identity_weight is a number, or one for each of the {count} "
                f"blocks, got {len(several)}."
            )
        return list(several)

    def _make(self, func_args: Sequence[PyTree]) -> Structure:
        """Which blocks there are, for a function of such arguments."""
        at = self._traced.at(func_args)
        return Structure.of_layers(at, self._tag_ctors, self._index_ctors, self._where)

    def _check_at_once(self) -> None:
        if not self._at_once:
            names = [block.name for block in self._known.blocks if has_own_update(block)]
            raise ValueError(
                f"{self._where}: with microbatch_size or memory_budget, blocks must not override "
                f"update_curvature_matrix_estimate, but {', '.join(names)} do: what they take from "
                f"a microbatch is not known to add up."
            )

    def _in_microbatches(
        self,
        layers: Layers,
        states: Sequence[Any],
        mode: str,
        drawn: Sequence[Array],
        func_args: Sequence[PyTree],
    ) -> tuple[Terms, list[Any]]:
        """As `sum_of_terms`, of microbatches in turn."""
        batch = self._batch.of(func_args)
        length = length_of(batch)
        if not self._examples_interact:
            check_separate(layers.at, self._where)
        rows = [by_example(x, length, self._where) for x in drawn]
        run = microbatch(
            self._part,
            argnums=(3, 4),
            accumulator=AccumulationType.SUM,
            in_axes=[axes_of(batch), 0],
            **self._sizes,
        )
        return run(Static(mode), self._batch.without(func_args), list(states), batch, rows)

    def _part(
        self, mode: Static[str], others: PyTree, states: Any, batch: PyTree, rows: Sequence[Array]
    ) -> tuple[Terms, list[Any]]:
        layers = self._layers(self._batch.replace(others, batch))
        drawn = [jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]) for x in rows]
        return sum_of_terms(layers, states, mode.value, drawn, self._where)
