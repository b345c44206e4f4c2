"""Tensor normal training blocks: Kronecker products of second moments of gradients.

Ren & Goldfarb (2021), "Tensor normal training for deep learning models", arXiv:2106.02925. The
factor of an axis is the second moment of the gradient along that axis, summed over all other axes.
All factors have the trace of the full matrix, so their Kronecker product is divided by the right
power of it (`utils.tnt_scale`).
"""

# kfac_jax's states and updates differ from curvax's on purpose.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from collections.abc import Sequence
from typing import ClassVar, cast

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.curvature.blocks.base import BlockState, Statistics, TagEquation
from curvax.curvature.blocks.data import EstimationData
from curvax.curvature.blocks.example_gradients import BatchGradientBlock
from curvax.kfac_jax.curvature_blocks.kronecker import (
    Conv2DTwoKroneckerFactored,
    DenseTwoKroneckerFactored,
    KroneckerFactored,
    with_estimates,
)
from curvax.kfac_jax.utils.matrices import tnt_scale
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


def _scale(state: BlockState) -> ArrayLike:
    """Return the scale at which the trace of the product is the trace of each factor."""
    factors = [x.value for x in cast(KroneckerFactored.State, state).factors]
    return tnt_scale(factors)


class NaiveTNT(KroneckerFactored, BatchGradientBlock):
    """A tensor normal block, from the gradient of the batch.

    With g the sum of the gradients of all N examples, the factor of an axis is the contraction of g
    with itself over all other axes, divided by N. It works for any layer.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        parameters_specs: For each parameter, how its axes are arranged, such as "abc -> (ab)c". By
            default all axes but the last are merged, and a bias is one row.
        parameters_concat_axis: The axis along which the arrays of all parameters are concatenated.
    """

    def state_dependent_scale(self, state: BlockState) -> ArrayLike:
        return _scale(state)

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        return BatchGradientBlock.statistics(self, use, uses, state)

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        del state
        array = self.parameters_shaped_list_to_array(self.total_gradient(sums, uses))
        others = [[k for k in range(array.ndim) if k != axis] for axis in range(array.ndim)]
        contracted = [jnp.tensordot(array, array, axes=(axes, axes)) for axes in others]
        return Sums(of_cotangents=contracted)

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del uses
        return [x / batch_size for x in terms.of_cotangents]


class DenseTNT(DenseTwoKroneckerFactored):
    """A tensor normal block for dense layers, from per-example gradients.

    The gradient of an example is an outer product of its input and cotangent, so the factor of the
    inputs is the second moment of inputs weighted by squared norms of cotangents, and vice versa.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        parameters_specs: For each parameter, how its axes are arranged into (inputs, outputs).
        parameters_concat_axis: The axis along which weights and bias are concatenated.
    """

    needs_data: ClassVar[bool] = True

    def state_dependent_scale(self, state: BlockState) -> ArrayLike:
        return _scale(state)

    def _update_estimate(
        self,
        state: BlockState,
        data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
    ) -> BlockState:
        inputs, cotangents = self.positions_of_data(data)
        if inputs.shape[1] != 1:
            raise NotImplementedError(
                f"curvax.kfac_jax.DenseTNT of {self.name}: the layer is applied at "
                f"{inputs.shape[1]} positions of each example, which kfac_jax does not support. "
                f"Use NaiveTNT."
            )
        rows = self.with_bias(inputs[:, 0])
        pair = rows, cotangents[:, 0]
        estimates = [x / batch_size for x in _weighted_moments(*pair)]
        return with_estimates(self, state, estimates, ema_old, ema_new)


class Conv2DTNT(Conv2DTwoKroneckerFactored):
    """A tensor normal block for convolutions, with positions taken to be independent.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        weighting_per_location: Whether patches are weighted by the squared norm of the cotangent at
            their position, and cotangents by that of their patch. Otherwise the weights are sums
            over all positions of an example.
        parameters_specs: For each parameter, how its axes are arranged into (inputs, outputs).
        parameters_concat_axis: The axis along which kernel and bias are concatenated.
    """

    needs_data: ClassVar[bool] = True

    def __init__(
        self,
        layer_tag_eq: TagEquation,
        weighting_per_location: bool = True,
        parameters_specs: Sequence[str] | None = None,
        parameters_concat_axis: int = 0,
    ) -> None:
        super().__init__(layer_tag_eq, parameters_specs, parameters_concat_axis)
        self._weighting_per_location = weighting_per_location

    def state_dependent_scale(self, state: BlockState) -> ArrayLike:
        return _scale(state)

    def x_squared_spatial_norms(self, x: Array) -> Array:
        """Return the squared norm of each patch, without a bias: (examples, *positions, 1)."""
        patches = self.patches_of(x)
        if self.number_of_parameters > 1:
            patches = patches[..., :-1]
        spatial = [self._first.output.shape[axis] for axis in self._numbers.out_spec[2:]]
        return jnp.sum(patches**2, axis=-1).reshape(-1, *spatial, 1)

    def _update_estimate(
        self,
        state: BlockState,
        data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
    ) -> BlockState:
        (images,), (cotangents,) = data["inputs"], data["outputs_tangents"]
        rows, outputs = self.patches_of(images), self.rows_of_outputs(cotangents)
        moments = _weighted_moments(rows, outputs, None if self._weighting_per_location else 1)
        count = batch_size * rows.shape[1]
        return with_estimates(self, state, [x / count for x in moments], ema_old, ema_new)


def _weighted_moments(inputs: Array, outputs: Array, axis: int | None = None) -> list[Array]:
    """Return the sums of outer products of each array, weighted by squared norms of the other.

    With an `axis`, norms are summed over it first.
    """
    norms = [jnp.sum(x**2, axis=-1, keepdims=True) for x in (outputs, inputs)]
    if axis is not None:
        norms = [jnp.broadcast_to(jnp.sum(x, axis, keepdims=True), x.shape) for x in norms]
    pairs = zip((inputs, outputs), norms, strict=True)
    return [jnp.einsum("...a,...b->ab", x * weights, x) for x, weights in pairs]
