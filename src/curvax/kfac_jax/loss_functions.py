"""kfac_jax's `loss_functions`: curvax's losses as pytrees, with kfac_jax's arguments.

Registered losses are curvax's; `of_kfac_jax` makes one of these classes from a registered loss, as
`tracer` returns them.
"""

import abc
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.kfac_jax.utils.types import DType, Numeric, PRNGKey, Shape
from curvax.losses import (
    categorical,
    loss_function,
    multi_bernoulli,
    normal,
    registration,
)
from curvax.losses.tag import LossTag

LossFunctionInputs: TypeAlias = tuple[Array, ...]

__all__ = [
    "CategoricalLogitsNegativeLogProbLoss",
    "DType",
    "DistributionNegativeLogProbLoss",
    "LossFunction",
    "LossFunctionInputs",
    "MultiBernoulliNegativeLogProbLoss",
    "NaturalParamsNegativeLogProbLoss",
    "NegativeLogProbLoss",
    "NormalMeanNegativeLogProbLoss",
    "NormalMeanVarianceNegativeLogProbLoss",
    "Numeric",
    "OneHotCategoricalLogitsNegativeLogProbLoss",
    "PRNGKey",
    "Shape",
    "filter_none",
    "insert_slice_in_zeros",
    "of_kfac_jax",
    "register_categorical_predictive_distribution",
    "register_multi_bernoulli_predictive_distribution",
    "register_normal_predictive_distribution",
    "register_sigmoid_cross_entropy_loss",
    "register_softmax_cross_entropy_loss",
    "register_squared_error_loss",
]


class LossFunction(loss_function.LossFunction, abc.ABC):
    """The loss of a batch of predictions, with its gradient and curvature; a pytree.

    Equal to `curvax.LossFunction`, except that it is a pytree whose children are
    `parameter_dependants` and `parameter_independants`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unflatten: Any = cls.tree_unflatten
        jax.tree_util.register_pytree_node(cls, lambda loss: loss.tree_flatten(), unflatten)

    @property
    def dtype(self) -> DType:
        """The dtype of the first prediction."""
        return self.parameter_dependants[0].dtype

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Return all arrays of the loss, and what else it is made from."""
        return (*self.parameter_dependants, *self.parameter_independants), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> "LossFunction":
        """Return the loss with these arrays."""
        del aux
        return cls(*children)


class NegativeLogProbLoss(loss_function.NegativeLogProbLoss, LossFunction):
    """A loss that is the negative log-probability of its targets."""


class NaturalParamsNegativeLogProbLoss(NegativeLogProbLoss):
    """A negative log-probability in natural parameters, whose GGN is the Fisher matrix."""


class DistributionNegativeLogProbLoss(
    loss_function.DistributionNegativeLogProbLoss, NegativeLogProbLoss
):
    """A negative log-probability that has its predicted distribution as an object, `dist`."""


class _Named(LossFunction):
    """A loss whose arrays, optional ones among them, and other settings have names."""

    array_names: tuple[str, ...] = ()
    static_names: tuple[str, ...] = ()

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Return the arrays that there are, and the names of these and all settings."""
        arrays = {name: getattr(self, name) for name in self.array_names}
        given = {name: x for name, x in arrays.items() if x is not None}
        settings = tuple((name, getattr(self, name)) for name in self.static_names)
        return tuple(given.values()), (tuple(given), settings)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Sequence[Any]) -> "_Named":
        """Return the loss with these arrays."""
        names, settings = aux
        given = {**dict(zip(names, children, strict=True)), **dict(settings)}
        # JAX also makes pytrees of other things than arrays, which a constructor would reject.
        made = cls.__new__(cls)
        for name in (*cls.array_names, *cls.static_names):
            setattr(made, f"_{name}", given.get(name))
        return made


class NormalMeanNegativeLogProbLoss(
    normal.NormalMeanNegativeLogProbLoss,
    _Named,
    DistributionNegativeLogProbLoss,
    NaturalParamsNegativeLogProbLoss,
):
    """The negative log-density of a normal distribution of given variance.

    Arguments:
        mean: Predictions, with examples along the first axis.
        targets: Targets, of the shape of the predictions.
        variance: Variance of each entry.
        weight: Factor of the loss.
        normalize_log_prob: Whether to include the constant that makes it a log-density.

    Examples:
        >>> loss = NormalMeanNegativeLogProbLoss(
        ...     jnp.zeros((1, 2)), jnp.ones((1, 2)), normalize_log_prob=False
        ... )
        >>> loss.evaluate()  # ‖target − mean‖² / (2 variance)
        Array([2.], dtype=float32)
    """

    array_names = ("mean", "targets", "variance", "weight")
    static_names = ("normalize_log_prob",)

    def __init__(
        self,
        mean: Array,
        targets: ArrayLike | None = None,
        variance: ArrayLike = 0.5,
        weight: ArrayLike = 1.0,
        normalize_log_prob: bool = True,
    ) -> None:
        super().__init__(mean, targets, variance, weight)
        self._normalize_log_prob = normalize_log_prob

    @property
    def mean(self) -> Array:
        """The predictions."""
        return self._mean

    @property
    def normalize_log_prob(self) -> bool:
        """Whether the constant is included that makes it a log-density."""
        return self._normalize_log_prob

    def copy_with_different_inputs(
        self, parameter_dependants: Sequence[Array]
    ) -> "NormalMeanNegativeLogProbLoss":
        """Return the same loss of another mean."""
        (mean,) = self.checked_inputs(parameter_dependants)
        return type(self)(
            mean, self._targets, self._variance, self._weight, self._normalize_log_prob
        )

    def evaluate_unweighted(self, targets: ArrayLike | None) -> Array:
        """Compute the negative log-density of each example's target, without the weight."""
        value = super().evaluate_unweighted(targets)
        return value if self._normalize_log_prob else value + self.dist.log_prob(self._mean)


