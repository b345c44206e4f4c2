"""Losses: their gradients, their Fisher and Gauss-Newton matrices, and what registers them.

A loss is registered where a model computes it, by the function for its kind or by `register_loss`,
and is found there by whoever needs its curvature.
"""

from curvax.losses._categorical import (
    CategoricalLogitsNegativeLogProbLoss as CategoricalLogitsNegativeLogProbLoss,
    OneHotCategoricalLogitsNegativeLogProbLoss as OneHotCategoricalLogitsNegativeLogProbLoss,
)
from curvax.losses._function_loss import register_loss as register_loss
from curvax.losses._loss_function import LossFunction as LossFunction
from curvax.losses._multi_bernoulli import (
    MultiBernoulliNegativeLogProbLoss as MultiBernoulliNegativeLogProbLoss,
)
from curvax.losses._negative_log_prob import (
    DistributionNegativeLogProbLoss as DistributionNegativeLogProbLoss,
    NegativeLogProbLoss as NegativeLogProbLoss,
)
from curvax.losses._normal_mean import (
    NormalMeanNegativeLogProbLoss as NormalMeanNegativeLogProbLoss,
)
from curvax.losses._normal_mean_variance import (
    NormalMeanVarianceNegativeLogProbLoss as NormalMeanVarianceNegativeLogProbLoss,
)
from curvax.losses._register import (
    register_categorical_predictive_distribution as register_categorical_predictive_distribution,
    register_multi_bernoulli_predictive_distribution as register_multi_bernoulli_predictive_distribution,  # noqa: E501
    register_normal_predictive_distribution as register_normal_predictive_distribution,
    register_sigmoid_cross_entropy_loss as register_sigmoid_cross_entropy_loss,
    register_softmax_cross_entropy_loss as register_softmax_cross_entropy_loss,
    register_squared_error_loss as register_squared_error_loss,
)
