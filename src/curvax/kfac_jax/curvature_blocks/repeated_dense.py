"""kfac_jax's block for dense layers that are applied at several positions of an example."""

# kfac_jax's states and updates differ from curvax's on purpose.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from collections.abc import Sequence
from typing import ClassVar, cast

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import BlockState, TagEquation
from curvax.curvature.blocks.data import EstimationData
from curvax.kfac_jax.curvature_blocks.kronecker import (
    DenseTwoKroneckerFactored,
    KroneckerFactored,
    with_estimates,
)
from curvax.kfac_jax.utils.states import WeightedMovingAverage, register_state_class


class RepeatedDenseKroneckerFactored(DenseTwoKroneckerFactored):
    """A Kronecker-factored block for a dense layer that is applied at several positions.

    Factors are averages over examples of sums over positions, and their product is divided by the
    average number of positions. Without masks, that is the "expand" approximation of Eschenhagen et
    al. (2023), and the matrix equals that of `DenseTwoKroneckerFactored`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        use_masking: Whether positions without a cotangent, as those of padding have none, are left
            out: their inputs do not count, nor do they count as positions. As in kfac_jax, the one
            that stands for the bias counts at all positions.
        parameters_specs: For each parameter, how its axes are arranged into (inputs, outputs), such
            as "abc -> (ab)c". None for as they are.
        parameters_concat_axis: The axis along which weights and bias are concatenated.
    """

    @register_state_class
    class State(KroneckerFactored.State):
        """The state of a block of a repeated layer.

        Attributes:
            average_repeats: A moving average of the number of positions of an example.
        """

        average_repeats: WeightedMovingAverage[Array]

    needs_data: ClassVar[bool] = True

    def __init__(
        self,
        layer_tag_eq: TagEquation,
        use_masking: bool = True,
        parameters_specs: Sequence[str] | None = None,
        parameters_concat_axis: int = 0,
    ) -> None:
        super().__init__(layer_tag_eq, parameters_specs, parameters_concat_axis)
        self._use_masking = use_masking

    def state_dependent_scale(self, state: BlockState) -> ArrayLike:
        repeats = cast(RepeatedDenseKroneckerFactored.State, state).average_repeats.value
        return 1 / jnp.where(repeats > 0, repeats, 1)

    def _initial_fields(self) -> dict[str, PyTree]:
        repeats = WeightedMovingAverage.zeros_array((), self.dtype)
        return {**super()._initial_fields(), "average_repeats": repeats}

    def _update_estimate(
        self,
        state: BlockState,
        data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
    ) -> BlockState:
        inputs, cotangents = self.positions_of_data(data)
        mask = jnp.ones(inputs.shape[:2], self.dtype)
        if self._use_masking:
            mask = jnp.any(cotangents != 0, axis=-1).astype(self.dtype)
            inputs = inputs * mask[..., None]
        rows = self.with_bias(inputs)
        second_moment = lambda x: jnp.einsum("nta,ntb->ab", x, x) / batch_size
        estimates = second_moment(rows), second_moment(cotangents), jnp.sum(mask) / batch_size
        return with_estimates(self, state, estimates, ema_old, ema_new)
