"""The losses of normal distributions: of given variance, which is squared error, or predicted."""

import math
from collections.abc import Sequence
from typing import Any

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
    """The negative log-density of a normal distribution of given variance, as a loss of its mean.

    For one example that is `‖target − mean‖² / (2 variance) + n/2 log(2π variance)`, where n is the
    number of entries. The Fisher matrix is `I / variance`.

    Arguments:
        mean: the predictions, examples along the first axis.
        targets: what they are compared with, of the same shape.
        variance: of each entry: a number, or one for each example.
        weight: what the loss is multiplied by, a number, or one for each example.

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

    def _further(self) -> tuple[Any, ...]:
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
        """The same loss of another mean.

        Arguments:
            parameter_dependants: a sequence of one array.

        Returns:
            A loss with the same targets, variance and weight.

        Raises:
            ValueError: if there is not exactly one array.
        """
        (mean,) = self.checked_inputs(parameter_dependants)
        return type(self)(mean, self._targets, self._variance, self._weight)

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array]:
        """As `multiply_fisher`, without the weight."""
        (x,) = vector
        return (x / over_examples(self._variance, x),)

    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array]:
        """As `multiply_fisher_factor`, without the weight."""
        variance = jnp.asarray(self._variance).astype(at_least_single(vector.dtype))
        return (vector / over_examples(jnp.sqrt(variance), vector),)


class NormalMeanVarianceNegativeLogProbLoss(WithTargets, DistributionNegativeLogProbLoss):
    """The negative log-density of a normal distribution, as a loss of its mean and its variance.

    The Fisher matrix is diagonal: `1 / variance` for an entry of the mean, `0.5 / variance²` for
    one of the variance. So is the GGN, which is defined to be the Fisher matrix, because the
    Hessian depends on the targets and may be indefinite.

    The inner array of the factor has the part of the mean and then that of the variance along its
    last axis; a batch of numbers counts as one of vectors of length one.

    Arguments:
        mean: the predicted means, examples along the first axis.
        variance: the predicted variances, positive, of the same shape.
        targets: what the means are compared with, of the same shape.
        weight: what the loss is multiplied by, a number, or one for each example.

    Raises:
        ValueError: if mean and variance differ in shape.

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
        """The same loss of another mean and variance.

        Arguments:
            parameter_dependants: a sequence of two arrays.

        Returns:
            A loss with the same targets and weight.

        Raises:
            ValueError: if there are not exactly two arrays.
        """
        mean, variance = self.checked_inputs(parameter_dependants)
        return type(self)(mean, variance, self._targets, self._weight)

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array, Array]:
        """As `multiply_fisher`, without the weight."""
        variance = widened(self._variance)
        return self._times_diagonal(vector, (1 / variance, 0.5 / variance**2))

    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array, Array]:
        """As `multiply_fisher_factor`, without the weight."""
        parts = jnp.split(vector, 2, axis=-1)
        return self._times_diagonal([x.reshape(self._mean.shape) for x in parts], self._factors)

    @property
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_fisher_factor` takes: twice as long along the last axis."""
        *leading, last = columns(self._mean).shape
        return (*leading, 2 * last)

    @property
    def _factors(self) -> tuple[Array, Array]:
        """The diagonal of the factor, for the mean and for the variance."""
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
