"""The functions that register losses.

Each puts one tag into the program that is being traced and returns the tagged predictions. The tag
names a class of losses and carries the arrays of its constructor; it computes nothing. A loss and
the predictive distribution behind it are registered by the same tag; that there are two functions
is for the reader of a model.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
multi_bernoulli_tag = LossTag(
    MultiBernoulliNegativeLogProbLoss, ["logits"], ["targets", "weight", "mask"]
)
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

    The squared norm sums over all axes but the first. If your loss has a factor of 0.5 before the
    square, pass `weight=0.5`; if it is `jnp.mean((prediction - targets) ** 2)` with k outputs per
    example, pass `weight=1 / k`. The loss is registered as a `NormalMeanNegativeLogProbLoss` of
    variance 0.5, which differs from it by a constant.

    Arguments:
        prediction: Predictions, real or complex, with examples along the first axis. A complex
            prediction counts as two real ones, its real and its imaginary part.
        targets: Targets, of the shape of the predictions. Needed only for the value of the loss and
            for the estimation mode 'fisher_empirical'.
        weight: Nonnegative factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Returns:
        The predictions, tagged. Compute the loss from these.

    Raises:
        TypeError: If the predictions are not floating-point, targets of real predictions are
            complex, or the weight is.
        ValueError: If the targets have another shape, or the weight is negative or has a wrong
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
    """Register normal distributions of given variance as the predictions of a model.

    This registers the loss `weight / (2 * variance) * ‖target − mean‖²`, up to a constant, averaged
    over the batch. For `0.5 * ‖target − mean‖²` pass `variance=1.0`.

    Arguments:
        mean: Predicted means, real or complex, with examples along the first axis. A complex mean
            z, such as a log-wavefunction, counts as two real ones, its real and its imaginary part,
            of the given variance each: with `O = dz/dw` the curvature is `Re(O† O) / variance`.
        targets: Targets, of the shape of the means. Needed only for the value of the loss and for
            the estimation mode 'fisher_empirical'.
        variance: Positive variance of each entry: a scalar, or one per example with shape
            `(batch,)`.
        weight: Nonnegative factor of the log-probability: a scalar, or one per example with shape
            `(batch,)`.

    Returns:
        The means, tagged. Compute the loss from these.

    Raises:
        TypeError: If the means are not floating-point, targets of real means are complex, or
            variance or weight are.
        ValueError: If the targets have another shape, or variance or weight have a wrong shape or
            sign.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x, y):
        ...     mean = curvax.register_normal_predictive_distribution(x @ w, y, variance=1.0)
        ...     return 0.5 * jnp.mean(jnp.sum((y - mean) ** 2, axis=1))
        >>> args = jnp.ones((2, 1)), jnp.ones((3, 2)), jnp.zeros((3, 1))
        >>> (registered,), _ = curvax.loss_tags_vjp(loss)(args)
        >>> registered.multiply_ggn((jnp.ones((3, 1)),))[0][:, 0]  # Variance 1: the identity.
        Array([1., 1., 1.], dtype=float32)
    """
    return _register_normal(mean, "mean", targets, variance, weight)


def register_sigmoid_cross_entropy_loss(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    weight: ArrayLike = 1.0,
    *,
    mask: ArrayLike | None = None,
) -> Array:
    """Register the sigmoid cross-entropy of independent binary labels, averaged over the batch.

    The loss is registered as a `MultiBernoulliNegativeLogProbLoss`, summed over all axes but the
    first. For one class among several use `register_softmax_cross_entropy_loss`.

    Arguments:
        logits: Predicted logits, with examples along the first axis.
        targets: Zeros and ones, or numbers between, of the shape of the logits. Needed only for the
            value of the loss and for the estimation mode 'fisher_empirical'.
        weight: Nonnegative factor of the loss: a scalar, or one per example with shape `(batch,)`.
        mask: Zeros and ones for the leading axes of the logits: one entry for each example, with
            shape `(batch,)`, up to one for each label. Where the mask is zero, so are the loss, its
            gradient and its curvature.

    Returns:
        The logits, tagged. Compute the loss from these.

    Raises:
        TypeError: If the logits are not real floating-point, or targets or weight are complex.
        ValueError: If the targets have another shape, the weight is negative or has a wrong shape,
            or the mask has a wrong shape.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x, y):
        ...     logits = curvax.register_sigmoid_cross_entropy_loss(x @ w, y)
        ...     terms = jax.nn.softplus(logits) - y * logits
        ...     return jnp.mean(jnp.sum(terms, axis=1))
        >>> args = jnp.zeros((2, 1)), jnp.ones((3, 2)), jnp.ones((3, 1))
        >>> (registered,), _ = curvax.loss_tags_vjp(loss)(args)
        >>> bool(jnp.isclose(loss(*args), jnp.mean(registered.evaluate())))
        True
    """
    logits = _check_predictions(logits, "logits")
    if targets is not None:
        targets = _check_same_shape(targets, logits, "logits")
    weight = _check_weight(weight, logits)
    if mask is not None:
        mask = _check_mask_of_leading_axes(mask, logits)
    return _bind(multi_bernoulli_tag, logits=logits, targets=targets, weight=weight, mask=mask)


def register_multi_bernoulli_predictive_distribution(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    weight: ArrayLike = 1.0,
    *,
    mask: ArrayLike | None = None,
) -> Array:
    """Register independent Bernoulli distributions as the predictions of a model.

    Equal to `register_sigmoid_cross_entropy_loss`. For one class among several use
    `register_categorical_predictive_distribution`.

    Arguments:
        logits: Predicted logits, with examples along the first axis.
        targets: Zeros and ones, or numbers between, of the shape of the logits. Needed only for the
            value of the loss and for the estimation mode 'fisher_empirical'.
        weight: Nonnegative factor of the log-probability: a scalar, or one per example with shape
            `(batch,)`. This is not a temperature.
        mask: Zeros and ones for the leading axes of the logits: one entry for each example, with
            shape `(batch,)`, up to one for each label. Where the mask is zero, the log-probability
            is the constant zero.

    Returns:
        The logits, tagged. Compute the loss from these.

    Raises:
        TypeError: If the logits are not real floating-point, or targets or weight are complex.
        ValueError: If the targets have another shape, the weight is negative or has a wrong shape,
            or the mask has a wrong shape.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x, y):
        ...     logits = curvax.register_multi_bernoulli_predictive_distribution(x @ w, y)
        ...     return jnp.mean(jax.nn.softplus(logits) - y * logits)
        >>> args = jnp.zeros((2, 1)), jnp.ones((3, 2)), jnp.ones((3, 1))
        >>> (registered,), _ = curvax.loss_tags_vjp(loss)(args)
        >>> registered.dist.probs[:, 0]
        Array([0.5, 0.5, 0.5], dtype=float32)
    """
    return register_sigmoid_cross_entropy_loss(logits, targets, weight, mask=mask)


def register_softmax_cross_entropy_loss(
    logits: ArrayLike,
    targets: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    weight: ArrayLike = 1.0,
) -> Array:
    """Register the softmax cross-entropy of one class among several, averaged over the batch.

    The loss is registered as a `CategoricalLogitsNegativeLogProbLoss` or, with targets of the
    logits' shape, as a `OneHotCategoricalLogitsNegativeLogProbLoss`. For independent binary labels
    use `register_sigmoid_cross_entropy_loss`.

    Arguments:
        logits: Predicted logits, with classes along the last axis.
        targets: Integer classes of shape `logits.shape[:-1]`; or floating-point one-hot vectors or
            probabilities, of the shape of the logits. Needed only for the value of the loss and for
            the estimation mode 'fisher_empirical'.
        mask: Zeros and ones of shape `logits.shape[:-1]`. Where the mask is zero, so are the loss,
            its gradient and its curvature.
        weight: Nonnegative factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Returns:
        The logits, tagged. Compute the loss from these.

    Raises:
        TypeError: If the logits are not real floating-point, or the dtype of the targets does not
            go with their shape.
        ValueError: If targets, mask or weight have a wrong shape, or the weight is negative.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x, y):
        ...     logits = curvax.register_softmax_cross_entropy_loss(x @ w, y)
        ...     return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])
        >>> args = jnp.zeros((2, 5)), jnp.ones((3, 2)), jnp.array([0, 4, 2])
        >>> (registered,), _ = curvax.loss_tags_vjp(loss)(args)
        >>> bool(jnp.isclose(loss(*args), jnp.mean(registered.evaluate())))
        True
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
    """Register categorical distributions as the predictions of a model.

    Equal to `register_softmax_cross_entropy_loss`: it registers the negative log-probability of the
    targets as a `CategoricalLogitsNegativeLogProbLoss` or, with targets of the logits' shape, as a
    `OneHotCategoricalLogitsNegativeLogProbLoss`. For independent binary labels use
    `register_multi_bernoulli_predictive_distribution`.

    Arguments:
        logits: Predicted logits, with classes along the last axis.
        targets: Integer classes of shape `logits.shape[:-1]`; or floating-point one-hot vectors or
            probabilities, of the shape of the logits. Needed only for the value of the loss and for
            the estimation mode 'fisher_empirical'.
        mask: Zeros and ones of shape `logits.shape[:-1]`. Where the mask is zero, the
            log-probability is the constant zero.
        weight: Nonnegative factor of the log-probability: a scalar, or one per example with shape
            `(batch,)`. This is not a temperature.

    Returns:
        The logits, tagged. Compute the loss from these.

    Raises:
        TypeError: If the logits are not real floating-point, or the dtype of the targets does not
            go with their shape.
        ValueError: If targets, mask or weight have a wrong shape, or the weight is negative.

    Examples:
        Curvature can be sampled without targets, so only the training loss reads them.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, x, y):
        ...     logits = curvax.register_categorical_predictive_distribution(x @ w)
        ...     return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])
        >>> args = jnp.array([[0.0, -100.0]]), jnp.ones((3, 1)), jnp.array([0, 0, 0])
        >>> (registered,), _ = curvax.loss_tags_vjp(loss)(args)
        >>> registered.sample(jax.random.key(0))
        Array([0, 0, 0], dtype=int32)
    """
    return register_softmax_cross_entropy_loss(logits, targets, mask, weight)


