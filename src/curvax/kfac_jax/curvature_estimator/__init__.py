"""kfac_jax's `curvature_estimator`: estimates of curvature matrices, and exact products."""

import importlib
from typing import Any

from curvax.kfac_jax.curvature_estimator.block_diagonal import (
    BlockDiagonalCurvature as BlockDiagonalCurvature,
)
from curvax.kfac_jax.curvature_estimator.defaults import (
    get_default_tag_to_block_ctor as get_default_tag_to_block_ctor,
    set_default_tag_to_block_ctor as set_default_tag_to_block_ctor,
    set_multi_default_tag_to_block_ctor as set_multi_default_tag_to_block_ctor,
)
from curvax.kfac_jax.curvature_estimator.estimator import (
    CurvatureEstimator as CurvatureEstimator,
    StateType as StateType,
)
from curvax.kfac_jax.curvature_estimator.explicit import (
    ExplicitExactCurvature as ExplicitExactCurvature,
)
from curvax.kfac_jax.curvature_estimator.implicit import (
    ImplicitExactCurvature as ImplicitExactCurvature,
)
from curvax.kfac_jax.loss_functions import LossFunction as LossFunction

_IN_OPTAX = ("OptaxPreconditioner", "OptaxPreconditionState")


def __getattr__(name: str) -> Any:
    """Import what needs optax and the optimizer, which use this module, on first use."""
    if name not in _IN_OPTAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("curvax.kfac_jax.optax_preconditioner"), name)
