"""A multiple of the identity, with kfac_jax's constructor."""

# kfac_jax's states and updates differ from curvax's on purpose.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.curvature.blocks import scaled_identity
from curvax.curvature.blocks.base import BlockState, TagEquation
from curvax.kfac_jax.curvature_blocks.block import CurvatureBlock


class ScaledIdentity(CurvatureBlock, scaled_identity.ScaledIdentity):
    """A fixed multiple of the identity; see `curvax.ScaledIdentity`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        scale: The multiple, a positive number.
    """

    def __init__(self, layer_tag_eq: TagEquation, scale: ArrayLike = 1.0) -> None:
        super().__init__(layer_tag_eq, scale=scale)

    def _undamped_diagonal(self, state: BlockState) -> tuple[Array, ...]:
        del state
        return tuple(jnp.ones(shape, self.dtype) for shape in self.parameters_shapes)