def register_loss(
    fn: Fun, predictions: ArrayLike, targets: ArrayLike | None = None, weight: ArrayLike = 1.0
) -> Array:
    """Register a user-supplied loss, a function of one example, with its GGN by autodiff.

    The registered loss is `weight * jax.vmap(fn)(predictions, targets)`. Its GGN is the Hessian of
    `fn` in the prediction; `fn` must be convex in the prediction wherever the GGN is computed. The
    loss has no predictive distribution: of the estimation modes, 'ggn_exact', 'ggn_curvature_prop'
    and, with targets, 'fisher_empirical' work.

    The Hessian of each example is held in memory and eigendecomposed, which suits predictions of up
    to a few hundred numbers. For larger ones write a subclass of `LossFunction` that knows a factor
    of its GGN. Define `fn` once and pass the same function each time: each new function object
    gets a new tag, a JAX primitive.

    Arguments:
        fn: A twice differentiable function from one prediction and one target, arrays without the
            batch axis, to a real scalar. Without targets it takes the prediction alone.
        predictions: Predictions, with examples along the first axis.
        targets: Targets of any dtype, with examples along the first axis.
        weight: Nonnegative factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Returns:
        The predictions, tagged. Compute the loss from these.

    Raises:
        TypeError: If the predictions are not real floating-point, or `fn` does not return a real
            scalar.
        ValueError: If there is no batch axis, the targets have another number of examples, or the
            weight is negative or has a wrong shape. Later, when the GGN is computed: if the Hessian
            has a negative eigenvalue.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def log_cosh(prediction, target):
        ...     return jnp.sum(jnp.log(jnp.cosh(prediction - target)))
        >>> def loss(w, x, y):
        ...     predictions = curvax.register_loss(log_cosh, x @ w, y)
        ...     return jnp.mean(jnp.sum(jnp.log(jnp.cosh(predictions - y)), axis=1))
        >>> args = jnp.ones((2, 1)), jnp.ones((3, 2)), 2 * jnp.ones((3, 1))
        >>> (registered,), _ = curvax.loss_tags_vjp(loss)(args)
        >>> registered.multiply_ggn((jnp.ones((3, 1)),))[0][:, 0]  # 1 - tanh(0)²
        Array([1., 1., 1.], dtype=float32)
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
    mean = jnp.asarray(mean)
    is_complex = jnp.issubdtype(mean.dtype, jnp.complexfloating)
    mean = mean if is_complex else _check_predictions(mean, name)
    if targets is not None:
        targets = _check_same_shape(targets, mean, name)
    variance = _check_variance(variance, mean)
    weight = _check_weight(weight, mean)
    if not is_complex:
        return _bind(normal_mean_tag, mean=mean, targets=targets, variance=variance, weight=weight)
    # Two real predictions: with O = dz/dw, their curvature is Re(O* O) / variance.
    arrays = {
        "mean": _real_and_imaginary(mean),
        "targets": None if targets is None else _real_and_imaginary(targets),
    }
    tagged = _bind(normal_mean_tag, num_part_axes=1, **arrays, variance=variance, weight=weight)
    return lax.complex(tagged[..., 0], tagged[..., 1])


def _real_and_imaginary(x: Array) -> Array:
    """Return the parts of complex numbers along a new last axis, so that examples stay first."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


