"""Curvature in JAX, within the memory you have.

The whole public API is on this page; everything else is private. `__init__.py` reads it from here.
"""

from curvax._tree import Static as Static
from curvax.batching import (
    AccumulationType as AccumulationType,
    Accumulator as Accumulator,
    PerExample as PerExample,
    chunked_vmap as chunked_vmap,
    micro_grad as micro_grad,
    micro_vmap as micro_vmap,
    microbatch as microbatch,
    reshape_batch_axis as reshape_batch_axis,
)
from curvax.blocks import (
    Conv2DDiagonal as Conv2DDiagonal,
    Conv2DEKFAC as Conv2DEKFAC,
    Conv2DFull as Conv2DFull,
    Conv2DTwoKroneckerFactored as Conv2DTwoKroneckerFactored,
    ConvTwoKroneckerFactored as ConvTwoKroneckerFactored,
    CurvatureBlock as CurvatureBlock,
    DenseDiagonal as DenseDiagonal,
    DenseEKFAC as DenseEKFAC,
    DenseFull as DenseFull,
    DenseTwoKroneckerFactored as DenseTwoKroneckerFactored,
    Diagonal as Diagonal,
    EmbeddingTwoKroneckerFactored as EmbeddingTwoKroneckerFactored,
    Full as Full,
    NaiveDiagonal as NaiveDiagonal,
    NaiveFull as NaiveFull,
    ScaleAndShiftDiagonal as ScaleAndShiftDiagonal,
    ScaleAndShiftFull as ScaleAndShiftFull,
    ScaledIdentity as ScaledIdentity,
    TwoKroneckerFactored as TwoKroneckerFactored,
    get_default_eigen_decomposition_threshold as get_default_eigen_decomposition_threshold,
    get_default_tag_to_block_ctor as get_default_tag_to_block_ctor,
    get_max_parallel_elements as get_max_parallel_elements,
    set_default_eigen_decomposition_threshold as set_default_eigen_decomposition_threshold,
    set_default_tag_to_block_ctor as set_default_tag_to_block_ctor,
    set_max_parallel_elements as set_max_parallel_elements,
)
from curvax.conv import (
    patches_moments as patches_moments,
    patches_moments_explicit as patches_moments_explicit,
)
from curvax.curvature import (
    BlockDiagonalCurvature as BlockDiagonalCurvature,
    CurvatureEstimator as CurvatureEstimator,
    CurvatureOperator as CurvatureOperator,
    CurvatureReport as CurvatureReport,
    ExplicitExactCurvature as ExplicitExactCurvature,
    ImplicitExactCurvature as ImplicitExactCurvature,
    SpectralDensity as SpectralDensity,
    VerificationReport as VerificationReport,
    as_linear_operator as as_linear_operator,
    default_batch_size_extractor as default_batch_size_extractor,
    spectral_density as spectral_density,
    verify_curvature as verify_curvature,
)
from curvax.diffops import (
    DamagedStoreWarning as DamagedStoreWarning,
    fisher_information as fisher_information,
    gauss_newton as gauss_newton,
    hessian as hessian,
    hessian_blocks as hessian_blocks,
    hessian_diagonal as hessian_diagonal,
    hessian_to_pytree as hessian_to_pytree,
    jacobian as jacobian,
    jacobian_to_pytree as jacobian_to_pytree,
)
from curvax.graph import (
    DEFAULT_GRAPH_PATTERNS as DEFAULT_GRAPH_PATTERNS,
    GraphMatcherComparator as GraphMatcherComparator,
    GraphPattern as GraphPattern,
    ParameterRow as ParameterRow,
    RegistrationError as RegistrationError,
    RegistrationReport as RegistrationReport,
    TaggedFunction as TaggedFunction,
    auto_register_tags as auto_register_tags,
    explain_registration as explain_registration,
)
from curvax.linalg import WeightedMovingAverage as WeightedMovingAverage
from curvax.loops import (
    checkpoint_chunked_scan as checkpoint_chunked_scan,
    checkpointed_scan as checkpointed_scan,
    sliced_scan as sliced_scan,
)
from curvax.losses import (
    CategoricalLogitsNegativeLogProbLoss as CategoricalLogitsNegativeLogProbLoss,
    DistributionNegativeLogProbLoss as DistributionNegativeLogProbLoss,
    LossFunction as LossFunction,
    MultiBernoulliNegativeLogProbLoss as MultiBernoulliNegativeLogProbLoss,
    NegativeLogProbLoss as NegativeLogProbLoss,
    NormalMeanNegativeLogProbLoss as NormalMeanNegativeLogProbLoss,
    NormalMeanVarianceNegativeLogProbLoss as NormalMeanVarianceNegativeLogProbLoss,
    OneHotCategoricalLogitsNegativeLogProbLoss as OneHotCategoricalLogitsNegativeLogProbLoss,
    register_categorical_predictive_distribution as register_categorical_predictive_distribution,
    register_loss as register_loss,
    register_multi_bernoulli_predictive_distribution as register_multi_bernoulli_predictive_distribution,  # noqa: E501
    register_normal_predictive_distribution as register_normal_predictive_distribution,
    register_sigmoid_cross_entropy_loss as register_sigmoid_cross_entropy_loss,
    register_softmax_cross_entropy_loss as register_softmax_cross_entropy_loss,
    register_squared_error_loss as register_squared_error_loss,
)
from curvax.memory import (
    MemoryBudgetError as MemoryBudgetError,
    MemoryPlan as MemoryPlan,
    MemoryUsage as MemoryUsage,
    available_memory as available_memory,
    memory_usage as memory_usage,
    parse_memory as parse_memory,
    plan_batch_size as plan_batch_size,
    recorded_plans as recorded_plans,
)
from curvax.optimizer import (
    Optimizer as Optimizer,
    kfac as kfac,
    scale_by_kfac as scale_by_kfac,
)
from curvax.tags import (
    LayerTag as LayerTag,
    LossTag as LossTag,
    register_conv as register_conv,
    register_conv2d as register_conv2d,
    register_dense as register_dense,
    register_embedding as register_embedding,
    register_generic as register_generic,
    register_scale_and_shift as register_scale_and_shift,
)
from curvax.tracing import (
    ProcessedJaxpr as ProcessedJaxpr,
    layer_tags_vjp as layer_tags_vjp,
    loss_tags_hvp as loss_tags_hvp,
    loss_tags_jvp as loss_tags_jvp,
    loss_tags_vjp as loss_tags_vjp,
)
