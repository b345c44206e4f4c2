"""Diagonal blocks, with kfac_jax's constructors and states."""

# kfac_jax's states and updates differ from curvax's on purpose.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import math
from typing import cast

import jax.numpy as jnp

from curvax._types import Array
from curvax.curvature.blocks import diagonal
from curvax.curvature.blocks.base import BlockState, TagEquation
from curvax.curvature.linalg.norms import psd_norm
from curvax.kfac_jax.curvature_blocks.block import BlockStateBase, CurvatureBlock
from curvax.kfac_jax.utils.states import WeightedMovingAverage, register_state_class


class Diagonal(CurvatureBlock, diagonal.Diagonal):
    """The diagonal of the curvature; see `curvax.Diagonal`.

    Where it is not known which positions belong to one example, each counts as an example.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
    """

    @register_state_class
    class State(BlockStateBase):
        """The state of a diagonal block.

        Attributes:
            diagonal_factors: A moving average for each parameter, of its shape.
        """

        diagonal_factors: tuple[WeightedMovingAverage[Array], ...]

    def __init__(self, layer_tag_eq: TagEquation, **kwargs: int | None) -> None:
        super().__init__(layer_tag_eq, allow_approximation=True, **kwargs)

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias."""
        return self.number_of_parameters > 1

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        """Return the product of the norms of all parameters, as kfac_jax 0.0.8 does.

        It is the norm of the block only if that has one parameter; `curvax.Diagonal` has the norm.
        """
        norms = [psd_norm(jnp.ravel(x), norm_type) for x in self._undamped_diagonal(state)]
        return math.prod(norms[1:], start=norms[0])

    def _undamped_diagonal(self, state: BlockState) -> tuple[Array, ...]:
        return tuple(x.value for x in cast(Diagonal.State, state).diagonal_factors)


class NaiveDiagonal(Diagonal, diagonal.NaiveDiagonal):
    """The square of the gradient of the batch; see `curvax.NaiveDiagonal`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
    """


class DenseDiagonal(Diagonal, diagonal.DenseDiagonal):
    """The diagonal of the curvature of a dense layer; see `curvax.DenseDiagonal`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
    """


class ScaleAndShiftDiagonal(Diagonal, diagonal.ScaleAndShiftDiagonal):
    """The diagonal of the curvature of a scale and a shift; see `curvax.ScaleAndShiftDiagonal`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
    """


class Conv2DDiagonal(Diagonal, diagonal.Conv2DDiagonal):
    """The diagonal of the curvature of a convolution; see `curvax.Conv2DDiagonal`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        max_elements_for_vmap: Maximum number of elements of per-example gradients to hold at once;
            None for `get_max_parallel_elements()`.
    """

    def __init__(self, layer_tag_eq: TagEquation, max_elements_for_vmap: int | None = None) -> None:
        super().__init__(layer_tag_eq, max_elements_for_vmap=max_elements_for_vmap)

    def conv2d_tangent_squared(self, image_features_map: Array, output_tangent: Array) -> Array:
        """Return the square of the gradient of the kernel, for one example without a batch axis."""
        (use,) = self.uses[:1]
        gradients = use.gradients(image_features_map[None], output_tangent[None])
        return gradients[0][0] ** 2