def _categorical_tag_for(targets: Array, logits: Array) -> LossTag:
    """Return the tag for targets that are classes or one-hot vectors, by their shape."""
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
            f"{where()}: targets of shape {classes} are indices of classes and must be "
            f"integers, got {targets.dtype}. Convert them with targets.astype(int), or pass "
            f"one-hot vectors of shape {vectors}."
        )
    return categorical_tag


def _bind(tag: LossTag, *, num_part_axes: int = 0, **arrays: Array | None) -> Array:
    """Tag the arrays that are given.

    Of the last axes of a prediction, `num_part_axes` are parts of a number and were added to the
    user's array.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    names, static = tuple(given), {"num_part_axes": num_part_axes} if num_part_axes else {}
    return tag.bind(*given.values(), args_names=names, **static)[0]


def _check_predictions(x: ArrayLike, name: str, *, min_ndim: int = 0) -> Array:
    """Return predictions as an array; check that they are real floating-point numbers."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{where()}: {name} must be real floating-point numbers, got {array.dtype}. Curvature "
            f"is taken in them; convert them if they are meant to be real. Complex predictions "
            f"have curvature as means of normal distributions: "
            f"curvax.register_normal_predictive_distribution."
        )
    if array.ndim < min_ndim:
        raise ValueError(
            f"{where()}: {name} must have at least {min_ndim} axis, got the shape {array.shape}."
        )
    return array


