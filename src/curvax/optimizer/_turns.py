"""What is done only in some steps."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
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
    which may be as large as all inverses, also in steps in which nothing is done. The loop carries
    only what changes.
    """
    if not _compat.is_tracer(flag):
        return fun(state) if flag else state
    leaves, structure = jax.tree.flatten(state)
    traced, changed = _compat.trace_change(fun, state)
    mine = [number for number, is_changed in enumerate(changed) if is_changed]

    def body(carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        flag, own = carry
        current = dict(enumerate(leaves)) | dict(zip(mine, own, strict=True))
        found = traced([current[number] for number in range(len(leaves))])
        return jnp.zeros_like(flag), [found[number] for number in mine]

    start = (jnp.asarray(flag, bool), [jnp.asarray(leaves[number]) for number in mine])
    _, own = lax.while_loop(lambda carry: carry[0], body, start)
    for number, leaf in zip(mine, own, strict=True):
        leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)
