"""Full blocks, with kfac_jax's constructors and states."""

# kfac_jax's states and updates differ from curvax's on purpose.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from typing import cast

from curvax._types import Array
from curvax.curvature.blocks import full
from curvax.curvature.blocks.base import BlockState, TagEquation
from curvax.curvature.linalg.psd import diagonal
from curvax.kfac_jax.curvature_blocks.block import BlockStateBase, CurvatureBlock
from curvax.kfac_jax.utils.states import WeightedMovingAverage, register_state_class


class Full(CurvatureBlock, full.Full):
    """The dense curvature matrix of a layer; see `curvax.Full`.

    Where it is not known which positions belong to one example, each counts as an example.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one, before
            eigenvalues and eigenvectors are cached instead. None for
            `get_default_eigen_decomposition_threshold()`.
    """

    @register_state_class
    class State(BlockStateBase):
        """The state of a full block.

        Attributes:
            matrix: A moving average of the matrix.
        """

        matrix: WeightedMovingAverage[Array]

    def __init__(
        self,
        layer_tag_eq: TagEquation,
        eigen_decomposition_threshold: int | None = None,
        **kwargs: int | None,
    ) -> None:
        if eigen_decomposition_threshold is not None:
            kwargs["eigen_decomposition_threshold"] = eigen_decomposition_threshold
        super().__init__(layer_tag_eq, allow_approximation=True, **kwargs)

    def _undamped_diagonal(self, state: BlockState) -> tuple[Array, ...]:
        return self.unflattened(diagonal(cast(Full.State, state).matrix.value))


class NaiveFull(Full, full.NaiveFull):
    """The outer product of the gradient of the batch with itself; see `curvax.NaiveFull`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one.
    """


class DenseFull(Full, full.DenseFull):
    """The dense curvature matrix of a dense layer; see `curvax.DenseFull`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one.
    """


class ScaleAndShiftFull(Full, full.ScaleAndShiftFull):
    """The dense curvature matrix of a scale and a shift; see `curvax.ScaleAndShiftFull`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one.
    """


class Conv2DFull(Full, full.Conv2DFull):
    """The dense curvature matrix of a convolution; see `curvax.Conv2DFull`.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.
        max_elements_for_vmap: Maximum number of elements of per-example gradients to hold at once;
            None for `get_max_parallel_elements()`.
    """

    def __init__(self, layer_tag_eq: TagEquation, max_elements_for_vmap: int | None = None) -> None:
        super().__init__(layer_tag_eq, max_elements_for_vmap=max_elements_for_vmap)

    def conv2d_tangent_outer_product(self, inputs: Array, tangent_of_outputs: Array) -> Array:
        """Return the outer product of the gradient of one example, given without a batch axis."""
        (use,) = self.uses[:1]
        gradients = use.gradients(inputs[None], tangent_of_outputs[None])
        return full.products_of_gradients([x[None] for x in use.put([x[0] for x in gradients])])
