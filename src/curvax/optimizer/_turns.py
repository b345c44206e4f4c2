"""What is done only in some steps."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax

from curvax import _compat

__all__ = ["is_turn", "run_if"]

T = TypeVar("T")


def is_turn(step: Any, period: int, turn: int = 0) -> Any:
    """Whether it is the turn of what is done once in a period."""
    return period == 1 or step % period == turn


def run_if(flag: Any, fun: Callable[[T], T], state: T) -> T:
    """`fun(state)` if the flag is set, else the state.

    While tracing it is a loop of at most one step, not a `lax.cond`: that would copy the state,
    which may be as large as all inverses, also in steps in which nothing is done.
    """
    if not _compat.is_tracer(flag):
        return fun(state) if flag else state
    carry = (jnp.asarray(flag, bool), state)
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), fun(c[1])), carry)[1]
