"""The predictive distributions of the losses: to draw targets from, and to ask for log-probs.

All of them are for batches. For `Normal` and `Bernoulli` an outcome is everything but the first
axis, its entries independent, and `log_prob` is one number for each example. For `Categorical` and
`OneHotCategorical` an outcome is one class of those along the last axis.

Half precision: what is computed is computed in float32. Log-probabilities, entropies and
probabilities are cast back. Samples of a `Normal` stay in float32, because rounding them would
change their variance.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.losses.loss_function import over_examples, sum_of_events, widened


@dataclass(frozen=True, eq=False)
class Normal:
    """Independent normal variables: one outcome is an array of them.

    Arguments:
        loc: their means, examples along the first axis.
        variance: their variances: a number, one for each example, or one for each variable.
    """

    loc: Array
    variance: ArrayLike

    def mean(self) -> Array:
        """The means."""
        return self.loc

    def stddev(self) -> Array:
        """The standard deviations, in the shape of the means."""
        return jnp.sqrt(self._variances).astype(self.loc.dtype)

    def sample(self, *, seed: Array) -> Array:
        """One outcome for each example, drawn with this random key."""
        loc = widened(self.loc)
        noise = jax.random.normal(seed, loc.shape, loc.dtype)
        return loc + jnp.sqrt(self._variances) * noise

    def log_prob(self, value: ArrayLike) -> Array:
        """The logarithm of the density at each example's outcome."""
        loc, variances = widened(self.loc), self._variances
        distance = jnp.asarray(value).astype(loc.dtype) - loc
        terms = distance**2 / variances + jnp.log(2 * math.pi * variances)
        return sum_of_events(-0.5 * terms).astype(self.loc.dtype)

    def entropy(self) -> Array:
        """The differential entropy of each example's outcome."""
        terms = 1 + jnp.log(2 * math.pi * self._variances)
        return sum_of_events(0.5 * terms).astype(self.loc.dtype)

    @property
    def _variances(self) -> Array:
        loc = widened(self.loc)
        return jnp.broadcast_to(over_examples(self.variance, loc), loc.shape)


@dataclass(frozen=True, eq=False)
class Bernoulli:
    """Independent variables that are 0 or 1: one outcome is an array of them.

    Arguments:
        logits: the logarithms of the odds of a 1, examples along the first axis.
    """

    logits: Array

    @property
    def probs(self) -> Array:
        """The probability of a 1, for each variable."""
        return jax.nn.sigmoid(widened(self.logits)).astype(self.logits.dtype)

    def mean(self) -> Array:
        """The probability of a 1, for each variable."""
        return self.probs

    def sample(self, *, seed: Array) -> Array:
        """Zeros and ones in the dtype of the logits, drawn with this random key."""
        probs = jax.nn.sigmoid(widened(self.logits))
        return jax.random.bernoulli(seed, probs).astype(self.logits.dtype)

    def log_prob(self, value: ArrayLike) -> Array:
        """The logarithm of the probability of each example's outcome; fractions interpolate."""
        logits = widened(self.logits)
        ones = jnp.asarray(value).astype(logits.dtype)
        terms = ones * jax.nn.log_sigmoid(logits) + (1 - ones) * jax.nn.log_sigmoid(-logits)
        return sum_of_events(terms).astype(self.logits.dtype)

    def entropy(self) -> Array:
        """The entropy of each example's outcome."""
        logits = widened(self.logits)
        terms = jax.nn.softplus(logits) - logits * jax.nn.sigmoid(logits)
        return sum_of_events(terms).astype(self.logits.dtype)


@dataclass(frozen=True, eq=False)
class Categorical:
    """One class out of those along the last axis, by its number.

    Arguments:
        logits: the logarithms of the probabilities, up to a constant for each example.
    """

    logits: Array

    @property
    def probs(self) -> Array:
        """The probability of each class."""
        return jax.nn.softmax(widened(self.logits)).astype(self.logits.dtype)

    def mean(self) -> Array:
        """The probability of each class: the mean of the outcome as a one-hot vector."""
        return self.probs

    def sample(self, *, seed: Array) -> Array:
        """The number of a class for each example, drawn with this random key."""
        return jax.random.categorical(seed, widened(self.logits))

    def log_prob(self, value: ArrayLike) -> Array:
        """The logarithm of the probability of each example's class; NaN if there is none such."""
        log_probs, classes = jax.nn.log_softmax(widened(self.logits)), jnp.asarray(value)
        nearest = jnp.clip(classes, 0, log_probs.shape[-1] - 1)
        chosen = jnp.take_along_axis(log_probs, nearest[..., None], axis=-1)[..., 0]
        # As a factor, the NaN reaches the gradient too.
        exists = jnp.where(classes == nearest, 1, jnp.nan)
        return (chosen * exists).astype(self.logits.dtype)

    def entropy(self) -> Array:
        """The entropy of each example's class."""
        log_probs = jax.nn.log_softmax(widened(self.logits))
        return -_weighted_sum(jnp.exp(log_probs), log_probs).astype(self.logits.dtype)


@dataclass(frozen=True, eq=False)
class OneHotCategorical(Categorical):
    """One class out of those along the last axis, as a one-hot vector.

    Arguments:
        logits: the logarithms of the probabilities, up to a constant for each example.
    """

    def sample(self, *, seed: Array) -> Array:
        """A one-hot vector for each example, drawn with this random key."""
        classes = super().sample(seed=seed)
        return jax.nn.one_hot(classes, self.logits.shape[-1], dtype=self.logits.dtype)

    def log_prob(self, value: ArrayLike) -> Array:
        """The logarithm of the probability of each example's class; fractions interpolate."""
        log_probs = jax.nn.log_softmax(widened(self.logits))
        weights = jnp.asarray(value).astype(log_probs.dtype)
        return _weighted_sum(weights, log_probs).astype(self.logits.dtype)


def _weighted_sum(weights: Array, log_probs: Array) -> Array:
    """The sum over classes, where an impossible class of no weight counts for nothing."""
    return jnp.sum(weights * jnp.where(weights == 0, 0, log_probs), axis=-1)
