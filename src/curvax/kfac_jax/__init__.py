"""kfac_jax 0.0.8, by its own module layout and names, over curvax."""

from curvax.kfac_jax import (
    layers_and_loss_tags,
    loss_functions,
    patches_second_moment,
    tag_graph_matcher,
    tracer,
    utils,
)
from curvax.kfac_jax.import_paths import (
    install,
)
from curvax.kfac_jax.layers_and_loss_tags import (
    LayerData,
    LayerMetaData,
    LayerTag,
    LossTag,
    register_conv2d,
    register_dense,
    register_generic,
    register_scale_and_shift,
)
from curvax.kfac_jax.loss_functions import (
    CategoricalLogitsNegativeLogProbLoss,
    DistributionNegativeLogProbLoss,
    LossFunction,
    MultiBernoulliNegativeLogProbLoss,
    NegativeLogProbLoss,
    NormalMeanNegativeLogProbLoss,
    NormalMeanVarianceNegativeLogProbLoss,
    OneHotCategoricalLogitsNegativeLogProbLoss,
    register_categorical_predictive_distribution,
    register_multi_bernoulli_predictive_distribution,
    register_normal_predictive_distribution,
    register_sigmoid_cross_entropy_loss,
    register_softmax_cross_entropy_loss,
    register_squared_error_loss,
)
from curvax.kfac_jax.patches_second_moment import (
    patches_moments,
    patches_moments_explicit,
)
from curvax.kfac_jax.tag_graph_matcher import (
    auto_register_tags,
)
from curvax.kfac_jax.tracer import (
    LayerVjpData,
    ProcessedJaxpr,
    layer_tags_vjp,
    loss_tags_hvp,
    loss_tags_jvp,
    loss_tags_vjp,
)

# isort: split
from curvax.kfac_jax import _src as _src  # Last: it gives the modules above another path.

__version__ = "0.0.8"
"""The version of kfac_jax whose names and arguments these are."""

__all__ = [
    "CategoricalLogitsNegativeLogProbLoss",
    "DistributionNegativeLogProbLoss",
    "LayerData",
    "LayerMetaData",
    "LayerTag",
    "LayerVjpData",
    "LossFunction",
    "LossTag",
    "MultiBernoulliNegativeLogProbLoss",
    "NegativeLogProbLoss",
    "NormalMeanNegativeLogProbLoss",
    "NormalMeanVarianceNegativeLogProbLoss",
    "OneHotCategoricalLogitsNegativeLogProbLoss",
    "ProcessedJaxpr",
    "auto_register_tags",
    "install",
    "layer_tags_vjp",
    "layers_and_loss_tags",
    "loss_functions",
    "loss_tags_hvp",
    "loss_tags_jvp",
    "loss_tags_vjp",
    "patches_moments",
    "patches_moments_explicit",
    "patches_second_moment",
    "register_categorical_predictive_distribution",
    "register_conv2d",
    "register_dense",
    "register_generic",
    "register_multi_bernoulli_predictive_distribution",
    "register_normal_predictive_distribution",
    "register_scale_and_shift",
    "register_sigmoid_cross_entropy_loss",
    "register_softmax_cross_entropy_loss",
    "register_squared_error_loss",
    "tag_graph_matcher",
    "tracer",
    "utils",
]