def _check_same_shape(targets: ArrayLike, predictions: Array, name: str) -> Array:
    """Return targets as an array; check that they have the shape of the argument `name`."""
    array = jnp.asarray(targets)
    if array.shape != predictions.shape:
        raise ValueError(
            f"{where()}: targets must have the shape of {name}, {predictions.shape}, got "
            f"{array.shape}. Reshape or broadcast them first."
        )
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    if is_complex and not jnp.issubdtype(predictions.dtype, jnp.complexfloating):
        raise TypeError(
            f"{where()}: targets must be real numbers where {name} is real, got {array.dtype}."
        )
    return array


def _check_mask(mask: ArrayLike, logits: Array) -> Array:
    """Return a mask as an array; check that it has one entry per example."""
    array, expected = jnp.asarray(mask), logits.shape[:-1]
    if array.shape != expected:
        raise ValueError(
            f"{where()}: the mask has one entry per example, so for logits of shape "
            f"{logits.shape} its shape is {expected}, got {array.shape}."
        )
    return array


def _check_mask_of_leading_axes(mask: ArrayLike, logits: Array) -> Array:
    """Return a mask as an array; check that its axes are the leading axes of the logits."""
    array = jnp.asarray(mask)
    least = min(1, logits.ndim)
    if array.ndim < least or array.shape != logits.shape[: array.ndim]:
        raise ValueError(
            f"{where()}: the mask has the leading axes of the logits, from one entry per example, "
            f"{logits.shape[:least]}, to one per label, {logits.shape}, got the shape "
            f"{array.shape}."
        )
    return array


def _check_weight(weight: ArrayLike, predictions: Array) -> Array:
    """Return a weight as an array; check its shape, and that it is not negative."""
    array = _scalar_or_per_example(weight, "weight", predictions)
    if _is_known(weight) and np.any(np.less(weight, 0)):
        raise ValueError(
            f"{where()}: weight must not be negative, got {weight!r}: curvature would also be "
            f"negative. Put the sign into the loss itself."
        )
    return array


def _check_variance(variance: ArrayLike, predictions: Array) -> Array:
    """Return a variance as an array; check its shape, and that it is positive."""
    array = _scalar_or_per_example(variance, "variance", predictions)
    if _is_known(variance) and np.any(np.less_equal(variance, 0)):
        raise ValueError(f"{where()}: variance must be positive, got {variance!r}.")
    return array


def _is_known(x: ArrayLike) -> bool:
    """Return whether values can be read without waiting for a device."""
    return not isinstance(x, jax.Array)


def _scalar_or_per_example(x: ArrayLike, name: str, predictions: Array) -> Array:
    array = jnp.asarray(x)
    if array.shape not in ((), predictions.shape[:1]):
        raise ValueError(
            f"{where()}: {name} must be a scalar, or have one entry per example and the shape "
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
            f"over the entries of a prediction inside fn; fn does not see the batch axis."
        )
