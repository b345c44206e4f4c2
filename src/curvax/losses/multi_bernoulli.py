"""Sigmoid cross-entropy: the loss of independent binary labels, as a function of their logits.

With `p = sigmoid(logits)`, the Fisher matrix is `diag(p (1 − p))`, and so is the Hessian.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.losses.distributions import Bernoulli
from curvax.losses.loss_function import DistributionNegativeLogProbLoss, WithTargets, widened


class MultiBernoulliNegativeLogProbLoss(WithTargets, DistributionNegativeLogProbLoss):
    """The negative log-probability of independent Bernoulli variables, as a function of logits.

    For one example that is the sum of `-log(p)` where the target is 1 and `-log(1 − p)` where it
    is 0, with `p = sigmoid(logits)`. Targets between 0 and 1 interpolate. The Fisher matrix is
    `diag(p (1 − p))` and its factor `diag(sqrt(p (1 − p)))`.

    Arguments:
        logits: Predictions, with examples along the first axis.
        targets: Zeros and ones, of the shape of the logits.
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(jnp.zeros((1, 2)), jnp.ones((1, 2)))
        >>> loss.grad_of_evaluate(None, "regular")
        (Array([[-0.5, -0.5]], dtype=float32),)
    """

    def __init__(
        self, logits: Array, targets: ArrayLike | None = None, weight: ArrayLike = 1.0
    ) -> None:
        super().__init__(targets, weight)
        self._logits = logits

    @property
    def dist(self) -> Bernoulli:
        """The Bernoulli distributions of each example."""
        return Bernoulli(self._logits)

    @property
    def params(self) -> tuple[Array]:
        """The logits."""
        return (self._logits,)

    def copy_with_different_inputs(
        self, parameter_dependants: Sequence[Array]
    ) -> "MultiBernoulliNegativeLogProbLoss":
        """Return the same loss of other logits.

        Arguments:
            parameter_dependants: A sequence of one array, the logits.

        Returns:
            A loss with the same targets and weight.

        Raises:
            ValueError: If there is not exactly one array.
        """
        (logits,) = self.checked_inputs(parameter_dependants)
        return type(self)(logits, self._targets, self._weight)

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array]:
        """Multiply a vector by `diag(p (1 − p))`."""
        (x,) = vector
        return ((self._variances * x.astype(self._variances.dtype)).astype(x.dtype),)

    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array]:
        """Multiply a vector by `diag(sqrt(p (1 − p)))`."""
        deviations = jnp.sqrt(self._variances)
        return ((deviations * vector.astype(deviations.dtype)).astype(vector.dtype),)

    @property
    def _variances(self) -> Array:
        """`p (1 − p)`, as a product of sigmoids: `1 − p` would cancel where p is close to 1."""
        logits = widened(self._logits)
        return jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits)
