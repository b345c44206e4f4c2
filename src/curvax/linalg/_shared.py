"""`shared`: functions that occur in many places of a program and are compiled once."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from curvax import _compat

__all__ = ["shared"]


def shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jit(function)`, except that on CPUs it also stays a function in the compiled program.

    What is called is usually put in place of each call, and made one with what is around it there,
    so that each place has kernels of its own. It takes XLA some 15 ms to compile a kernel for CPUs,
    but kernels that are the same it compiles once. Arguments with names are static.
    """
    parameters = inspect.signature(function).parameters.values()
    static_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    jitted = jax.jit(function, static_argnames=static_names)

    @functools.cache
    def branches(**static: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        plain = functools.partial(jitted, **static)
        # Other platforms may not know what to do with a call.
        return plain, lambda *args: _compat.kept_as_call(plain(*args))

    @functools.wraps(function)
    def call(*args: Any, **static: Any) -> Any:
        plain, kept = branches(**static)
        return lax.platform_dependent(*args, cpu=kept, default=plain)

    return call