class UnnormalizedNormalMeanLoss(NormalMeanNegativeLogProbLoss):
    """The same without the constant, with arrays as its only arguments, as a tag has them."""

    def __init__(
        self,
        mean: Array,
        targets: ArrayLike | None = None,
        variance: ArrayLike = 0.5,
        weight: ArrayLike = 1.0,
        normalize_log_prob: bool = False,
    ) -> None:
        super().__init__(mean, targets, variance, weight, normalize_log_prob)


class NormalMeanVarianceNegativeLogProbLoss(
    normal.NormalMeanVarianceNegativeLogProbLoss, _Named, DistributionNegativeLogProbLoss
):
    """The negative log-density of a normal distribution, as a function of mean and variance."""

    array_names = ("mean", "variance", "targets", "weight")

    @property
    def mean(self) -> Array:
        """The predicted means."""
        return self._mean

    @property
    def variance(self) -> Array:
        """The predicted variances."""
        return self._variance


class MultiBernoulliNegativeLogProbLoss(
    multi_bernoulli.MultiBernoulliNegativeLogProbLoss,
    _Named,
    DistributionNegativeLogProbLoss,
    NaturalParamsNegativeLogProbLoss,
):
    """The negative log-probability of independent Bernoulli variables.

    Equal to `curvax.MultiBernoulliNegativeLogProbLoss`, except that `evaluate` returns the loss of
    each variable, not of each example.
    """

    array_names = ("logits", "targets", "weight", "mask")

    @property
    def logits(self) -> Array:
        """The predictions."""
        return self._logits

    def evaluate_unweighted(self, targets: ArrayLike | None) -> Array:
        """Compute the negative log-probability of each variable, without the weight."""
        targets = jnp.asarray(loss_function.given_targets(self, targets))
        kept = lambda x: loss_function.where_kept(self._mask, x)
        terms = type(self)(kept(self._logits)).dist.log_prob_of_each(kept(targets))
        return -kept(terms).astype(self._logits.dtype)


class CategoricalLogitsNegativeLogProbLoss(
    categorical.CategoricalLogitsNegativeLogProbLoss,
    _Named,
    DistributionNegativeLogProbLoss,
    NaturalParamsNegativeLogProbLoss,
):
    """The negative log-probability of a class, as a function of the logits of all classes."""

    array_names = ("logits", "targets", "mask", "weight")

    @property
    def logits(self) -> Array:
        """The predictions."""
        return self._logits


class OneHotCategoricalLogitsNegativeLogProbLoss(
    categorical.OneHotCategoricalLogitsNegativeLogProbLoss, CategoricalLogitsNegativeLogProbLoss
):
    """Softmax cross-entropy with targets that are one-hot vectors or probabilities."""


