"""Curvature in JAX, within the memory you have."""

from curvax import _jax as _jax  # First: it refuses a JAX that is too old.

# isort: split
from curvax._tree import Static as Static
from curvax.curvature.batch import default_batch_size_extractor as default_batch_size_extractor
from curvax.curvature.block_diagonal import (
    BlockDiagonalCurvature as BlockDiagonalCurvature,
    CurvatureReport as CurvatureReport,
)
from curvax.curvature.blocks.base import CurvatureBlock as CurvatureBlock
from curvax.curvature.blocks.diagonal import (
    Conv2DDiagonal as Conv2DDiagonal,
    DenseDiagonal as DenseDiagonal,
    Diagonal as Diagonal,
    NaiveDiagonal as NaiveDiagonal,
    ScaleAndShiftDiagonal as ScaleAndShiftDiagonal,
)
from curvax.curvature.blocks.ekfac import Conv2DEKFAC as Conv2DEKFAC, DenseEKFAC as DenseEKFAC
from curvax.curvature.blocks.full import (
    Conv2DFull as Conv2DFull,
    DenseFull as DenseFull,
    Full as Full,
    NaiveFull as NaiveFull,
    ScaleAndShiftFull as ScaleAndShiftFull,
)
from curvax.curvature.blocks.kronecker import (
    Conv2DTwoKroneckerFactored as Conv2DTwoKroneckerFactored,
    ConvTwoKroneckerFactored as ConvTwoKroneckerFactored,
    DenseTwoKroneckerFactored as DenseTwoKroneckerFactored,
    EmbeddingTwoKroneckerFactored as EmbeddingTwoKroneckerFactored,
    TwoKroneckerFactored as TwoKroneckerFactored,
)
from curvax.curvature.blocks.scaled_identity import ScaledIdentity as ScaledIdentity
from curvax.curvature.blocks.settings import (
    get_default_eigen_decomposition_threshold as get_default_eigen_decomposition_threshold,
    get_default_tag_to_block_ctor as get_default_tag_to_block_ctor,
    get_max_parallel_elements as get_max_parallel_elements,
    set_default_eigen_decomposition_threshold as set_default_eigen_decomposition_threshold,
    set_default_tag_to_block_ctor as set_default_tag_to_block_ctor,
    set_max_parallel_elements as set_max_parallel_elements,
)
from curvax.curvature.estimator import CurvatureEstimator as CurvatureEstimator
from curvax.curvature.explicit import ExplicitExactCurvature as ExplicitExactCurvature
from curvax.curvature.implicit import ImplicitExactCurvature as ImplicitExactCurvature
from curvax.curvature.linalg.moving_average import WeightedMovingAverage as WeightedMovingAverage
from curvax.curvature.linear_operator import (
    CurvatureOperator as CurvatureOperator,
    as_linear_operator as as_linear_operator,
)
from curvax.curvature.patches.moments import (
    patches_moments as patches_moments,
    patches_moments_explicit as patches_moments_explicit,
)
from curvax.curvature.spectral_density import (
    SpectralDensity as SpectralDensity,
    spectral_density as spectral_density,
)
from curvax.curvature.verification import (
    VerificationReport as VerificationReport,
    verify_curvature as verify_curvature,
)
from curvax.derivatives.disk.store import DamagedStoreWarning as DamagedStoreWarning
from curvax.derivatives.fisher_information import fisher_information as fisher_information
from curvax.derivatives.gauss_newton import gauss_newton as gauss_newton
from curvax.derivatives.hessian import (
    hessian as hessian,
    hessian_blocks as hessian_blocks,
    hessian_diagonal as hessian_diagonal,
)
from curvax.derivatives.jacobian import jacobian as jacobian
from curvax.derivatives.pytree import (
    hessian_to_pytree as hessian_to_pytree,
    jacobian_to_pytree as jacobian_to_pytree,
)
from curvax.layers.patterns import (
    DEFAULT_GRAPH_PATTERNS as DEFAULT_GRAPH_PATTERNS,
    GraphMatcherComparator as GraphMatcherComparator,
    GraphPattern as GraphPattern,
)
from curvax.layers.registration import (
    RegistrationError as RegistrationError,
    TaggedFunction as TaggedFunction,
    auto_register_tags as auto_register_tags,
)
from curvax.layers.report import (
    ParameterRow as ParameterRow,
    RegistrationReport as RegistrationReport,
    explain_registration as explain_registration,
)
from curvax.layers.tags import (
    LayerTag as LayerTag,
    register_conv as register_conv,
    register_conv2d as register_conv2d,
    register_dense as register_dense,
    register_embedding as register_embedding,
    register_generic as register_generic,
    register_scale_and_shift as register_scale_and_shift,
)
from curvax.layers.tracing.layer_inputs import layer_tags_vjp as layer_tags_vjp
from curvax.layers.tracing.loss_derivatives import (
    loss_tags_hvp as loss_tags_hvp,
    loss_tags_jvp as loss_tags_jvp,
    loss_tags_vjp as loss_tags_vjp,
)
from curvax.layers.tracing.loss_map import ProcessedJaxpr as ProcessedJaxpr
from curvax.layers.tracing.statistics import layer_statistics as layer_statistics
from curvax.loops.checkpointed_scan import (
    checkpoint_chunked_scan as checkpoint_chunked_scan,
    checkpointed_scan as checkpointed_scan,
)
from curvax.loops.sliced_scan import sliced_scan as sliced_scan
from curvax.losses.categorical import (
    CategoricalLogitsNegativeLogProbLoss as CategoricalLogitsNegativeLogProbLoss,
    OneHotCategoricalLogitsNegativeLogProbLoss as OneHotCategoricalLogitsNegativeLogProbLoss,
)
from curvax.losses.function_loss import register_loss as register_loss
from curvax.losses.loss_function import LossFunction as LossFunction
from curvax.losses.multi_bernoulli import (
    MultiBernoulliNegativeLogProbLoss as MultiBernoulliNegativeLogProbLoss,
)
from curvax.losses.negative_log_prob import (
    DistributionNegativeLogProbLoss as DistributionNegativeLogProbLoss,
    NegativeLogProbLoss as NegativeLogProbLoss,
)
from curvax.losses.normal_mean import NormalMeanNegativeLogProbLoss as NormalMeanNegativeLogProbLoss
from curvax.losses.normal_mean_variance import (
    NormalMeanVarianceNegativeLogProbLoss as NormalMeanVarianceNegativeLogProbLoss,
)
from curvax.losses.registration import (
    register_categorical_predictive_distribution as register_categorical_predictive_distribution,
    register_multi_bernoulli_predictive_distribution as register_multi_bernoulli_predictive_distribution,  # noqa: E501
    register_normal_predictive_distribution as register_normal_predictive_distribution,
    register_sigmoid_cross_entropy_loss as register_sigmoid_cross_entropy_loss,
    register_softmax_cross_entropy_loss as register_softmax_cross_entropy_loss,
    register_squared_error_loss as register_squared_error_loss,
)
from curvax.losses.tag import LossTag as LossTag
from curvax.maps.accumulators import (
    AccumulationType as AccumulationType,
    Accumulator as Accumulator,
)
from curvax.maps.chunked_vmap import chunked_vmap as chunked_vmap
from curvax.maps.micro_grad import PerExample as PerExample, micro_grad as micro_grad
from curvax.maps.micro_vmap import micro_vmap as micro_vmap
from curvax.maps.microbatch import (
    microbatch as microbatch,
    reshape_batch_axis as reshape_batch_axis,
)
from curvax.memory.budget import (
    MemoryBudgetError as MemoryBudgetError,
    available_memory as available_memory,
    parse_memory as parse_memory,
)
from curvax.memory.compiled import recorded_plans as recorded_plans
from curvax.memory.plan import MemoryPlan as MemoryPlan, plan_batch_size as plan_batch_size
from curvax.memory.usage import MemoryUsage as MemoryUsage, memory_usage as memory_usage
from curvax.optimizer.optax import kfac as kfac, scale_by_kfac as scale_by_kfac
from curvax.optimizer.optimizer import Optimizer as Optimizer

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
