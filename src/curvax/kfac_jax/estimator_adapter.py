"""kfac_jax's `BlockDiagonalCurvature` as the estimator of curvax's optimizer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.curvature.block_diagonal import (
    BlockDiagonalCurvature as CoreEstimator,
    BlockDiagonalState,
)
from curvax.curvature.blocks.base import Powers
from curvax.curvature.estimator import IdentityWeight
from curvax.kfac_jax.curvature_estimator.block_diagonal import (
    BlockDiagonalCurvature,
    BlockDiagonalCurvatureState,
)


class EstimatorAdapter(CoreEstimator):
    """An estimator of kfac_jax's interface, with that of curvax, which the optimizer calls.

    What the optimizer calls in its steps are methods of the given estimator, so that a subclass of
    kfac_jax's class may override them.

    Arguments:
        estimator: The estimator.
    """

    def __init__(self, estimator: BlockDiagonalCurvature) -> None:
        vars(self).update(vars(estimator.core))
        self.adapted = estimator

    @property
    def blocks(self) -> Any:
        """The blocks; None before the function has been traced."""
        return self.adapted.blocks

    def finalize(self, func_args: Sequence[PyTree]) -> None:
        """Trace the function and make the blocks, unless that has been done."""
        if not self.adapted.finalized:
            self.adapted.finalize(func_args)
        self.adapted.core.finalize(func_args)
        vars(self).update(vars(self.adapted.core))

    def init(
        self,
        rng: Array,
        func_args: Sequence[PyTree],
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool = False,
    ) -> BlockDiagonalState:
        """Return the initial state."""
        powers = exact_powers_to_cache, approx_powers_to_cache
        return _core(self.adapted.init(rng, func_args, *powers, cache_eigenvalues))

    def update_curvature_matrix_estimate(
        self,
        state: BlockDiagonalState,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        pmap_axis_name: str | None,
        estimation_mode: str | None = None,
        *,
        identity_weight: ArrayLike = 0.0,
    ) -> BlockDiagonalState:
        """Update the moving averages of all blocks with the curvature at these arguments."""
        updated = self.adapted.update_curvature_matrix_estimate(
            state=_adapted(state),
            ema_old=ema_old,
            ema_new=ema_new,
            identity_weight=identity_weight,
            batch_size=batch_size,
            rng=rng,
            func_args=func_args,
            estimation_mode=estimation_mode,
            pmap_axis_name=pmap_axis_name,
        )
        return _core(updated)

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
        """Compute powers and eigenvalues of the blocks and cache them."""
        if blocks is not None:
            raise _not_available("stagger_inverses")
        updated = self.adapted.update_cache(
            _adapted(state),
            identity_weight=_uniform(identity_weight),
            exact_powers=exact_powers,
            approx_powers=approx_powers,
            eigenvalues=eigenvalues,
            pmap_axis_name=pmap_axis_name,
            **_scaling(norm_to_scale_identity_weight_per_block),
        )
        return _core(updated)

    def multiply_matpower(
        self,
        state: BlockDiagonalState,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        *,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by `(matrix + identity_weight * identity) ** power`, by blocks."""
        return self.adapted.multiply_matpower(
            state=_adapted(state),
            parameter_structured_vector=parameter_structured_vector,
            identity_weight=_uniform(identity_weight),
            power=power,
            exact_power=exact_power,
            use_cached=use_cached,
            pmap_axis_name=pmap_axis_name,
            **_scaling(norm_to_scale_identity_weight_per_block),
        )


def estimator_ctor(
    custom_ctor: Callable[..., BlockDiagonalCurvature] | None,
) -> Callable[..., EstimatorAdapter]:
    """Return what makes the estimator of the optimizer, by a constructor of kfac_jax's interface.

    Arguments:
        custom_ctor: A subclass of `BlockDiagonalCurvature`, for example; None for that class.
    """

    def make(
        func: Fun,
        params_index: int,
        estimation_mode: str,
        layer_tag_to_block_ctor: Mapping[str, Any] | None,
        *,
        microbatch_size: int | None,
        memory_budget: int | float | str | None,
        batch_index: int,
        func_and_grad: Fun | None,
        distributed_multiplies: bool,
        distributed_cache_updates: bool,
        num_samples: int,
        should_vmap_samples: bool,
        auto_register_tags: bool,
        **auto_register_kwargs: Any,
    ) -> EstimatorAdapter:
        if microbatch_size is not None or memory_budget is not None:
            raise _not_available("microbatch_size or memory_budget")
        estimator = (custom_ctor or BlockDiagonalCurvature)(
            func=func,
            func_and_grad=func_and_grad,
            default_estimation_mode=estimation_mode,
            params_index=params_index,
            batch_index=batch_index,
            layer_tag_to_block_ctor=layer_tag_to_block_ctor,
            distributed_multiplies=distributed_multiplies,
            distributed_cache_updates=distributed_cache_updates,
            num_samples=num_samples,
            should_vmap_samples=should_vmap_samples,
            auto_register_tags=auto_register_tags,
            auto_register_kwargs=auto_register_kwargs,
        )
        return EstimatorAdapter(estimator)

    return make


def _uniform(identity_weight: IdentityWeight) -> ArrayLike:
    """Return the same weight for all blocks: parameters without L2 do not count in kfac_jax."""
    if isinstance(identity_weight, Sequence):
        return functools.reduce(jnp.maximum, identity_weight)
    return identity_weight


def _scaling(norm_type: str | None) -> dict[str, str]:
    """Return the keyword argument, unless it is None: overridden methods may not have it."""
    return {} if norm_type is None else {"norm_to_scale_identity_weight_per_block": norm_type}


def _adapted(state: BlockDiagonalState) -> BlockDiagonalCurvatureState:
    make: Any = BlockDiagonalCurvatureState
    return make(synced=jnp.asarray(True), blocks_states=state.blocks_states)


def _core(state: BlockDiagonalCurvatureState) -> BlockDiagonalState:
    if type(state) is not BlockDiagonalCurvatureState:
        raise NotImplementedError(
            f"{where()}: custom_estimator_ctor made an estimator with a state of its own, "
            f"{type(state).__name__}. Keep what it needs in the states of blocks."
        )
    return BlockDiagonalState(state.blocks_states)


def _not_available(options: str) -> ValueError:
    return ValueError(
        f"{where()}: {options} is an option of curvax.Optimizer, and not of "
        f"curvax.kfac_jax.Optimizer. Use curvax.Optimizer."
    )