_CLASSES: dict[type[Any], type[_Named]] = {
    normal.NormalMeanNegativeLogProbLoss: NormalMeanNegativeLogProbLoss,
    UnnormalizedNormalMeanLoss: NormalMeanNegativeLogProbLoss,
    normal.NormalMeanVarianceNegativeLogProbLoss: NormalMeanVarianceNegativeLogProbLoss,
    multi_bernoulli.MultiBernoulliNegativeLogProbLoss: MultiBernoulliNegativeLogProbLoss,
    categorical.CategoricalLogitsNegativeLogProbLoss: CategoricalLogitsNegativeLogProbLoss,
    categorical.OneHotCategoricalLogitsNegativeLogProbLoss: (
        OneHotCategoricalLogitsNegativeLogProbLoss
    ),
}


def of_kfac_jax(loss: Any) -> Any:
    """Return a loss of curvax as one of kfac_jax's class; any other loss as it is."""
    cls = _CLASSES.get(type(loss))
    if cls is None:
        return loss
    names = (*cls.array_names, *cls.static_names)
    arrays = {name: getattr(loss, f"_{name}", None) for name in names}
    return cls(**{name: x for name, x in arrays.items() if x is not None})


# Registration. curvax's functions return the tagged predictions, kfac_jax's return None: what is
# returned here may be ignored, unless a gradient inside `jit`, `checkpoint` or `scan` is traced.


register_squared_error_loss = registration.register_squared_error_loss
register_sigmoid_cross_entropy_loss = registration.register_sigmoid_cross_entropy_loss
register_softmax_cross_entropy_loss = registration.register_softmax_cross_entropy_loss
register_categorical_predictive_distribution = (
    registration.register_categorical_predictive_distribution
)
register_multi_bernoulli_predictive_distribution = (
    registration.register_multi_bernoulli_predictive_distribution
)

_unnormalized_tag = LossTag(UnnormalizedNormalMeanLoss, ["mean"], ["targets", "variance", "weight"])


def register_normal_predictive_distribution(
    mean: Array,
    targets: Array | None = None,
    variance: ArrayLike = 0.5,
    weight: ArrayLike = 1.0,
    normalize_log_prob: bool = True,
) -> Array:
    """Register normal distributions of given variance as the predictions of a model.

    Arguments:
        mean: Predicted means, real or complex, with examples along the first axis.
        targets: Targets, of the shape of the means.
        variance: Positive variance of each entry.
        weight: Nonnegative factor of the log-probability.
        normalize_log_prob: Whether the value of the loss includes the constant that makes it a
            log-density. Neither gradient nor curvature depend on it.

    Returns:
        The means, tagged.

    Raises:
        NotImplementedError: If `normalize_log_prob` is False for complex means.
    """
    if normalize_log_prob:
        return registration.register_normal_predictive_distribution(mean, targets, variance, weight)
    mean = jnp.asarray(mean)
    if jnp.issubdtype(mean.dtype, jnp.complexfloating):
        raise NotImplementedError(
            "curvax.kfac_jax.register_normal_predictive_distribution: complex means are registered "
            "with normalize_log_prob=True alone. Neither gradient nor curvature depend on it."
        )
    arrays = {"mean": mean, "targets": targets, "variance": variance, "weight": weight}
    given = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
    return _unnormalized_tag.bind(*given.values(), args_names=tuple(given))[0]


def filter_none(**kwargs: Numeric | None) -> tuple[tuple[Numeric, ...], tuple[str, ...]]:
    """Return the arguments that are not None, and their names.

    Examples:
        >>> filter_none(a=1, b=None, c=2)
        ((1, 2), ('a', 'c'))
    """
    given = {name: x for name, x in kwargs.items() if x is not None}
    return tuple(given.values()), tuple(given)


def insert_slice_in_zeros(
    slice_to_insert: Array, zeros_shape: Sequence[int], position: Sequence[int]
) -> Array:
    """Return zeros with a slice in them.

    Arguments:
        slice_to_insert: The slice: along each axis as long as the zeros, or of length one.
        zeros_shape: Shape of the result.
        position: Index of the slice along each axis.

    Examples:
        >>> insert_slice_in_zeros(jnp.ones((2, 1)), (2, 3), (0, 1))
        Array([[0., 1., 0.],
               [0., 1., 0.]], dtype=float32)
    """
    index = tuple(
        slice(start, start + size)
        for start, size in zip(position, slice_to_insert.shape, strict=True)
    )
    return jnp.zeros(zeros_shape, slice_to_insert.dtype).at[index].set(slice_to_insert)
