"""Predictive distributions of the losses: sampling of targets, log-probabilities, entropies.

All of them are batched. For `Normal` and `Bernoulli`, an outcome spans all axes but the first, with
independent entries, and `log_prob` returns one number per example. For `Categorical` and
`OneHotCategorical`, an outcome is one of the classes along the last axis.

Half-precision parameters are computed with in float32. Log-probabilities, entropies and
probabilities are cast back. Samples of a `Normal` stay in float32, because rounding would change
their variance.
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
    """Arrays of independent normal variables.

    Arguments:
        loc: Means, with examples along the first axis.
        variance: Variances: a scalar, one per example, or one per variable.
    """

    loc: Array
    variance: ArrayLike

    def mean(self) -> Array:
        """Return the means."""
        return self.loc

    def stddev(self) -> Array:
        """Return the standard deviations, in the shape of the means."""
        return jnp.sqrt(self._variances).astype(self.loc.dtype)

    def sample(self, *, seed: Array) -> Array:
        """Sample one outcome per example with a random key."""
        loc = widened(self.loc)
        noise = jax.random.normal(seed, loc.shape, loc.dtype)
        return loc + jnp.sqrt(self._variances) * noise

    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-density of each example's outcome."""
        loc, variances = widened(self.loc), self._variances
        distance = jnp.asarray(value).astype(loc.dtype) - loc
        terms = distance**2 / variances + jnp.log(2 * math.pi * variances)
        return sum_of_events(-0.5 * terms).astype(self.loc.dtype)

    def entropy(self) -> Array:
        """Return the differential entropy for each example."""
        terms = 1 + jnp.log(2 * math.pi * self._variances)
        return sum_of_events(0.5 * terms).astype(self.loc.dtype)

    @property
    def _variances(self) -> Array:
        loc = widened(self.loc)
        return jnp.broadcast_to(over_examples(self.variance, loc), loc.shape)


@dataclass(frozen=True, eq=False)
class Bernoulli:
    """Arrays of independent variables that are 0 or 1.

    Arguments:
        logits: Log-odds of a 1, with examples along the first axis.
    """

    logits: Array

    @property
    def probs(self) -> Array:
        """The probability of a 1, for each variable."""
        return jax.nn.sigmoid(widened(self.logits)).astype(self.logits.dtype)

    def mean(self) -> Array:
        """Return the probability of a 1, for each variable."""
        return self.probs

    def sample(self, *, seed: Array) -> Array:
        """Sample zeros and ones, in the dtype of the logits, with a random key."""
        probs = jax.nn.sigmoid(widened(self.logits))
        return jax.random.bernoulli(seed, probs).astype(self.logits.dtype)

    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-probability of each example's outcome; fractions interpolate."""
        return sum_of_events(self.log_prob_of_each(value)).astype(self.logits.dtype)

    def log_prob_of_each(self, value: ArrayLike) -> Array:
        """Return the log-probability of each variable's outcome, in at least float32."""
        logits = widened(self.logits)
        ones = jnp.asarray(value).astype(logits.dtype)
        return ones * jax.nn.log_sigmoid(logits) + (1 - ones) * jax.nn.log_sigmoid(-logits)

    def entropy(self) -> Array:
        """Return the entropy for each example."""
        logits = widened(self.logits)
        terms = jax.nn.softplus(logits) - logits * jax.nn.sigmoid(logits)
        return sum_of_events(terms).astype(self.logits.dtype)


@dataclass(frozen=True, eq=False)
class Categorical:
    """One of the classes along the last axis, by its index.

    Arguments:
        logits: Log-probabilities, up to a constant per example.
    """

    logits: Array

    @property
    def probs(self) -> Array:
        """The probability of each class."""
        return jax.nn.softmax(widened(self.logits)).astype(self.logits.dtype)

    def mean(self) -> Array:
        """Return the probability of each class: the mean of the one-hot outcome."""
        return self.probs

    def sample(self, *, seed: Array) -> Array:
        """Sample the index of a class per example with a random key."""
        return jax.random.categorical(seed, widened(self.logits))

    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-probability of each example's class; NaN for an index out of range."""
        log_probs, classes = jax.nn.log_softmax(widened(self.logits)), jnp.asarray(value)
        nearest = jnp.clip(classes, 0, log_probs.shape[-1] - 1)
        chosen = jnp.take_along_axis(log_probs, nearest[..., None], axis=-1)[..., 0]
        # As a factor, NaN also reaches the gradient.
        exists = jnp.where(classes == nearest, 1, jnp.nan)
        return (chosen * exists).astype(self.logits.dtype)

    def entropy(self) -> Array:
        """Return the entropy for each example."""
        log_probs = jax.nn.log_softmax(widened(self.logits))
        return -_weighted_sum(jnp.exp(log_probs), log_probs).astype(self.logits.dtype)


@dataclass(frozen=True, eq=False)
class OneHotCategorical(Categorical):
    """One of the classes along the last axis, as a one-hot vector.

    Arguments:
        logits: Log-probabilities, up to a constant per example.
    """

    def sample(self, *, seed: Array) -> Array:
        """Sample a one-hot vector per example with a random key."""
        classes = super().sample(seed=seed)
        return jax.nn.one_hot(classes, self.logits.shape[-1], dtype=self.logits.dtype)

    def log_prob(self, value: ArrayLike) -> Array:
        """Return the log-probability of each example's class; fractions interpolate."""
        log_probs = jax.nn.log_softmax(widened(self.logits))
        weights = jnp.asarray(value).astype(log_probs.dtype)
        return _weighted_sum(weights, log_probs).astype(self.logits.dtype)


def _weighted_sum(weights: Array, log_probs: Array) -> Array:
    """Sum over classes, with `0 * -inf = 0` for an impossible class of zero weight."""
    return jnp.sum(weights * jnp.where(weights == 0, 0, log_probs), axis=-1)
