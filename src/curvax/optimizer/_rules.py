"""Rules for learning rate, momentum and damping: given in each call, scheduled, or adaptive."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from curvax._types import Array

__all__ = [
    "Adaptive",
    "Fixed",
    "LevenbergMarquardt",
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

    def update(self, damping: Array, rho: Array) -> Array:
        """The damping for the next steps."""
        factor = jnp.asarray(self.factor, damping.dtype)
        falling = jnp.where(rho > self.upper, damping * factor, damping)
        return self.clipped(jnp.where(rho >= self.lower, falling, damping / factor))

    def raised(self, damping: Array, factor: Any) -> Array:
        """The damping after trouble: larger, but not so large that it takes forever to come back.

        At most 10⁴ times the initial one, unless it was above that anyway.
        """
        ceiling = jnp.asarray(1e4 * self.initial, damping.dtype)
        larger = damping * jnp.asarray(factor, damping.dtype)
        return self.clipped(jnp.minimum(larger, jnp.maximum(damping, ceiling)))

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
