"""The functions that register losses.

Each puts one tag into the program that is being traced and returns the predictions, tagged. The
tag names a class of losses and carries the arrays to make one of; nothing is computed. Two names
for one thing (a loss, or the predictive distribution behind it) are for the reader.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array, Fun
from curvax.losses.categorical import (
    CategoricalLogitsNegativeLogProbLoss,
    OneHotCategoricalLogitsNegativeLogProbLoss,
)
from curvax.losses.function_loss import tag_of
from curvax.losses.loss_function import widened
from curvax.losses.multi_bernoulli import MultiBernoulliNegativeLogProbLoss
from curvax.losses.normal import NormalMeanNegativeLogProbLoss
from curvax.losses.tag import LossTag

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
    logits = _check_predictions(logits, "logits")
    if targets is not None:
        targets = _check_same_shape(targets, logits, "logits")
    weight = _check_weight(weight, logits)
    return _bind(multi_bernoulli_tag, logits=logits, targets=targets, weight=weight)


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
    return register_sigmoid_cross_entropy_loss(logits, targets, weight)


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
    logits = _check_predictions(logits, "logits", min_ndim=1)
    tag = categorical_tag
    if targets is not None:
        targets = jnp.asarray(targets)
        tag = _categorical_tag_for(targets, logits)
    if mask is not None:
        mask = _check_mask(mask, logits)
    weight = _check_weight(weight, logits)
    return _bind(tag, logits=logits, targets=targets, mask=mask, weight=weight)


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
    return register_softmax_cross_entropy_loss(logits, targets, mask, weight)


def register_loss(
    fn: Fun, predictions: ArrayLike, targets: ArrayLike | None = None, weight: ArrayLike = 1.0
) -> Array:
    """Register any loss, given as a function of one example, with its GGN by autodiff.

    The loss that is registered is `weight * jax.vmap(fn)(predictions, targets)`. Its GGN is the
    Hessian of `fn` in the prediction, and `fn` must be convex in it wherever the GGN is asked for.
    It has no predictive distribution: of the estimation modes, 'ggn_exact', 'ggn_curvature_prop'
    and, with targets, 'fisher_empirical' work.

    The Hessian is held for each example and decomposed, which is meant for predictions of up to
    some hundred numbers. For others write a subclass of `LossFunction` that knows its factor.
    Define `fn` once and pass the same function each time: for each new function object a small
    new operation is made.

    Arguments:
        fn: a twice differentiable function of one prediction and one target, arrays without the
            batch axis, to a real scalar. Without targets it takes the prediction alone.
        predictions: the predictions, examples along the first axis.
        targets: the targets, examples along the first axis, of any dtype.
        weight: what the loss is multiplied by, a number, or one for each example.

    Returns:
        The predictions, tagged.

    Raises:
        TypeError: if the predictions are not real floating-point, or `fn` returns no real scalar.
        ValueError: if there is no batch axis, the targets have another number of examples, or the
            weight is negative or of the wrong shape. Later, when the GGN is asked for: if the
            Hessian has a negative eigenvalue.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def log_cosh(prediction, target):
        ...     return jnp.sum(jnp.log(jnp.cosh(prediction - target)))
        >>> curvax.register_loss(log_cosh, jnp.zeros((2, 1)), jnp.ones((2, 1)))
        Array([[0.],
               [0.]], dtype=float32)
    """
    predictions = _check_predictions(predictions, "predictions", min_ndim=1)
    arrays = {"predictions": predictions}
    if targets is not None:
        arrays["targets"] = jnp.asarray(targets)
        if arrays["targets"].shape[:1] != predictions.shape[:1]:
            raise ValueError(
                f"{where()}: predictions and targets have their examples along the first axis, but "
                f"their shapes are {predictions.shape} and {arrays['targets'].shape}."
            )
    _check_function(fn, arrays)
    arrays["weight"] = _check_weight(weight, predictions)
    return tag_of(fn).bind(*arrays.values(), args_names=tuple(arrays))[0]


def _register_normal(
    mean: ArrayLike, name: str, targets: ArrayLike | None, variance: ArrayLike, weight: ArrayLike
) -> Array:
    mean = _check_predictions(mean, name)
    if targets is not None:
        targets = _check_same_shape(targets, mean, name)
    variance = _check_variance(variance, mean)
    weight = _check_weight(weight, mean)
    return _bind(normal_mean_tag, mean=mean, targets=targets, variance=variance, weight=weight)


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


def _check_predictions(x: ArrayLike, name: str, *, min_ndim: int = 0) -> Array:
    """Predictions as an array of real floating-point numbers."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{where()}: {name} must be real floating-point numbers, got {array.dtype}. Curvature "
            f"is taken in them; convert them if they are meant to be real."
        )
    if array.ndim < min_ndim:
        raise ValueError(
            f"{where()}: {name} must have at least {min_ndim} axis, got the shape {array.shape}."
        )
    return array


