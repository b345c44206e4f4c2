"""Losses of normal distributions: with given variance (squared error), or with predicted variance.

The Fisher matrix in (mean, variance) is diagonal, with entries `1 / variance` and
`1 / (2 variance²)`.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, at_least_single
from curvax.losses.distributions import Normal
from curvax.losses.loss_function import (
    DistributionNegativeLogProbLoss,
    Shape,
    WithTargets,
    columns,
    over_examples,
    widened,
)


class NormalMeanNegativeLogProbLoss(WithTargets, DistributionNegativeLogProbLoss):
    """The negative log-density of a normal distribution of given variance, as a function of mean.

    For one example that is `‖target − mean‖² / (2 variance) + n/2 log(2π variance)`, where n is the
    number of entries. The Fisher matrix is `I / variance`.

    Arguments:
        mean: Predictions, with examples along the first axis.
        targets: Targets, of the shape of the predictions.
        variance: Variance of each entry: a scalar, or one per example with shape `(batch,)`.
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.NormalMeanNegativeLogProbLoss(jnp.zeros((1, 2)), jnp.ones((1, 2)))
        >>> loss.grad_of_evaluate(None, "regular")
        (Array([[-2., -2.]], dtype=float32),)
    """

    def __init__(
        self,
        mean: Array,
        targets: ArrayLike | None = None,
        variance: ArrayLike = 0.5,
        weight: ArrayLike = 1.0,
    ) -> None:
        super().__init__(targets, weight)
        self._mean = mean
        self._variance = variance

    @property
    def variance(self) -> ArrayLike:
        """The variance of each entry."""
        return self._variance

    def _further_independants(self) -> tuple[ArrayLike, ...]:
        return (self._variance,)

    @property
    def dist(self) -> Normal:
        """The normal distribution."""
        return Normal(self._mean, self._variance)

    @property
    def params(self) -> tuple[Array]:
        """The mean."""
        return (self._mean,)

    def copy_with_different_inputs(
        self, parameter_dependants: Sequence[Array]
    ) -> "NormalMeanNegativeLogProbLoss":
        """Return the same loss of another mean.

        Arguments:
            parameter_dependants: A sequence of one array, the mean.

        Returns:
            A loss with the same targets, variance and weight.

        Raises:
            ValueError: If there is not exactly one array.
        """
        (mean,) = self.checked_inputs(parameter_dependants)
        return type(self)(mean, self._targets, self._variance, self._weight)

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array]:
        """Divide a vector by the variance."""
        (x,) = vector
        return (x / over_examples(self._variance, x),)

    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array]:
        """Divide a vector by the standard deviation."""
        variance = jnp.asarray(self._variance).astype(at_least_single(vector.dtype))
        return (vector / over_examples(jnp.sqrt(variance), vector),)


class NormalMeanVarianceNegativeLogProbLoss(WithTargets, DistributionNegativeLogProbLoss):
    """The negative log-density of a normal distribution, as a function of its mean and variance.

    The Fisher matrix is diagonal: `1 / variance` for an entry of the mean, `0.5 / variance²` for
    one of the variance. The GGN is defined to be the Fisher matrix, because the Hessian depends on
    the targets and may be indefinite.

    The argument of `multiply_fisher_factor` is the concatenation, along the last axis, of an array
    like the mean and one like the variance. A batch of scalars counts as one of vectors of length
    one.

    Arguments:
        mean: Predicted means, with examples along the first axis.
        variance: Predicted variances, positive, of the shape of the means.
        targets: Targets, of the shape of the means.
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Raises:
        ValueError: If mean and variance differ in shape.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.NormalMeanVarianceNegativeLogProbLoss(jnp.zeros(1), 0.5 * jnp.ones(1))
        >>> loss.multiply_fisher((jnp.ones(1), jnp.ones(1)))
        (Array([2.], dtype=float32), Array([2.], dtype=float32))
    """

    def __init__(
        self,
        mean: Array,
        variance: Array,
        targets: ArrayLike | None = None,
        weight: ArrayLike = 1.0,
    ) -> None:
        super().__init__(targets, weight)
        if jnp.shape(mean) != jnp.shape(variance):
            raise ValueError(
                f"curvax.NormalMeanVarianceNegativeLogProbLoss: mean and variance must have one "
                f"shape, got {jnp.shape(mean)} and {jnp.shape(variance)}. For a variance that is "
                f"not predicted, use curvax.NormalMeanNegativeLogProbLoss."
            )
        self._mean, self._variance = mean, variance

    @property
    def dist(self) -> Normal:
        """The normal distribution."""
        return Normal(self._mean, self._variance)

    @property
    def params(self) -> tuple[Array, Array]:
        """The mean and the variance."""
        return self._mean, self._variance

    def copy_with_different_inputs(
        self, parameter_dependants: Sequence[Array]
    ) -> "NormalMeanVarianceNegativeLogProbLoss":
        """Return the same loss of another mean and variance.

        Arguments:
            parameter_dependants: A sequence of two arrays, mean and variance.

        Returns:
            A loss with the same targets and weight.

        Raises:
            ValueError: If there are not exactly two arrays.
        """
        mean, variance = self.checked_inputs(parameter_dependants)
        return type(self)(mean, variance, self._targets, self._weight)

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array, Array]:
        """Multiply arrays like mean and variance by `1 / variance` and `0.5 / variance²`."""
        variance = widened(self._variance)
        return self._times_diagonal(vector, (1 / variance, 0.5 / variance**2))

    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array, Array]:
        """Multiply both halves of a vector by the square roots of the Fisher matrix's diagonal."""
        parts = jnp.split(vector, 2, axis=-1)
        return self._times_diagonal([x.reshape(self._mean.shape) for x in parts], self._factors)

    @property
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of the mean, with the last axis doubled."""
        *leading, last = columns(self._mean).shape
        return (*leading, 2 * last)

    @property
    def _factors(self) -> tuple[Array, Array]:
        """The diagonal of the factor: the entries of the mean, and those of the variance."""
        variance = widened(self._variance)
        return 1 / jnp.sqrt(variance), 1 / (math.sqrt(2) * variance)

    def _times_diagonal(
        self, vector: Sequence[Array], diagonal: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        mean, variance = (
            (x.astype(d.dtype) * d).astype(like.dtype)
            for x, d, like in zip(vector, diagonal, self.params, strict=True)
        )
        return mean, variance
