"""Sigmoid cross-entropy: the loss of independent binary labels, as a function of their logits.

With `p = sigmoid(logits)`, the Fisher matrix is `diag(p (1 − p))`, and so is the Hessian.

The loss of a masked label is the constant 0 for any logit and target, also if these are infinite or
NaN.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.losses.distributions import Bernoulli
from curvax.losses.loss_function import (
    DistributionNegativeLogProbLoss,
    WithTargets,
    given_targets,
    sum_of_events,
    where_kept,
    widened,
)


class MultiBernoulliNegativeLogProbLoss(WithTargets, DistributionNegativeLogProbLoss):
    """The negative log-probability of independent Bernoulli variables, as a function of logits.

    For one example that is the sum of `-log(p)` where the target is 1 and `-log(1 − p)` where it
    is 0, with `p = sigmoid(logits)`. Targets between 0 and 1 interpolate. The Fisher matrix is
    `diag(p (1 − p))` and its factor `diag(sqrt(p (1 − p)))`.

    Arguments:
        logits: Predictions, with examples along the first axis.
        targets: Zeros and ones, of the shape of the logits.
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.
        mask: Zeros and ones, or booleans, for the leading axes of the logits: one entry for each
            example, with shape `(batch,)`, up to one for each label. Where the mask is zero, so are
            the loss, its gradient and its curvature. None masks nothing.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(jnp.zeros((1, 2)), jnp.ones((1, 2)))
        >>> loss.grad_of_evaluate(None, "regular")
        (Array([[-0.5, -0.5]], dtype=float32),)
    """

    def __init__(
        self,
        logits: Array,
        targets: ArrayLike | None = None,
        weight: ArrayLike = 1.0,
        *,
        mask: ArrayLike | None = None,
    ) -> None:
        super().__init__(targets, weight)
        self._logits = logits
        self._mask = None if mask is None else jnp.asarray(mask)

    @property
    def mask(self) -> Array | None:
        """The mask, or None."""
        return self._mask

    def _further_independants(self) -> tuple[ArrayLike, ...]:
        return () if self._mask is None else (self._mask,)

    @property
    def dist(self) -> Bernoulli:
        """The Bernoulli distributions of each example; the mask plays no part."""
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
            A loss with the same targets, weight and mask.

        Raises:
            ValueError: If there is not exactly one array.
        """
        (logits,) = self.checked_inputs(parameter_dependants)
        return type(self)(logits, self._targets, self._weight, mask=self._mask)

    def evaluate_unweighted(self, targets: ArrayLike | None) -> Array:
        """Compute the negative log-probability of each example's labels, without masked ones."""
        if self._mask is None:
            return super().evaluate_unweighted(targets)
        targets = jnp.asarray(given_targets(self, targets))
        # Masked entries are replaced first: 0 * NaN is NaN, also in the gradient.
        unmasked = Bernoulli(self._kept(self._logits))
        terms = self._kept(unmasked.log_prob_of_each(self._kept(targets)))
        return -sum_of_events(terms).astype(self._logits.dtype)

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
        logits = widened(self._kept(self._logits))
        return self._kept(jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits))

    def _kept(self, x: Array) -> Array:
        return where_kept(self._mask, x)
