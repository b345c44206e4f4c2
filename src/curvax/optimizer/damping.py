"""The damping rule of Levenberg and Marquardt (Martens & Grosse 2015, section 6.5).

Every few steps the damping follows the ratio rho of the change of the loss to the change that the
quadratic model predicted. Where the model was good the damping falls, so that steps become longer;
where it was bad, or the new loss is not finite, it rises.
"""

from typing import Any

import jax.numpy as jnp

from curvax._types import Array
from curvax.optimizer.config import KFACConfig

_LARGEST_FACTOR = 1e4
"""Upper bound on what a given or scheduled damping is multiplied by, so that it comes back."""


def damping_decay_factor(config: KFACConfig) -> Any:
    """Return the factor by which the damping falls at once; it rises by the inverse."""
    return config.damping_adaptation_decay**config.damping_adaptation_interval


def is_damping_due(config: KFACConfig, step: Any) -> Any:
    """Return whether a step adapts the damping."""
    return (step + 1) % config.damping_adaptation_interval == 0


def next_factor(config: KFACConfig, factor: Array, is_taken: Array) -> Array:
    """Return what a given or scheduled damping is multiplied by in the next step.

    It rises with each step that is not taken, and returns to one with those that are.
    """
    decay = jnp.asarray(config.damping_adaptation_decay, factor.dtype)
    increase = jnp.asarray(config.reject_damping_increase_factor, factor.dtype)
    falling = jnp.maximum(1, factor * decay)
    return jnp.where(is_taken, falling, jnp.minimum(factor * increase, _LARGEST_FACTOR))


def next_damping(
    config: KFACConfig,
    damping: Array,
    step: Array,
    is_taken: Array,
    loss: Array,
    new_loss: Array,
    change: Array,
) -> Array:
    """Return an adaptive damping after a step.

    Arguments:
        config: The options.
        damping: The damping of the step.
        step: The index of the step.
        is_taken: Whether the step was taken.
        loss: The loss before the step.
        new_loss: The loss after it.
        change: The change of the loss that the quadratic model predicted.
    """
    adapted = _adapted(config, damping, loss.astype(new_loss.dtype), new_loss, change)
    usual = jnp.where(is_damping_due(config, step), adapted, damping)
    return jnp.where(is_taken, usual, _raised(config, damping))


def _adapted(
    config: KFACConfig, damping: Array, loss: Array, new_loss: Array, change: Array
) -> Array:
    """Return the damping from the loss before and after a step and its predicted change.

    Changes within the rounding error of the loss say nothing. A model that predicts that the loss
    rises, which happens if the learning rate is too large for it, is never a good one.
    """
    factor = jnp.asarray(damping_decay_factor(config), damping.dtype)
    difference = new_loss - loss
    rho = difference / change
    noise = 10 * jnp.finfo(damping.dtype).eps * jnp.abs(loss)
    is_noise = (jnp.abs(difference) <= noise) & (jnp.abs(change) <= noise)
    is_good = (rho > config.damping_upper_threshold) & (change < 0)
    is_fair = jnp.where(change < 0, rho >= config.damping_lower_threshold, difference <= 0)
    falling = jnp.where(is_good, damping * factor, damping)
    adapted = jnp.where(is_fair, falling, _increased(config, damping, 1 / factor, 1e8))
    return _clipped(config, jnp.where(is_noise, damping, adapted))


def _raised(config: KFACConfig, damping: Array) -> Array:
    """Return the damping after a step that was not taken.

    At most 10⁴ times the initial damping, unless it was above that already: so that it comes back.
    """
    factor = jnp.asarray(config.reject_damping_increase_factor, damping.dtype)
    return _clipped(config, _increased(config, damping, factor, 1e4))


def _increased(config: KFACConfig, damping: Array, factor: Array, limit: float) -> Array:
    initial = jnp.asarray(config.initial_damping, damping.dtype)
    ceiling = initial * jnp.asarray(limit, damping.dtype)
    return jnp.maximum(damping, jnp.minimum(damping * factor, ceiling))


def _clipped(config: KFACConfig, damping: Array) -> Array:
    low, high = (jnp.asarray(x, damping.dtype) for x in (config.min_damping, config.max_damping))
    return jnp.clip(damping, low, high)
