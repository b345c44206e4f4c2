"""kfac_jax's `BlockDiagonalCurvature`: curvax's estimator with kfac_jax's arguments and blocks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax._types import Array, Fun, PyTree
from curvax.curvature.block_diagonal import (
    BlockDiagonalCurvature as CoreEstimator,
    BlockDiagonalState,
)
from curvax.curvature.blocks.base import BlockState, CurvatureBlock as CoreBlock, Powers, present
from curvax.curvature.estimator import IdentityWeight
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.psd import diagonal
from curvax.kfac_jax.curvature_blocks.block import CurvatureBlock
from curvax.kfac_jax.curvature_estimator.defaults import (
    KfacBlockCtor,
    block_ctors,
    default_block_ctor,
    with_name,
)
from curvax.kfac_jax.curvature_estimator.estimator import CurvatureEstimator, function_of
from curvax.kfac_jax.utils.states import State as KfacState, register_state_class
from curvax.layers.tracing.loss_map import ProcessedJaxpr

_logger = logging.getLogger(__name__)


@register_state_class
class BlockDiagonalCurvatureState(KfacState):
    """The state of a `BlockDiagonalCurvature`.

    Attributes:
        synced: Whether the moving averages are averages over all devices.
        blocks_states: The state of each block.
    """

    synced: Array
    blocks_states: tuple[BlockState | None, ...]


class BlockDiagonalCurvature(CurvatureEstimator[BlockDiagonalCurvatureState]):
    """A curvature estimate with a block for each layer, and zeros between layers.

    Equal to `curvax.BlockDiagonalCurvature`, which it has as `core`, except for names and order of
    arguments, and that its blocks are those of `curvax.kfac_jax`.

    Args:
        func: The model function, which registers at least one loss.
        func_and_grad: A function that returns the value of `func` and its gradient, for the modes
            `fisher_empirical_direct` and `fisher_empirical_direct_synced`.
        default_estimation_mode: Mode of `update_curvature_matrix_estimate` unless one is given;
            None for "ggn_curvature_prop".
        layer_tag_to_block_ctor: Block classes that replace the default ones, by the name of the tag
            ("dense", or "dense_tag" as in older releases).
        index_to_block_ctor: Block classes for single layers, by the indices of their parameters.
        auto_register_tags: Whether to detect layers that the function does not tag itself.
        distributed_multiplies: Whether to distribute products with blocks over devices.
        distributed_cache_updates: Whether to distribute cache updates over devices.
        num_samples: Number of samples for each example in an update, in modes that sample.
        should_vmap_samples: Whether to compute the backward passes of samples at the same time.
        auto_register_kwargs: Options of layer detection, such as `graph_patterns`.
        **kwargs: `params_index` and `batch_index`: the arguments that hold parameters and batch.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> from curvax.kfac_jax import curvature_estimator
        >>> def model(w, x):
        ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
        >>> estimator = curvature_estimator.BlockDiagonalCurvature(model)
        >>> key = jax.random.key(0)
        >>> state = estimator.init(key, args, exact_powers_to_cache=None, approx_powers_to_cache=-1)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     state, ema_old=0.0, ema_new=1.0, identity_weight=0.1, batch_size=2, rng=key,
        ...     func_args=args, estimation_mode="ggn_exact",
        ... )
        >>> state.blocks_states[0].factors[0].value
        Array([[5., 1.],
               [1., 2.]], dtype=float32)
    """

    State = BlockDiagonalCurvatureState

    def __init__(
        self,
        func: Fun | None = None,
        func_and_grad: Fun | None = None,
        default_estimation_mode: str | None = None,
        layer_tag_to_block_ctor: Mapping[str, KfacBlockCtor] | None = None,
        index_to_block_ctor: Mapping[tuple[int, ...], KfacBlockCtor] | None = None,
        auto_register_tags: bool = True,
        distributed_multiplies: bool = True,
        distributed_cache_updates: bool = True,
        num_samples: int = 1,
        should_vmap_samples: bool = False,
        auto_register_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        mode = default_estimation_mode or "ggn_curvature_prop"
        super().__init__(func, func_and_grad, default_estimation_mode=mode, **kwargs)
        self.core = CoreEstimator(
            function_of(func, func_and_grad),
            self.params_index,
            mode,
            block_ctors(layer_tag_to_block_ctor),
            {index: with_name(ctor) for index, ctor in (index_to_block_ctor or {}).items()},
            auto_register_tags,
            distributed_multiplies,
            distributed_cache_updates,
            num_samples=num_samples,
            should_vmap_samples=should_vmap_samples,
            func_and_grad=func_and_grad,
            default_block_ctor=default_block_ctor,
            divide_empirical_by_batch_size=True,
            # kfac_jax leaves parameters that no loss depends on alone.
            **{"allow_unused_params": True, **(auto_register_kwargs or {})},
        )

    @property
    def blocks(self) -> tuple[CoreBlock, ...]:
        """The blocks; known once the function has been traced, by `finalize` or `init`."""
        if self.core.blocks is None:
            raise ValueError(
                "The estimator has not been finalized. Call `init` or `finalize` first."
            )
        return self.core.blocks

    @property
    def param_order(self) -> np.ndarray:
        """The indices of the parameters, in the order in which blocks have them."""
        return np.concatenate([list(indices) for indices in self.indices_to_block_map])

    @property
    def jaxpr(self) -> ProcessedJaxpr:
        """The traced function, with its losses and layers."""
        if self.core.processed is None:
            raise ValueError(
                "The estimator has not been finalized. Call `init` or `finalize` first."
            )
        return self.core.processed

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return self.core.num_blocks

    @property
    def block_dims(self) -> tuple[int, ...]:
        """The number of elements of the parameters of each block."""
        return self.core.block_dims

    @property
    def dim(self) -> int:
        return self.core.dim

    @property
    def num_params_variables(self) -> int:
        """The number of arrays among the parameters."""
        return self.core.num_params_variables

    @property
    def params_structure_vector_of_indices(self) -> PyTree:
        """The index of each parameter, in a pytree like the parameters."""
        return self.core.params_structure_vector_of_indices

    @property
    def indices_to_block_map(self) -> dict[tuple[int, ...], CoreBlock]:
        """The blocks, by the indices of their parameters."""
        return self.core.indices_to_block_map

    @property
    def params_block_index(self) -> PyTree:
        """The index of each parameter's block, in a pytree like the parameters."""
        return self.core.params_block_index

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        """Trace the function and make the blocks."""
        self.core.finalize(*args, **kwargs)

    def log_registrations(self) -> None:
        """Log the blocks and their parameters, at the level INFO."""
        _logger.info("%s", self.core.report())

    def params_vector_to_blocks_vectors(
        self, parameter_structured_vector: PyTree
    ) -> tuple[tuple[Array, ...], ...]:
        """Return the leaves of a pytree like the parameters, for each block."""
        return self.core.params_vector_to_blocks_vectors(parameter_structured_vector)

    def blocks_vectors_to_params_vector(self, blocks_vectors: Sequence[Sequence[Array]]) -> PyTree:
        """Inverse of `params_vector_to_blocks_vectors`."""
        return self.core.blocks_vectors_to_params_vector(blocks_vectors)

    def init(
        self,
        rng: Array,
        func_args: Sequence[PyTree],
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool = False,
    ) -> BlockDiagonalCurvatureState:
        """Trace the function, make the blocks, and return the initial state."""
        if not self.finalized:
            self.finalize(func_args)
        options = exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues
        state = self.core.init(rng, func_args, *options)
        return self.State(jnp.asarray(True), state.blocks_states)

    def sync(
        self, state: BlockDiagonalCurvatureState, pmap_axis_name: str | None
    ) -> BlockDiagonalCurvatureState:
        """Return the state with all moving averages averaged over the devices of a mapped axis.

        `update_curvature_matrix_estimate` has done that if it was given the axis; doing it again
        changes nothing.
        """
        if pmap_axis_name is None:
            return state
        blocks = zip(self.blocks, state.blocks_states, strict=True)
        synced = tuple(_synced(block, present(x), pmap_axis_name) for block, x in blocks)
        return self.State(jnp.asarray(True), synced)

    def update_curvature_matrix_estimate(
        self,
        state: BlockDiagonalCurvatureState,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        identity_weight: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        estimation_mode: str | None = None,
        pmap_axis_name: str | None = None,
    ) -> BlockDiagonalCurvatureState:
        """Update the moving averages of all blocks with the curvature at these arguments.

        With a `pmap_axis_name`, they are averages over the devices at once; see `sync`.
        """
        updated = self.core.update_curvature_matrix_estimate(
            _core(state),
            ema_old,
            ema_new,
            batch_size,
            rng,
            func_args,
            pmap_axis_name,
            estimation_mode or self.default_estimation_mode,
            identity_weight=identity_weight,
        )
        return self.State(jnp.asarray(pmap_axis_name is not None), updated.blocks_states)

    def update_cache(
        self,
        state: BlockDiagonalCurvatureState,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> BlockDiagonalCurvatureState:
        """Compute powers and eigenvalues of the blocks and cache them."""
        updated = self.core.update_cache(
            _core(state),
            identity_weight,
            exact_powers,
            approx_powers,
            eigenvalues,
            pmap_axis_name,
            norm_to_scale_identity_weight_per_block=norm_to_scale_identity_weight_per_block,
        )
        return self.State(state.synced, updated.blocks_states)

    def multiply_matpower(
        self,
        state: BlockDiagonalCurvatureState,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by `(matrix + identity_weight * identity) ** power`, by blocks."""
        return self.core.multiply_matpower(
            _core(state),
            parameter_structured_vector,
            identity_weight,
            power,
            exact_power,
            use_cached,
            pmap_axis_name,
            norm_to_scale_identity_weight_per_block=norm_to_scale_identity_weight_per_block,
        )

    def block_eigenvalues(
        self, state: BlockDiagonalCurvatureState, use_cached: bool
    ) -> tuple[Array, ...]:
        """Return the eigenvalues of each block, in no particular order."""
        return self.core.block_eigenvalues(_core(state), use_cached)

    def eigenvalues(self, state: BlockDiagonalCurvatureState, use_cached: bool) -> Array:
        """Return the eigenvalues of all blocks, in the order of `blocks`."""
        return self.core.eigenvalues(_core(state), use_cached)

    def undamped_diagonal(self, state: BlockDiagonalCurvatureState) -> PyTree:
        """Return the diagonal of the matrix, in a pytree like the parameters."""
        blocks = zip(self.blocks, state.blocks_states, strict=True)
        return self.blocks_vectors_to_params_vector(
            [_diagonal(block, present(x)) for block, x in blocks]
        )

    def to_diagonal_block_dense_matrix(
        self, state: BlockDiagonalCurvatureState
    ) -> tuple[Array, ...]:
        """Return each block as a dense matrix."""
        return self.core.to_diagonal_block_dense_matrix(_core(state))

    def to_dense_matrix(self, state: BlockDiagonalCurvatureState) -> Array:
        """Return the block-diagonal matrix, dense, in the order of `ravel_pytree`."""
        return self.core.to_dense_matrix(_core(state))


def _core(state: BlockDiagonalCurvatureState) -> BlockDiagonalState:
    return BlockDiagonalState(state.blocks_states)


def _synced(block: CoreBlock, state: BlockState, axis_name: str) -> BlockState:
    if isinstance(block, CurvatureBlock):
        return block.sync(state, axis_name)
    is_average = lambda x: isinstance(x, WeightedMovingAverage)
    sync = lambda x: x.copy().sync(axis_name) if is_average(x) else x
    return jax.tree.map(sync, state, is_leaf=is_average)


def _diagonal(block: CoreBlock, state: BlockState) -> Sequence[Array]:
    if isinstance(block, CurvatureBlock):
        return block.undamped_diagonal(state)
    # In the order of `ravel_pytree`, from which `ravelled` permutes.
    multiply = lambda x: block.flattened(
        block.multiply(state, block.unflattened(x), 0, True, False)
    )
    identity = jnp.eye(block.dim, dtype=block.dtype)
    return block.unflattened(diagonal(jax.vmap(multiply)(identity)))
