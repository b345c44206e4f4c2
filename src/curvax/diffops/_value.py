"""What a function of the user's returns: its value, and perhaps an auxiliary one beside it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from curvax._types import Fun, PyTree
from curvax.diffops._function import TracedFunction

__all__ = ["check_scalar", "linear_map", "value_shapes"]


def value_shapes(f: TracedFunction, has_aux: bool, where: str) -> PyTree:
    """The shapes of the value that `f` returns."""
    returned = f.outputs
    if not has_aux:
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{where}: with has_aux=True, f must return a pair (value, aux), got {returned}."
        )
    return returned[0]


def check_scalar(f: TracedFunction, has_aux: bool, where: str) -> None:
    """Check that `f` returns one real number."""
    returned = value_shapes(f, has_aux, where)
    real = hasattr(returned, "dtype") and jnp.issubdtype(returned.dtype, jnp.floating)
    if not real or returned.shape != ():
        raise TypeError(
            f"{where}: f must return a real floating-point scalar, got {returned}. If it returns "
            f"(value, aux), say has_aux=True where that is taken; for a function of several values "
            f"see curvax.jacobian and curvax.gauss_newton."
        )


def linear_map(
    transform: Callable[..., tuple[Any, ...]], f: Fun, x: PyTree, has_aux: bool
) -> tuple[Any, PyTree]:
    """The linear map that `jax.linearize` or `jax.vjp` makes of `f` at `x`, and what is beside."""
    _, mapped, *aux = transform(f, x, has_aux=has_aux)
    return mapped, aux[0] if aux else None
