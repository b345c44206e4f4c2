"""The functions that register the common losses.

Each puts one tag into the program that is being traced and returns the predictions, tagged. The
tag names a class of losses and carries the arrays to make one of; nothing is computed. Two names
for one thing (a loss, or the predictive distribution behind it) are for the reader.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array
from curvax.losses.categorical import (
    CategoricalLogitsNegativeLogProbLoss,
    OneHotCategoricalLogitsNegativeLogProbLoss,
)
from curvax.losses.checks import (
    check_mask,
    check_predictions,
    check_same_shape,
    check_variance,
    check_weight,
)
from curvax.losses.multi_bernoulli import MultiBernoulliNegativeLogProbLoss
from curvax.losses.normal_mean import NormalMeanNegativeLogProbLoss
from curvax.losses.tag import LossTag

__all__ = [
    "register_categorical_predictive_distribution",
    "register_multi_bernoulli_predictive_distribution",
    "register_normal_predictive_distribution",
    "register_sigmoid_cross_entropy_loss",
    "register_softmax_cross_entropy_loss",
    "register_squared_error_loss",
]


normal_mean_tag = LossTag(
    NormalMeanNegativeLogProbLoss, ["mean"], ["targets", "variance", "weight"]
)
multi_bernoulli_tag = LossTag(MultiBernoulliNegativeLogProbLoss, ["logits"], ["targets", "weight"])
categorical_tag = LossTag(
    CategoricalLogitsNegativeLogProbLoss, ["logits"], ["targets", "mask", "weight"]
)
one_hot_categorical_tag = LossTag(
    OneHotCategoricalLogitsNegativeLogProbLoss, ["logits"], ["targets", "mask", "weight"]
)


def register_squared_error_loss(
    prediction: ArrayLike, targets: ArrayLike | None = None, weight: ArrayLike = 1.0
) -> Array:
    """Register the loss `weight * ‖target − prediction‖²`, averaged over the batch.

    If your loss has a factor of 0.5 before the square, pass `weight=0.5`. It is registered as a
    `NormalMeanNegativeLogProbLoss` of variance 0.5, which differs by a constant.

    Arguments:
        prediction: the predictions, examples along the first axis.
        targets: what they are compared with, of the same shape. Only what needs the loss's value
            or the estimation mode 'fisher_empirical' needs them.
        weight: what the loss is multiplied by, a number, or one for each example.

    Returns:
        The predictions, tagged.

    Raises:
        TypeError: if the predictions are not real floating-point, or something else not real.
        ValueError: if the targets have another shape, or the weight is negative or of a wrong
            shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x, y):
        ...     prediction = curvax.register_squared_error_loss(x @ w, y)
        ...     return jnp.mean(jnp.sum((y - prediction) ** 2, axis=1))
        >>> loss(jnp.ones((2, 1)), jnp.ones((3, 2)), jnp.zeros((3, 1)))
        Array(4., dtype=float32)
    """
    return _register_normal(prediction, "prediction", targets, 0.5, weight)


def register_normal_predictive_distribution(
    mean: ArrayLike,
    targets: ArrayLike | None = None,
    variance: ArrayLike = 0.5,
    weight: ArrayLike = 1.0,
) -> Array:
    """Register normal distributions of given variance as what a model predicts.

    That is the loss `weight / (2 * variance) * ‖target − mean‖²`, up to a constant, averaged over
    the batch. For `0.5 * ‖target − mean‖²` pass `variance=1.0`.

    Arguments:
        mean: the predicted means, examples along the first axis.
        targets: what was observed, of the same shape. Only what needs the loss's value or the
            estimation mode 'fisher_empirical' needs them.
        variance: of each entry: a number, or one for each example.
        weight: what the log-probability is multiplied by, a number, or one for each example.

    Returns:
        The means, tagged.

    Raises:
        TypeError: if the means are not real floating-point, or something else not real.
        ValueError: if the targets have another shape, or variance or weight are of a wrong shape
            or sign.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> curvax.register_normal_predictive_distribution(jnp.zeros((2, 1)), variance=1.0)
        Array([[0.],
               [0.]], dtype=float32)
    """
    return _register_normal(mean, "mean", targets, variance, weight)


def register_sigmoid_cross_entropy_loss(
    logits: ArrayLike, targets: ArrayLike | None = None, weight: ArrayLike = 1.0
) -> Array:
    """Register the sigmoid cross-entropy of independent yes-or-no answers, averaged over the batch.

    For one class among several use `register_softmax_cross_entropy_loss`. It is registered as a
    `MultiBernoulliNegativeLogProbLoss`, summed over all axes but the first.

    Arguments:
        logits: the predictions, examples along the first axis.
        targets: zeros and ones, or numbers between, of the same shape. Only what needs the loss's
            value or the estimation mode 'fisher_empirical' needs them.
        weight: what the loss is multiplied by, a number, or one for each example.

    Returns:
        The logits, tagged.

    Raises:
        TypeError: if the logits are not real floating-point, or something else not real.
        ValueError: if the targets have another shape, or the weight is negative or of a wrong
            shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> curvax.register_sigmoid_cross_entropy_loss(jnp.zeros((1, 2)), jnp.array([[0.0, 1.0]]))
        Array([[0., 0.]], dtype=float32)
    """
    return _register_multi_bernoulli(logits, targets, weight)


def register_multi_bernoulli_predictive_distribution(
    logits: ArrayLike, targets: ArrayLike | None = None, weight: ArrayLike = 1.0
) -> Array:
    """Register independent Bernoulli distributions as what a model predicts.

    For one class among several use `register_categorical_predictive_distribution`. It is the same
    as `register_sigmoid_cross_entropy_loss`.

    Arguments:
        logits: the predicted logits, examples along the first axis.
        targets: zeros and ones, or numbers between, of the same shape. Only what needs the loss's
            value or the estimation mode 'fisher_empirical' needs them.
        weight: what the log-probability is multiplied by, a number, or one for each example. This
            is not the same as a temperature.

    Returns:
        The logits, tagged.

    Raises:
        TypeError: if the logits are not real floating-point, or something else not real.
        ValueError: if the targets have another shape, or the weight is negative or of a wrong
            shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> curvax.register_multi_bernoulli_predictive_distribution(jnp.zeros((1, 2)), weight=2.0)
        Array([[0., 0.]], dtype=float32)
    """
    return _register_multi_bernoulli(logits, targets, weight)


def register_softmax_cross_entropy_loss(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    weight: ArrayLike = 1.0,
) -> Array:
    """Register the softmax cross-entropy of one class among several, averaged over the batch.

    For independent yes-or-no answers use `register_sigmoid_cross_entropy_loss`. It is registered as
    a `CategoricalLogitsNegativeLogProbLoss`, or with targets of the logits' shape as a
    `OneHotCategoricalLogitsNegativeLogProbLoss`.

    Arguments:
        logits: the predictions, classes along the last axis.
        targets: integer classes of the shape `logits.shape[:-1]`; or one-hot vectors or
            probabilities, floating-point, of the shape of the logits. Only what needs the loss's
            value or the estimation mode 'fisher_empirical' needs them.
        mask: zeros and ones of the shape `logits.shape[:-1]`. Examples whose mask is zero have the
            constant loss zero.
        weight: what the loss is multiplied by, a number, or one for each example.

    Returns:
        The logits, tagged.

    Raises:
        TypeError: if the logits are not real floating-point, or the targets of a dtype that does
            not go with their shape.
        ValueError: if the targets, the mask or the weight are of a wrong shape, or the weight is
            negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> curvax.register_softmax_cross_entropy_loss(jnp.zeros((2, 2)), jnp.array([0, 1]))
        Array([[0., 0.],
               [0., 0.]], dtype=float32)
    """
    return _register_categorical(logits, targets, mask, weight)


def register_categorical_predictive_distribution(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    weight: ArrayLike = 1.0,
) -> Array:
    """Register categorical distributions as what a model predicts.

    For independent yes-or-no answers use `register_multi_bernoulli_predictive_distribution`. It is
    the same as `register_softmax_cross_entropy_loss`.

    Arguments:
        logits: the predicted logits, classes along the last axis.
        targets: integer classes of the shape `logits.shape[:-1]`; or one-hot vectors or
            probabilities, floating-point, of the shape of the logits. Only what needs the loss's
            value or the estimation mode 'fisher_empirical' needs them.
        mask: zeros and ones of the shape `logits.shape[:-1]`. Examples whose mask is zero have the
            constant log-probability zero.
        weight: what the log-probability is multiplied by, a number, or one for each example. This
            is not the same as a temperature.

    Returns:
        The logits, tagged.

    Raises:
        TypeError: if the logits are not real floating-point, or the targets of a dtype that does
            not go with their shape.
        ValueError: if the targets, the mask or the weight are of a wrong shape, or the weight is
            negative.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> curvax.register_categorical_predictive_distribution(jnp.zeros((1, 2)))
        Array([[0., 0.]], dtype=float32)
    """
    return _register_categorical(logits, targets, mask, weight)


def _register_normal(
    mean: ArrayLike, name: str, targets: ArrayLike | None, variance: ArrayLike, weight: ArrayLike
) -> Array:
    mean = check_predictions(mean, name)
    if targets is not None:
        targets = check_same_shape(targets, mean, name)
    variance = check_variance(variance, mean)
    weight = check_weight(weight, mean)
    return _bind(normal_mean_tag, mean=mean, targets=targets, variance=variance, weight=weight)


def _register_multi_bernoulli(
    logits: ArrayLike, targets: ArrayLike | None, weight: ArrayLike
) -> Array:
    logits = check_predictions(logits, "logits")
    if targets is not None:
        targets = check_same_shape(targets, logits, "logits")
    weight = check_weight(weight, logits)
    return _bind(multi_bernoulli_tag, logits=logits, targets=targets, weight=weight)


def _register_categorical(
    logits: ArrayLike, targets: ArrayLike | None, mask: ArrayLike | None, weight: ArrayLike
) -> Array:
    logits = check_predictions(logits, "logits", min_ndim=1)
    tag = categorical_tag
    if targets is not None:
        targets = jnp.asarray(targets)
        tag = _categorical_tag_for(targets, logits)
    if mask is not None:
        mask = check_mask(mask, logits)
    weight = check_weight(weight, logits)
    return _bind(tag, logits=logits, targets=targets, mask=mask, weight=weight)


def _categorical_tag_for(targets: Array, logits: Array) -> LossTag:
    """Whether targets are classes or one-hot vectors, by their shape."""
    classes, vectors = logits.shape[:-1], logits.shape
    if targets.shape not in (classes, vectors):
        raise ValueError(
            f"{where()}: for logits of shape {logits.shape}, targets are integer classes of shape "
            f"{classes} or one-hot vectors of shape {vectors}, got the shape {targets.shape}."
        )
    if targets.shape == vectors:
        if not jnp.issubdtype(targets.dtype, jnp.floating):
            raise TypeError(
                f"{where()}: targets of the shape of the logits, {vectors}, are one-hot vectors or "
                f"probabilities and must be floating-point, got {targets.dtype}. Convert them with "
                f"targets.astype(logits.dtype), or pass classes of shape {classes}."
            )
        return one_hot_categorical_tag
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"{where()}: targets of shape {classes} are the numbers of classes and must be "
            f"integers, got {targets.dtype}. Convert them with targets.astype(int), or pass "
            f"one-hot vectors of shape {vectors}."
        )
    return categorical_tag


def _bind(tag: LossTag, **arrays: Array | None) -> Array:
    given = {name: x for name, x in arrays.items() if x is not None}
    return tag.bind(*given.values(), args_names=tuple(given))[0]
