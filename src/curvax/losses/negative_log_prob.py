"""Losses that are the negative logarithm of a probability, and so have a Fisher matrix.

Their Fisher matrix is `F = E[g gᵀ]`, where g is the gradient of the loss in the predictions and
the targets come from the distribution that the predictions describe. In the natural parameters of
an exponential family (logits, a mean of known variance) the Hessian does not depend on the targets
and equals F. So the GGN of such a loss is its Fisher matrix.
"""

import abc
from collections.abc import Sequence
from typing import Any

from curvax._types import Array
from curvax.losses.distributions import Distribution
from curvax.losses.loss_function import LossFunction, Shape, replicated_one_hot, transposed


class NegativeLogProbLoss(LossFunction):
    """A loss that is a negative log-probability of its targets.

    A class of your own needs a constructor, `targets`, `parameter_independants`, `params`,
    `fisher_factor_inner_shape`, `copy_with_different_inputs`, `evaluate_unweighted`, `sample` and
    `multiply_fisher_factor_unweighted`. Its GGN is its Fisher matrix unless it says otherwise.

    Arguments:
        weight: what the loss is multiplied by, a number, or one for each example.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.NormalMeanNegativeLogProbLoss(jnp.zeros((2, 1)), variance=0.25)
        >>> isinstance(loss, curvax.NegativeLogProbLoss)
        True
        >>> loss.multiply_fisher((jnp.ones((2, 1)),))
        (Array([[4.],
               [4.]], dtype=float32),)
    """

    needs_targets = True

    @property
    def parameter_dependants(self) -> tuple[Array, ...]:
        """The arrays that depend on parameters: those of the distribution."""
        return self.params

    @property
    @abc.abstractmethod
    def params(self) -> tuple[Array, ...]:
        """The arrays that describe the distribution."""

    @abc.abstractmethod
    def sample(self, rng: Array) -> Array:
        """Targets drawn from the distribution, one for each example.

        Arguments:
            rng: a random key.

        Returns:
            An array that `evaluate` takes as targets.
        """

    def grad_of_evaluate_on_sample(self, rng: Array, coefficient_mode: str) -> tuple[Array, ...]:
        """As `grad_of_evaluate`, of targets drawn from the distribution.

        Its mean is zero, and with "sqrt" its covariance is the Fisher matrix, weight included.

        Arguments:
            rng: a random key.
            coefficient_mode: as in `evaluate`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.

        Raises:
            ValueError: if the mode is none of the three.
        """
        return self.grad_of_evaluate(self.sample(rng), coefficient_mode)

    def multiply_fisher(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """The product of the Fisher matrix and a vector.

        Arguments:
            vector: arrays like the `parameter_dependants`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.
        """
        return self._weighted(self.multiply_fisher_unweighted(vector))

    def multiply_fisher_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """As `multiply_fisher`, without the weight."""
        inner = self.multiply_fisher_factor_transpose_unweighted(vector)
        return self.multiply_fisher_factor_unweighted(inner)

    def multiply_fisher_factor(self, vector: Array) -> tuple[Array, ...]:
        """The product of the factor B of the Fisher matrix and a vector.

        Any B with `B Bᵀ` equal to the Fisher matrix will do; it is the same in all methods.

        Arguments:
            vector: an array of the shape `fisher_factor_inner_shape`.

        Returns:
            A tuple of arrays like the `parameter_dependants`.
        """
        return self._weighted(self.multiply_fisher_factor_unweighted(vector), "sqrt")

    @abc.abstractmethod
    def multiply_fisher_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """As `multiply_fisher_factor`, without the weight."""

    def multiply_fisher_factor_transpose(self, vector: Sequence[Array]) -> Array:
        """The product of the transpose of the factor B of the Fisher matrix and a vector.

        Arguments:
            vector: arrays like the `parameter_dependants`.

        Returns:
            An array of the shape `fisher_factor_inner_shape`.
        """
        return self._times(self.multiply_fisher_factor_transpose_unweighted(vector), "sqrt")

    def multiply_fisher_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """As `multiply_fisher_factor_transpose`, without the weight."""
        factor = self.multiply_fisher_factor_unweighted
        return transposed(factor, self.fisher_factor_inner_shape, self._inner_dtype)(vector)

    def multiply_fisher_factor_replicated_one_hot(self, index: Sequence[int]) -> tuple[Array, ...]:
        """The product of the factor B of the Fisher matrix and one unit vector for all examples.

        Arguments:
            index: where each slice along the first axis of an array of the shape
                `fisher_factor_inner_shape` has its one; it is zero elsewhere.

        Returns:
            A tuple of arrays like the `parameter_dependants`: one column of B for each example.

        Raises:
            ValueError: if the index does not have one number for each axis but the first.
        """
        columns = self.multiply_fisher_factor_replicated_one_hot_unweighted(index)
        return self._weighted(columns, "sqrt")

    def multiply_fisher_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """As `multiply_fisher_factor_replicated_one_hot`, without the weight."""
        one_hot = replicated_one_hot(index, self.fisher_factor_inner_shape, self._inner_dtype)
        return self.multiply_fisher_factor_unweighted(one_hot)

    @property
    @abc.abstractmethod
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_fisher_factor` takes; its first axis is that of examples."""

    # The GGN is the Fisher matrix.

    def multiply_ggn_unweighted(self, vector: Sequence[Array]) -> tuple[Array, ...]:
        """As `multiply_ggn`, without the weight: the GGN is the Fisher matrix."""
        return self.multiply_fisher_unweighted(vector)

    def multiply_ggn_factor_unweighted(self, vector: Array) -> tuple[Array, ...]:
        """As `multiply_ggn_factor`, without the weight: the GGN is the Fisher matrix."""
        return self.multiply_fisher_factor_unweighted(vector)

    def multiply_ggn_factor_transpose_unweighted(self, vector: Sequence[Array]) -> Array:
        """As `multiply_ggn_factor_transpose`, without the weight: the GGN is the Fisher matrix."""
        return self.multiply_fisher_factor_transpose_unweighted(vector)

    def multiply_ggn_factor_replicated_one_hot_unweighted(
        self, index: Sequence[int]
    ) -> tuple[Array, ...]:
        """As `multiply_ggn_factor_replicated_one_hot`, without the weight."""
        return self.multiply_fisher_factor_replicated_one_hot_unweighted(index)

    @property
    def ggn_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_ggn_factor` takes: that of the Fisher matrix's factor."""
        return self.fisher_factor_inner_shape


class DistributionNegativeLogProbLoss(NegativeLogProbLoss):
    """A negative log-probability loss with a distribution object, `dist`.

    Arguments:
        weight: what the loss is multiplied by, a number, or one for each example.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> loss = curvax.MultiBernoulliNegativeLogProbLoss(jnp.zeros((2, 3)))
        >>> isinstance(loss, curvax.DistributionNegativeLogProbLoss)
        True
        >>> loss.dist.probs[0]
        Array([0.5, 0.5, 0.5], dtype=float32)
    """

    @property
    @abc.abstractmethod
    def dist(self) -> Distribution:
        """The distribution that the predictions describe."""

    def evaluate_unweighted(self, targets: Any) -> Array:
        """The negative log-probability of each example's target."""
        return -self.dist.log_prob(targets)

    def sample(self, rng: Array) -> Array:
        """Targets drawn from the distribution, one for each example."""
        return self.dist.sample(seed=rng)

    @property
    def fisher_factor_inner_shape(self) -> Shape:
        """The shape of what `multiply_fisher_factor` takes: that of the first of `params`."""
        return self.params[0].shape
