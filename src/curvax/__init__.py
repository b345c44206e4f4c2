"""Curvature in JAX, within the memory you have."""

import importlib
import sys

from curvax import _jax as _jax  # First: it raises an error if JAX is too old.

# isort: split
from curvax._tree import Static
from curvax.curvature.batch import default_batch_size_extractor
from curvax.curvature.block_diagonal import BlockDiagonalCurvature, CurvatureReport
from curvax.curvature.blocks.base import CurvatureBlock
from curvax.curvature.blocks.diagonal import (
    Conv2DDiagonal,
    DenseDiagonal,
    Diagonal,
    NaiveDiagonal,
    ScaleAndShiftDiagonal,
)
from curvax.curvature.blocks.ekfac import Conv2DEKFAC, DenseEKFAC
from curvax.curvature.blocks.full import Conv2DFull, DenseFull, Full, NaiveFull, ScaleAndShiftFull
from curvax.curvature.blocks.kronecker import (
    Conv2DTwoKroneckerFactored,
    ConvTwoKroneckerFactored,
    DenseTwoKroneckerFactored,
    EmbeddingTwoKroneckerFactored,
    TwoKroneckerFactored,
)
from curvax.curvature.blocks.scaled_identity import ScaledIdentity
from curvax.curvature.blocks.settings import (
    get_default_eigen_decomposition_threshold,
    get_default_tag_to_block_ctor,
    get_max_parallel_elements,
    set_default_eigen_decomposition_threshold,
    set_default_tag_to_block_ctor,
    set_max_parallel_elements,
)
from curvax.curvature.estimator import CurvatureEstimator
from curvax.curvature.explicit import ExplicitExactCurvature
from curvax.curvature.implicit import ImplicitExactCurvature
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linear_operator import CurvatureOperator, as_linear_operator
from curvax.curvature.patches.moments import patches_moments, patches_moments_explicit
from curvax.curvature.spectral_density import SpectralDensity, spectral_density
from curvax.curvature.verification import VerificationReport, verify_curvature
from curvax.derivatives.disk.store import DamagedStoreWarning
from curvax.derivatives.fisher_information import fisher_information
from curvax.derivatives.gauss_newton import gauss_newton
from curvax.derivatives.hessian import (
    hessian,
    hessian_blocks,
    hessian_diagonal,
    hessian_to_pytree,
)
from curvax.derivatives.jacobian import jacobian, jacobian_to_pytree
from curvax.layers.patterns import DEFAULT_GRAPH_PATTERNS, GraphMatcherComparator, GraphPattern
from curvax.layers.registration import RegistrationError, TaggedFunction, auto_register_tags
from curvax.layers.report import ParameterRow, RegistrationReport, explain_registration
from curvax.layers.tags import (
    LayerTag,
    register_conv,
    register_conv2d,
    register_dense,
    register_embedding,
    register_generic,
    register_scale_and_shift,
)
from curvax.layers.tracing.layer_inputs import layer_tags_vjp
from curvax.layers.tracing.loss_derivatives import loss_tags_hvp, loss_tags_jvp, loss_tags_vjp
from curvax.layers.tracing.loss_map import ProcessedJaxpr
from curvax.layers.tracing.statistics import layer_statistics
from curvax.loops.checkpointed_scan import checkpoint_chunked_scan, checkpointed_scan
from curvax.loops.sliced_scan import sliced_scan
from curvax.losses.categorical import (
    CategoricalLogitsNegativeLogProbLoss,
    OneHotCategoricalLogitsNegativeLogProbLoss,
)
from curvax.losses.loss_function import (
    DistributionNegativeLogProbLoss,
    LossFunction,
    NegativeLogProbLoss,
)
from curvax.losses.multi_bernoulli import MultiBernoulliNegativeLogProbLoss
from curvax.losses.normal import (
    NormalMeanNegativeLogProbLoss,
    NormalMeanVarianceNegativeLogProbLoss,
)
from curvax.losses.registration import (
    register_categorical_predictive_distribution,
    register_loss,
    register_multi_bernoulli_predictive_distribution,
    register_normal_predictive_distribution,
    register_sigmoid_cross_entropy_loss,
    register_softmax_cross_entropy_loss,
    register_squared_error_loss,
)
from curvax.losses.tag import LossTag
from curvax.maps.accumulators import AccumulationType, Accumulator
from curvax.maps.chunked_vmap import chunked_vmap
from curvax.maps.micro_grad import PerExample, micro_grad
from curvax.maps.micro_vmap import micro_vmap
from curvax.maps.microbatch import microbatch, reshape_batch_axis
from curvax.memory.budget import MemoryBudgetError, available_memory, parse_memory
from curvax.memory.compiled import recorded_plans
from curvax.memory.plan import MemoryPlan, plan_batch_size
from curvax.memory.usage import MemoryUsage, memory_usage
from curvax.optimizer.optax import kfac, scale_by_kfac
from curvax.optimizer.optimizer import Optimizer

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_GRAPH_PATTERNS",
    "AccumulationType",
    "Accumulator",
    "BlockDiagonalCurvature",
    "CategoricalLogitsNegativeLogProbLoss",
    "Conv2DDiagonal",
    "Conv2DEKFAC",
    "Conv2DFull",
    "Conv2DTwoKroneckerFactored",
    "ConvTwoKroneckerFactored",
    "CurvatureBlock",
    "CurvatureEstimator",
    "CurvatureOperator",
    "CurvatureReport",
    "DamagedStoreWarning",
    "DenseDiagonal",
    "DenseEKFAC",
    "DenseFull",
    "DenseTwoKroneckerFactored",
    "Diagonal",
    "DistributionNegativeLogProbLoss",
    "EmbeddingTwoKroneckerFactored",
    "ExplicitExactCurvature",
    "Full",
    "GraphMatcherComparator",
    "GraphPattern",
    "ImplicitExactCurvature",
    "LayerTag",
    "LossFunction",
    "LossTag",
    "MemoryBudgetError",
    "MemoryPlan",
    "MemoryUsage",
    "MultiBernoulliNegativeLogProbLoss",
    "NaiveDiagonal",
    "NaiveFull",
    "NegativeLogProbLoss",
    "NormalMeanNegativeLogProbLoss",
    "NormalMeanVarianceNegativeLogProbLoss",
    "OneHotCategoricalLogitsNegativeLogProbLoss",
    "Optimizer",
    "ParameterRow",
    "PerExample",
    "ProcessedJaxpr",
    "RegistrationError",
    "RegistrationReport",
    "ScaleAndShiftDiagonal",
    "ScaleAndShiftFull",
    "ScaledIdentity",
    "SpectralDensity",
    "Static",
    "TaggedFunction",
    "TwoKroneckerFactored",
    "VerificationReport",
    "WeightedMovingAverage",
    "as_linear_operator",
    "auto_register_tags",
    "available_memory",
    "checkpoint_chunked_scan",
    "checkpointed_scan",
    "chunked_vmap",
    "default_batch_size_extractor",
    "explain_registration",
    "fisher_information",
    "gauss_newton",
    "get_default_eigen_decomposition_threshold",
    "get_default_tag_to_block_ctor",
    "get_max_parallel_elements",
    "hessian",
    "hessian_blocks",
    "hessian_diagonal",
    "hessian_to_pytree",
    "jacobian",
    "jacobian_to_pytree",
    "kfac",
    "layer_statistics",
    "layer_tags_vjp",
    "loss_tags_hvp",
    "loss_tags_jvp",
    "loss_tags_vjp",
    "memory_usage",
    "micro_grad",
    "micro_vmap",
    "microbatch",
    "parse_memory",
    "patches_moments",
    "patches_moments_explicit",
    "plan_batch_size",
    "recorded_plans",
    "register_categorical_predictive_distribution",
    "register_conv",
    "register_conv2d",
    "register_dense",
    "register_embedding",
    "register_generic",
    "register_loss",
    "register_multi_bernoulli_predictive_distribution",
    "register_normal_predictive_distribution",
    "register_scale_and_shift",
    "register_sigmoid_cross_entropy_loss",
    "register_softmax_cross_entropy_loss",
    "register_squared_error_loss",
    "reshape_batch_axis",
    "scale_by_kfac",
    "set_default_eigen_decomposition_threshold",
    "set_default_tag_to_block_ctor",
    "set_max_parallel_elements",
    "sliced_scan",
    "spectral_density",
    "verify_curvature",
]


def __getattr__(name: str) -> object:
    """Import `curvax.kfac_jax` when it is first used; say where the names of kfac_jax are."""
    if name == "kfac_jax":
        return importlib.import_module("curvax.kfac_jax")
    hint = ""
    if not name.startswith("_"):
        path = importlib.import_module("curvax.kfac_jax.import_paths").path_of(name)
        hint = f". kfac_jax's {name!r} is at `{path}`" if path else ""
    message = f"module 'curvax' has no attribute {name!r}{hint}"
    raise AttributeError(message, name=name, obj=sys.modules["curvax"])
