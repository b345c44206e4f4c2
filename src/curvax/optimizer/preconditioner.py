"""The preconditioner of K-FAC: a curvature estimate, its update schedule, and its inverse.

The estimate is an exponential moving average of a block-diagonal Fisher or Gauss-Newton matrix, as
in Martens & Grosse (2015), "Optimizing neural networks with Kronecker-factored approximate
curvature". Estimate and inverses are updated each with a period of their own.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._cpu import run_if
from curvax._types import Array, Fun, PyTree
from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.curvature.blocks.base import Powers
from curvax.curvature.estimator import IdentityWeight
from curvax.curvature.state_sharding import ShardedCurvature
from curvax.devices.task_assignment import assign
from curvax.optimizer.config import Number, PreconditionerConfig
from curvax.optimizer.state import inner_products, linear_combination, scalar_dtype

EstimatorState: TypeAlias = BlockDiagonalCurvature.State


def is_due(step: Array, period: int, phase: int = 0) -> Array | bool:
    """Return whether a step is in this phase of a period."""
    return period == 1 or step % period == phase


# The curvature of a regulariser `l2_reg / 2 * sum(params**2)`, of the parameters that have it.


def l2_product(config: PreconditionerConfig, vector: PyTree) -> PyTree:
    """Return the curvature of the regulariser times a vector."""
    keep = lambda path, x: (
        x if _is_regularised(config, jax.tree_util.keystr(path)) else jnp.zeros_like(x)
    )
    weight = jnp.asarray(config.l2_reg, scalar_dtype(vector))
    return linear_combination([weight], [jax.tree_util.tree_map_with_path(keep, vector)])


def l2_matrix(config: PreconditionerConfig, vectors: Sequence[PyTree]) -> Array:
    """Return the matrix of products `vᵢᵀ L2 vⱼ`."""
    return inner_products(vectors, [l2_product(config, v) for v in vectors])


def _is_regularised(config: PreconditionerConfig, path: str) -> bool:
    exclusions = config.regularized_parameters_path_exclusions
    return not any(re.search(pattern, path) for pattern in exclusions)


@dataclass(frozen=True)
class Preconditioner:
    """`(C + damping + L2) ** power`, as pure functions of the state of an estimator of C.

    Attributes:
        config: The options.
        estimator: The curvature estimator of a traced function.
        axis: The name of the mesh axis along which batches are sharded; None on one device.
    """

    config: PreconditionerConfig
    estimator: BlockDiagonalCurvature
    axis: str | None

    @classmethod
    def for_function(
        cls,
        config: PreconditionerConfig,
        func: Fun,
        func_args: Sequence[PyTree],
        axis: str | None = None,
        num_shards: int | None = None,
        func_and_grad: Fun | None = None,
    ) -> "Preconditioner":
        """Trace a function that registers losses, and whose last argument is the batch.

        `num_shards` is the number of devices over which to shard the state; None to replicate it.
        `func_and_grad` returns the value and the gradient for the "direct" estimation modes.
        """
        make = config.custom_estimator_ctor or BlockDiagonalCurvature
        if num_shards is not None:
            make = functools.partial(ShardedCurvature, num_devices=num_shards, axis_name=axis)
        estimator = make(
            func,
            0,
            config.estimation_mode,
            config.layer_tag_to_block_ctor,
            auto_register_tags=config.use_automatic_registration,
            distributed_multiplies=config.distributed_precon_apply,
            distributed_cache_updates=config.distributed_inverses,
            **config.sizes,
            batch_index=len(func_args) - 1,
            num_samples=config.num_estimator_samples,
            should_vmap_samples=config.should_vmap_estimator_samples,
            func_and_grad=func_and_grad,
            register_only_generic=config.register_only_generic,
            patterns_to_skip=config.patterns_to_skip,
            strict=config.strict_registration,
            **dict(config.auto_register_kwargs or {}),
        )
        estimator.finalize(func_args)
        return cls(config, estimator, axis)

    @property
    def cached_powers(self) -> tuple[Powers, Powers]:
        """The exact and the approximate power that the cache holds, one of which is None."""
        power = self.config.precon_power
        return (power, None) if self.config.use_exact_inverses else (None, power)

    def init(self, rng: Array, func_args: Sequence[PyTree]) -> EstimatorState:
        """Return the state before the first step."""
        return self.estimator.init(rng, func_args, *self.cached_powers)

    @jax.named_scope("update_curvature")
    def update_curvature(
        self,
        state: EstimatorState,
        func_args: Sequence[PyTree],
        rng: Array,
        is_finite: Array | bool = True,
        damping: Array | None = None,
        decay: Number | None = None,
    ) -> EstimatorState:
        """Update the moving averages with the curvature of a batch.

        The damping is for user-defined blocks whose estimates depend on it; burn-in has none. Skip
        a non-finite batch by the weights (1, 0); this avoids a select over the whole state.
        """
        old = jnp.where(is_finite, self.config.curvature_ema if decay is None else decay, 1.0)
        new = jnp.where(is_finite, 1.0, 0.0)
        batch_size = self.config.batch_size_extractor(func_args[-1])
        return self.estimator.update_curvature_matrix_estimate(
            state,
            old,
            new,
            batch_size,
            rng,
            func_args,
            self.axis,
            identity_weight=0.0 if damping is None else self._with_l2(damping),
        )

    def update_curvature_if_due(
        self,
        state: EstimatorState,
        step: Array,
        is_stale: Array,
        func_args: Sequence[PyTree],
        rng: Array,
        is_finite: Array,
        damping: Array,
    ) -> EstimatorState:
        """Equal to `update_curvature` if the step is due or the state stale, else the identity."""
        due = is_due(step, self.config.curvature_update_period)
        update = lambda state: self.update_curvature(state, func_args, rng, is_finite, damping)
        return run_if(_either(due, is_stale), update, state)

    def update_inverses(
        self, state: EstimatorState, damping: Array, blocks: Sequence[int] | None = None
    ) -> EstimatorState:
        """Update the inverses of some of the blocks, by their indices, or of all."""
        return self.estimator.update_cache(
            state,
            self.weights(damping),
            *self.cached_powers,
            False,
            self.axis,
            blocks=blocks,
            norm_to_scale_identity_weight_per_block=(
                self.config.norm_to_scale_identity_weight_per_block
            ),
        )

    @jax.named_scope("update_inverses")
    def update_inverses_if_due(
        self, state: EstimatorState, step: Array, is_stale: Array, damping: Array
    ) -> EstimatorState:
        """Update the inverses if the step is due or the state stale.

        With `stagger_inverses`, each phase of a period updates the inverses of some of the blocks.
        """
        period = self.config.inverse_update_period
        update = lambda blocks, state: self.update_inverses(state, damping, blocks)
        if not self.config.stagger_inverses or period == 1:
            due = _either(is_due(step, period), is_stale)
            return run_if(due, functools.partial(update, None), state)
        blocks = self.estimator.blocks or ()
        phases = assign([block.cache_work for block in blocks], period)
        for phase in range(period):
            indices = [index for index, assigned in enumerate(phases) if assigned == phase]
            if indices:
                due = _either(is_due(step, period, phase), is_stale)
                state = run_if(due, functools.partial(update, indices), state)
        return state

    @jax.named_scope("precondition")
    def apply(self, state: EstimatorState, gradient: PyTree, damping: Array) -> PyTree:
        """Return the preconditioned gradient, by the inverses in the cache."""
        return self.estimator.multiply_matpower(
            state,
            gradient,
            self.weights(damping),
            self.config.precon_power,
            self.config.use_exact_inverses,
            True,
            self.axis,
            norm_to_scale_identity_weight_per_block=(
                self.config.norm_to_scale_identity_weight_per_block
            ),
        )

    def multiply(self, state: EstimatorState, vector: PyTree) -> PyTree:
        """Return `(C + L2) @ vector` for the estimated curvature C."""
        product = self.estimator.multiply(state, vector, 0.0, True, False, self.axis)
        one = jnp.ones((), scalar_dtype(vector))
        return linear_combination([one, one], [product, l2_product(self.config, vector)])

    def _with_l2(self, damping: ArrayLike) -> Array:
        l2_reg = jnp.asarray(self.config.l2_reg, jnp.result_type(damping))
        return jnp.asarray(damping) + l2_reg

    def weights(self, damping: ArrayLike) -> IdentityWeight:
        """Return the multiple of the identity that is added to each block.

        The regulariser counts for all parameters of a block if it applies to any of them.
        """
        with_l2 = self._with_l2(damping)
        if not self.config.regularized_parameters_path_exclusions:
            return with_l2
        return [
            with_l2 if any(_is_regularised(self.config, path) for path in paths) else damping
            for paths in self.estimator.params_names
        ]


def _either(due: Array | bool, is_stale: Array) -> Array | bool:
    return due if due is True else due | is_stale
