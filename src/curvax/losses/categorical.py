"""Softmax cross-entropy: the losses of one class among several, as functions of the logits.

With `p = softmax(logits)`, the Fisher matrix of one example is `diag(p) − p pᵀ`, and so is its
Hessian. With q the elementwise square root of p, `B = diag(q) − p qᵀ` is a factor of it:
`B Bᵀ = diag(p) − 2 p pᵀ + p (qᵀq) pᵀ`, and `qᵀq = 1`.

The loss of a masked example is the constant 0 for any logits and targets, also if these are
infinite, NaN, or not a class.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.losses.distributions import Categorical, OneHotCategorical
from curvax.losses.loss_function import (
    DistributionNegativeLogProbLoss,
    WithTargets,
    given_targets,
    where_kept,
    widened,
)


class CategoricalLogitsNegativeLogProbLoss(WithTargets, DistributionNegativeLogProbLoss):
    """The negative log-probability of a class, as a function of the logits of all classes.

    With `p = softmax(logits)` that is `-log(p[target])`. The Fisher matrix of one example is
    `diag(p) − p pᵀ`. In a model, register it by `register_softmax_cross_entropy_loss` or
    `register_categorical_predictive_distribution`.

    Arguments:
        logits: Predictions, with classes along the last axis.
        targets: Indices of the true classes: integers of shape `logits.shape[:-1]`. The loss of an
            index out of range is NaN. None if there are none: value and gradient need targets,
            sampling and curvature do not.
        mask: Zeros and ones, or booleans, of shape `logits.shape[:-1]`. Where the mask is zero, so
            are the loss, its gradient and its curvature. None masks nothing.
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> logits, targets = jnp.zeros((2, 2)), jnp.array([0, 1])
        >>> loss = curvax.CategoricalLogitsNegativeLogProbLoss(logits, targets, jnp.array([1, 0]))
        >>> loss.grad_of_evaluate(None, "regular")
        (Array([[-0.5,  0.5],
               [ 0. ,  0. ]], dtype=float32),)
    """

    least_axes = 2

    def __init__(
        self,
        logits: Array,
        targets: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        weight: ArrayLike = 1.0,
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
    def dist(self) -> Categorical:
        """The categorical distribution of each example; the mask plays no part."""
        return Categorical(self._logits)

    @property
    def params(self) -> tuple[Array]:
        """The logits."""
        return (self._logits,)

    def copy_with_different_inputs(
        self, parameter_dependants: Sequence[Array]
    ) -> "CategoricalLogitsNegativeLogProbLoss":
        """Return the same loss of other logits.

        Arguments:
            parameter_dependants: A sequence of one array, the logits.

        Returns:
            A loss with the same targets, mask and weight.

        Raises:
            ValueError: If there is not exactly one array.
        """
        (logits,) = self.checked_inputs(parameter_dependants)
        return type(self)(logits, self._targets, self._mask, self._weight)

    def evaluate_unweighted(self, targets: ArrayLike | None) -> Array:
        """Compute the negative log-probability of each example's class, zero where masked."""
        targets = given_targets(self, targets)
        # Masked entries are replaced first: 0 * NaN is NaN, also in the gradient.
        unmasked = type(self)(self._kept(self._logits))
        return self._kept(-unmasked.dist.log_prob(self._kept(jnp.asarray(targets))))

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array]:
        """Multiply each example's vector by `diag(p) − p pᵀ`."""
        probs = jnp.exp(self._log_probs)
        x = probs * vector[0].astype(probs.dtype)
        return (self._kept((x - probs * _sum(x)).astype(vector[0].dtype)),)

    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array]:
        """Multiply each example's vector by `diag(q) − p qᵀ`, with `q = sqrt(p)`."""
        log_probs = self._log_probs
        x = jnp.exp(0.5 * log_probs) * vector.astype(log_probs.dtype)
        return (self._kept((x - jnp.exp(log_probs) * _sum(x)).astype(vector.dtype)),)

    @property
    def _log_probs(self) -> Array:
        return jax.nn.log_softmax(widened(self._kept(self._logits)))

    def _kept(self, x: Array) -> Array:
        return where_kept(self._mask, x)


class OneHotCategoricalLogitsNegativeLogProbLoss(CategoricalLogitsNegativeLogProbLoss):
    """Softmax cross-entropy with targets that are one-hot vectors or probabilities.

    Equal to `CategoricalLogitsNegativeLogProbLoss` for one-hot targets. Targets may also be
    probabilities of the classes that sum to one; the loss is then the cross-entropy between the two
    distributions, `-sum(targets * log(softmax(logits)))`. In a model, register it by
    `register_softmax_cross_entropy_loss` with such targets.

    Arguments:
        logits: Predictions, with classes along the last axis.
        targets: One-hot vectors or probabilities, of the shape of the logits. None if there are
            none: value and gradient need targets, sampling and curvature do not.
        mask: Zeros and ones, or booleans, of shape `logits.shape[:-1]`. Where the mask is zero, so
            are the loss, its gradient and its curvature. None masks nothing.
        weight: Factor of the loss: a scalar, or one per example with shape `(batch,)`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> logits, targets = jnp.zeros((1, 2)), jnp.array([[0.25, 0.75]])
        >>> loss = curvax.OneHotCategoricalLogitsNegativeLogProbLoss(logits, targets)
        >>> loss.grad_of_evaluate(None, "regular")
        (Array([[ 0.25, -0.25]], dtype=float32),)
    """

    @property
    def dist(self) -> OneHotCategorical:
        """The categorical distribution of each example, with one-hot outcomes."""
        return OneHotCategorical(self._logits)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1, keepdims=True)
