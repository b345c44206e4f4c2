"""The Levenberg-Marquardt damping rule of K-FAC.

The rule is that of section 6.5 of Martens & Grosse (2015), "Optimizing neural networks with
Kronecker-factored approximate curvature". Every few steps it compares the change of the loss with
the change that the quadratic model predicted. Their ratio rho is near one where the model is good;
then the damping decreases, and steps become longer. Where rho is small, or the new loss is not
finite, the damping increases.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from curvax._types import Array
from curvax.optimizer.config import KFACConfig, Number

_LARGEST_FACTOR = 1e4
"""Upper bound on the factor of a given or scheduled damping, so that it can return to one."""


def damping_decay_factor(config: KFACConfig) -> Number:
    """Return the factor of one decrease of the damping; an increase divides by it."""
    return config.damping_adaptation_decay**config.damping_adaptation_interval


def is_damping_due(config: KFACConfig, step: Array) -> Array:
    """Return whether the step of this index updates the damping."""
    return (step + 1) % config.damping_adaptation_interval == 0


def next_factor(config: KFACConfig, factor: Array, is_taken: Array) -> Array:
    """Return the factor by which the next step multiplies a given or scheduled damping.

    It grows with each step that is not taken, and decays to one with those that are.
    """
    decay = jnp.asarray(config.damping_adaptation_decay, factor.dtype)
    increase = jnp.asarray(config.reject_damping_increase_factor, factor.dtype)
    decayed = jnp.maximum(1, factor * decay)
    return jnp.where(is_taken, decayed, jnp.minimum(factor * increase, _LARGEST_FACTOR))


def next_damping(
    config: KFACConfig,
    damping: Array,
    step: Array,
    is_taken: Array,
    loss: Array,
    new_loss: Array,
    change: Array,
) -> Array:
    """Return the adaptive damping after a step.

    Arguments:
        config: The options.
        damping: The damping of the step.
        step: The index of the step.
        is_taken: Whether the step was taken, neither skipped nor rejected.
        loss: The loss before the step.
        new_loss: The loss after the step.
        change: The change of the loss that the quadratic model predicted.
    """
    new = adapted(config, damping, loss.astype(new_loss.dtype), new_loss, change)
    usual = jnp.where(is_damping_due(config, step), new, damping)
    return jnp.where(is_taken, usual, _after_failed_step(config, damping))


def adapted(
    config: KFACConfig, damping: Array, loss: Array, new_loss: Array, change: Array
) -> Array:
    """Apply the rule to the loss before and after a step, and its predicted change.

    Two exceptions: changes within the rounding error of the loss carry no information, so the
    damping stays. And a model that predicts an increase of the loss, as it does for too large a
    learning rate, is never good.
    """
    factor = jnp.asarray(damping_decay_factor(config), damping.dtype)
    difference = new_loss - loss
    rho = difference / change
    noise = 10 * jnp.finfo(damping.dtype).eps * jnp.abs(loss)
    is_noise = (jnp.abs(difference) <= noise) & (jnp.abs(change) <= noise)
    is_good = (rho > config.damping_upper_threshold) & (change < 0)
    is_fair = jnp.where(change < 0, rho >= config.damping_lower_threshold, difference <= 0)
    decreased = jnp.where(is_good, damping * factor, damping)
    new = jnp.where(is_fair, decreased, _increased(config, damping, 1 / factor, 1e8))
    return _clipped(config, jnp.where(is_noise, damping, new))


def calibrated(next_value: Callable[[Array], Array], damping: Array) -> Array:
    """Apply a rule until it keeps the damping, and return that.

    A rule may also alternate between two neighbouring values, of which the larger is returned.
    """

    def is_close(x: Array, y: Array) -> Array:
        return jnp.abs(x - y) <= 1e-3 * jnp.maximum(x, y)

    def is_settled(values: tuple[Array, Array, Array]) -> Array:
        before, last, new = values
        return is_close(last, new) | is_close(before, new)

    start = (jnp.full_like(damping, -1), damping, next_value(damping))
    advance = lambda values: (values[1], values[2], next_value(values[2]))
    _, last, new = lax.while_loop(lambda values: ~is_settled(values), advance, start)
    return jnp.maximum(last, new)


def _after_failed_step(config: KFACConfig, damping: Array) -> Array:
    """Return the damping after a step that was skipped or rejected.

    It grows to at most 10⁴ times the initial damping, from where it can decrease again.
    """
    factor = jnp.asarray(config.reject_damping_increase_factor, damping.dtype)
    return _clipped(config, _increased(config, damping, factor, 1e4))


def _increased(config: KFACConfig, damping: Array, factor: Array, limit: float) -> Array:
    """Multiply by the factor, up to `limit` times the initial damping; never decrease."""
    initial = jnp.asarray(config.initial_damping, damping.dtype)
    ceiling = initial * jnp.asarray(limit, damping.dtype)
    return jnp.maximum(damping, jnp.minimum(damping * factor, ceiling))


def _clipped(config: KFACConfig, damping: Array) -> Array:
    low, high = (jnp.asarray(x, damping.dtype) for x in (config.min_damping, config.max_damping))
    return jnp.clip(damping, low, high)
