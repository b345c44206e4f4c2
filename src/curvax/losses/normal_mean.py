"""The loss of a normal distribution whose variance is given: squared error.

Its Fisher matrix, and its Hessian, is the identity divided by the variance.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, at_least_single
from curvax.losses.distributions import Normal
from curvax.losses.loss_function import DistributionNegativeLogProbLoss, WithTargets, over_examples


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