def _check_same_shape(targets: ArrayLike, predictions: Array, name: str) -> Array:
    """Targets as an array of the shape of the predictions, which `name` calls."""
    array = jnp.asarray(targets)
    if array.shape != predictions.shape:
        raise ValueError(
            f"{where()}: targets must have the shape of {name}, {predictions.shape}, got "
            f"{array.shape}. Reshape or broadcast them first."
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{where()}: targets must be real numbers, got {array.dtype}.")
    return array


def _check_mask(mask: ArrayLike, logits: Array) -> Array:
    """A mask as an array of one number for each example."""
    array, expected = jnp.asarray(mask), logits.shape[:-1]
    if array.shape != expected:
        raise ValueError(
            f"{where()}: a mask says of each example whether it counts, so for logits of shape "
            f"{logits.shape} its shape is {expected}, got {array.shape}."
        )
    return array


def _check_weight(weight: ArrayLike, predictions: Array) -> Array:
    """A weight as an array: a scalar, or one number for each example; not negative."""
    array = _of_examples(weight, "weight", predictions)
    if _is_known(weight) and np.any(np.less(weight, 0)):
        raise ValueError(
            f"{where()}: weight must not be negative, got {weight!r}: curvature would be negative "
            f"too. Put the sign into the loss itself."
        )
    return array


def _check_variance(variance: ArrayLike, predictions: Array) -> Array:
    """A variance as an array: a scalar, or one number for each example; positive."""
    array = _of_examples(variance, "variance", predictions)
    if _is_known(variance) and np.any(np.less_equal(variance, 0)):
        raise ValueError(f"{where()}: variance must be positive, got {variance!r}.")
    return array


def _is_known(x: Any) -> bool:
    """Whether the numbers are at hand, without waiting for a device."""
    return not isinstance(x, jax.Array)


def _of_examples(x: ArrayLike, name: str, predictions: Array) -> Array:
    array = jnp.asarray(x)
    if array.shape not in ((), predictions.shape[:1]):
        raise ValueError(
            f"{where()}: {name} must be a number, or one for each example in an array of shape "
            f"{predictions.shape[:1]}, got the shape {array.shape}."
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{where()}: {name} must be real, got {array.dtype}.")
    return array


def _check_function(fn: Fun, arrays: dict[str, Array]) -> None:
    wide = map(widened, arrays.values())
    one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in wide]
    returned = jax.eval_shape(lambda *example: fn(*example), *one)
    found = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(returned)]
    is_scalar = isinstance(returned, jax.ShapeDtypeStruct) and returned.shape == ()
    if not is_scalar or not jnp.issubdtype(returned.dtype, jnp.floating):
        raise TypeError(
            f"{where()}: fn takes one example and must return a real floating-point scalar. For "
            f"arrays of the shapes {[x.shape for x in one]} it returned {', '.join(found)}. Sum "
            f"over the entries of a prediction inside of fn; the batch axis is not there."
        )
