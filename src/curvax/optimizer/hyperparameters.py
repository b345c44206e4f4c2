"""Rules for learning rate, momentum and damping: given in each call, scheduled, or adaptive.

And what else there is to choose about a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from curvax._types import Array

__all__ = [
    "Adaptive",
    "Fixed",
    "Given",
    "LevenbergMarquardt",
    "Options",
    "Rule",
    "Rules",
    "Schedule",
    "Scheduled",
    "rule_of",
]


Schedule = Callable[[Any], Any]
"""From the number of a step to a value."""
_WHERE = "curvax.Optimizer"


@dataclass(frozen=True)
class Fixed:
    """A number that is given in each call of `step`."""

    name: str

    def check(self, given: Any) -> None:
        """What a call gives for it is as it should be."""
        if given is None:
            raise ValueError(
                f"{_WHERE}: give {self.name}= to step, or one of {self.name}_schedule and "
                f"use_adaptive_{self.name} to the constructor."
            )

    def value(self, step: Any, given: Any) -> Any:
        """The number in a step."""
        del step
        return given


@dataclass(frozen=True)
class Scheduled:
    """A number that a function of the step says."""

    name: str
    schedule: Schedule

    def check(self, given: Any) -> None:
        """What a call gives for it is as it should be."""
        _check_nothing(given, self.name, f"{self.name}_schedule was given to the constructor")

    def value(self, step: Any, given: Any) -> Any:
        """The number in a step."""
        del given
        return self.schedule(step)


@dataclass(frozen=True)
class Adaptive:
    """A number that is chosen in each step."""

    name: str

    def check(self, given: Any) -> None:
        """What a call gives for it is as it should be."""
        _check_nothing(given, self.name, f"the constructor has use_adaptive_{self.name}=True")

    def value(self, step: Any, given: Any) -> None:
        """None: it is not known beforehand."""
        del step, given


Rule = Fixed | Scheduled | Adaptive


@dataclass(frozen=True)
class Rules:
    """One for each of the three."""

    learning_rate: Rule
    momentum: Rule
    damping: Rule

    @property
    def adapt_coefficients(self) -> bool:
        """Whether the quadratic model decides about the step."""
        return isinstance(self.learning_rate, Adaptive) or isinstance(self.momentum, Adaptive)


class Given(NamedTuple):
    """What a call of `step` gives for the three."""

    learning_rate: Any = None
    momentum: Any = None
    damping: Any = None

    def as_arrays(self, dtype: Any) -> "Given":
        """Numbers as arrays of one type, so that it does not matter how they were written."""
        for name, value in self._asdict().items():
            if value is not None and jnp.shape(value):
                raise ValueError(
                    f"{_WHERE}: {name} is one number, got an array of shape {jnp.shape(value)}. "
                    f"With several devices, too, it is given once."
                )
        return Given(*(None if x is None else jnp.asarray(x, dtype) for x in self))


@dataclass(frozen=True)
class Options:
    """What else there is to choose."""

    norm_constraint: Any = None
    include_damping_in_quad_change: bool = False
    always_exact_model: bool = False
    use_step_rejection: bool = False
    reject_factor: Any = 2.0
    include_norms: bool = False
    include_param_norms: bool = False
    include_registered_loss: bool = False


@dataclass(frozen=True)
class LevenbergMarquardt:
    """How an adaptive damping follows the ratio of the change of the loss to what was expected.

    Where the model was good the damping falls, so that steps may be longer; where it was bad, or
    the new loss is not a number, it rises.
    """

    initial: Any
    smallest: Any
    largest: Any
    interval: int
    decay: Any
    lower: Any
    upper: Any

    @property
    def factor(self) -> Any:
        """By how much it changes at once."""
        return self.decay**self.interval

    def is_due(self, step: Any) -> Any:
        """Whether it is to be adapted in a step."""
        return (step + 1) % self.interval == 0

    def update(self, damping: Array, loss: Array, new_loss: Array, change: Array) -> Array:
        """The damping for the next steps, from the loss before and after, and the expected change.

        Changes that are within the rounding of the loss tell nothing. A model that expects the loss
        to rise, which happens if the learning rate is too large for it, is never a good one.
        """
        factor = jnp.asarray(self.factor, damping.dtype)
        difference = new_loss - loss
        rho = difference / change
        noise = 10 * jnp.finfo(damping.dtype).eps * jnp.abs(loss)
        is_noise = (jnp.abs(difference) <= noise) & (jnp.abs(change) <= noise)
        is_good = (rho > self.upper) & (change < 0)
        is_fair = jnp.where(change < 0, rho >= self.lower, difference <= 0)
        falling = jnp.where(is_good, damping * factor, damping)
        adapted = jnp.where(is_fair, falling, self._risen(damping, 1 / factor, 1e8))
        return self.clipped(jnp.where(is_noise, damping, adapted))

    def raised(self, damping: Array, factor: Any) -> Array:
        """The damping after trouble: larger, but not so large that it takes forever to come back.

        At most 10⁴ times the initial one, unless it was above that anyway.
        """
        return self.clipped(self._risen(damping, jnp.asarray(factor, damping.dtype), 1e4))

    def _risen(self, damping: Array, factor: Array, limit: float) -> Array:
        ceiling = jnp.asarray(self.initial, damping.dtype) * jnp.asarray(limit, damping.dtype)
        return jnp.maximum(damping, jnp.minimum(damping * factor, ceiling))

    def clipped(self, damping: Array) -> Array:
        """The damping within its bounds."""
        low, high = (jnp.asarray(x, damping.dtype) for x in (self.smallest, self.largest))
        return jnp.clip(damping, low, high)


def rule_of(name: str, is_adaptive: bool, schedule: Schedule | None) -> Rule:
    """The rule that arguments of the constructor say."""
    if is_adaptive and schedule is not None:
        raise ValueError(
            f"{_WHERE}: use_adaptive_{name}=True and {name}_schedule contradict each other; give "
            f"one of them."
        )
    if is_adaptive:
        return Adaptive(name)
    return Fixed(name) if schedule is None else Scheduled(name, schedule)


def _check_nothing(given: Any, name: str, reason: str) -> None:
    if given is not None:
        raise ValueError(f"{_WHERE}: step was given {name}={given}, but {reason}. Leave it out.")
