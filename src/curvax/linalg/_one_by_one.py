"""Factorisations of several matrices, on CPUs one after the other."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from curvax._types import Array

__all__ = ["one_by_one"]


def one_by_one(factorise: Callable[[Array], Any], matrices: Array) -> Any:
    """`factorise(matrices)`, of matrices along any axes in front.

    JAX 0.10 factorises a stack of matrices on several threads of a CPU and has one more wait for
    them. In a program with several stacks these threads can all be waiting, and it never ends: 16
    Cholesky factorisations of two matrices each are enough on two cores. Single matrices are
    factorised by the thread that asks for it.
    """
    if matrices.ndim == 2:
        return factorise(matrices)
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    found = lax.platform_dependent(
        stack, cpu=lambda each: lax.map(factorise, each), default=factorise
    )
    return jax.tree.map(lambda x: x.reshape(*matrices.shape[:-2], *x.shape[1:]), found)
