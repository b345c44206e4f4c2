"""Learning rate, momentum and damping: each a number, a schedule, or adaptive.

A number is passed to each step; a schedule and `ADAPTIVE` are part of the configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from curvax._errors import where
from curvax._types import Array

__all__ = ["ADAPTIVE", "Adaptive", "Hyperparameter", "Schedule", "as_scalar", "check_given"]


Schedule = Callable[[Any], Any]
"""From the index of a step to a value."""


@dataclass(frozen=True)
class Adaptive:
    """Chosen in each step: by a quadratic model, or by the Levenberg-Marquardt rule."""


ADAPTIVE = Adaptive()

Hyperparameter = Schedule | Adaptive | None
"""Where the value comes from; None for a number that is passed to each step."""


def check_given(name: str, hyperparameter: Hyperparameter, value: Any) -> None:
    """Check that `step` was given a number exactly if the configuration has no other source."""
    if hyperparameter is None:
        if value is None:
            raise ValueError(
                f"{where()}: give {name}= to step, or one of {name}_schedule and "
                f"use_adaptive_{name} to the constructor."
            )
    elif value is not None:
        is_adaptive = isinstance(hyperparameter, Adaptive)
        adaptive = f"the constructor has use_adaptive_{name}=True"
        reason = adaptive if is_adaptive else f"{name}_schedule was given to the constructor"
        raise ValueError(f"{where()}: step was given {name}={value}, but {reason}. Leave it out.")


def as_scalar(name: str, value: Any, dtype: Any) -> Array | None:
    """Return a number as an array of one dtype, so that all spellings share a program."""
    if value is None:
        return None
    if jnp.shape(value):
        raise ValueError(
            f"{where()}: {name} is one number, got an array of shape {jnp.shape(value)}. "
            f"With several devices, too, it is given once."
        )
    return jnp.asarray(value, dtype)
