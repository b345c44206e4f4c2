"""The losses of one class among several, given by its logits: softmax cross-entropy.

With `p = softmax(logits)` the Fisher matrix of one example, and its Hessian, is `diag(p) − p pᵀ`.
With q the entry-wise square root of p, `B = diag(q) − p qᵀ` is a factor of it, because `qᵀq = 1`.

A mask leaves examples out: their loss is the constant 0, whatever their logits and targets are,
also if these are infinite, NaN, or no class.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.losses.distributions import Categorical, OneHotCategorical
from curvax.losses.loss_function import DistributionNegativeLogProbLoss, WithTargets, widened


class CategoricalLogitsNegativeLogProbLoss(WithTargets, DistributionNegativeLogProbLoss):
    """The negative log-probability of a class, as a loss of the logits of all classes.

    With `p = softmax(logits)` that is `-log(p[target])`. The Fisher matrix of one example is
    `diag(p) − p pᵀ`.

    Arguments:
        logits: the predictions, classes along the last axis.
        targets: the number of the right class, integers of the shape `logits.shape[:-1]`. The loss
            of a number that is no class is NaN.
        mask: zeros and ones, or booleans, of the shape `logits.shape[:-1]`. The loss, its gradient
            and its curvature are zero where the mask is.
        weight: what the loss is multiplied by, a number, or one for each example.

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
        """Which examples count."""
        return self._mask

    def _further(self) -> tuple[Any, ...]:
        return () if self._mask is None else (self._mask,)

    @property
    def dist(self) -> Categorical:
        """The categorical distribution of each example, masked or not."""
        return Categorical(self._logits)

    @property
    def params(self) -> tuple[Array]:
        """The logits."""
        return (self._logits,)

    def copy_with_different_inputs(
        self, parameter_dependants: Sequence[Array]
    ) -> "CategoricalLogitsNegativeLogProbLoss":
        """The same loss of other logits.

        Arguments:
            parameter_dependants: a sequence of one array.

        Returns:
            A loss with the same targets, mask and weight.

        Raises:
            ValueError: if there is not exactly one array.
        """
        (logits,) = self.checked_inputs(parameter_dependants)
        return type(self)(logits, self._targets, self._mask, self._weight)

    def evaluate_unweighted(self, targets: Any) -> Array:
        """The negative log-probability of each example's class, zero where masked."""
        # What is left out is replaced before anything is computed, so that no NaN gets through.
        unmasked = type(self)(self._kept(self._logits))
        return self._kept(-unmasked.dist.log_prob(self._kept(jnp.asarray(targets))))

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array]:
        """As `multiply_fisher`, without the weight."""
        probs = jnp.exp(self._log_probs)
        x = probs * vector[0].astype(probs.dtype)
        return (self._kept((x - probs * _sum(x)).astype(vector[0].dtype)),)

    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array]:
        """As `multiply_fisher_factor`, without the weight."""
        log_probs = self._log_probs
        x = jnp.exp(0.5 * log_probs) * vector.astype(log_probs.dtype)
        return (self._kept((x - jnp.exp(log_probs) * _sum(x)).astype(vector.dtype)),)

    @property
    def _log_probs(self) -> Array:
        return jax.nn.log_softmax(widened(self._kept(self._logits)))

    def _kept(self, x: Array) -> Array:
        """`x` where the mask is one, else zero."""
        if self._mask is None:
            return x
        mask = self._mask.astype(bool)
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0)


class OneHotCategoricalLogitsNegativeLogProbLoss(CategoricalLogitsNegativeLogProbLoss):
    """As `CategoricalLogitsNegativeLogProbLoss`, with targets that are one-hot vectors.

    Targets may also be probabilities of classes that sum to one: the loss is then the
    cross-entropy between the two distributions.

    Arguments:
        logits: the predictions, classes along the last axis.
        targets: one-hot vectors, or probabilities, of the shape of the logits.
        mask: zeros and ones, or booleans, of the shape `logits.shape[:-1]`.
        weight: what the loss is multiplied by, a number, or one for each example.

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
        """The categorical distribution of each example, its outcomes one-hot vectors."""
        return OneHotCategorical(self._logits)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1, keepdims=True)
