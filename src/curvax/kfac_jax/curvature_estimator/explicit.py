"""kfac_jax's `ExplicitExactCurvature`: the dense curvature matrix of all parameters."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from curvax._types import Fun
from curvax.curvature.explicit import ExplicitExactCurvature as CoreEstimator
from curvax.kfac_jax.curvature_blocks.full import NaiveFull
from curvax.kfac_jax.curvature_estimator.block_diagonal import BlockDiagonalCurvature
from curvax.kfac_jax.curvature_estimator.defaults import KfacBlockCtor, block_ctors
from curvax.kfac_jax.curvature_estimator.estimator import CurvatureEstimator, function_of


class ExplicitExactCurvature(BlockDiagonalCurvature):
    """The curvature matrix of all parameters, as one dense block.

    Equal to `curvax.ExplicitExactCurvature`, which it has as `core`, except for names and order of
    arguments.

    Args:
        func: The model function, which registers at least one loss.
        func_and_grad: A function that returns the value of `func` and its gradient; only its value
            is used, where `func` is None.
        default_estimation_mode: Mode of `update_curvature_matrix_estimate` unless one is given;
            None for "ggn_curvature_prop".
        layer_tag_to_block_ctor: A block class under "generic", in place of `NaiveFull`.
        auto_register_tags: Has no effect: all parameters are in one block, whatever their layers.
        param_order: The order of the parameters inside the block; it has no effect on results, in
            which they are in the order of `jax.flatten_util.ravel_pytree`.
        **kwargs: `params_index` and `batch_index`: the arguments that hold parameters and batch.
    """

    def __init__(
        self,
        func: Fun | None = None,
        func_and_grad: Fun | None = None,
        default_estimation_mode: str | None = None,
        layer_tag_to_block_ctor: Mapping[str, KfacBlockCtor] | None = None,
        auto_register_tags: bool = False,
        param_order: tuple[int, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        del auto_register_tags
        mode = default_estimation_mode or "ggn_curvature_prop"
        CurvatureEstimator.__init__(
            self, func, func_and_grad, default_estimation_mode=mode, **kwargs
        )
        self.core = CoreEstimator(
            function_of(func, func_and_grad),
            self.params_index,
            self.batch_index,
            mode,
            block_ctors({"generic": NaiveFull, **(layer_tag_to_block_ctor or {})}),
        )
        self._param_order = param_order

    @property
    def param_order(self) -> np.ndarray:
        if self._param_order is None:
            return super().param_order
        return np.asarray(self._param_order)
