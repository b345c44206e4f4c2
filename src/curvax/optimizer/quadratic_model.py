"""A quadratic model of the loss, in the span of a few vectors, and its minimum.

For an update `w₁ v₁ + w₂ v₂ + …` with coefficients `w`, the model predicts that the loss changes by

    ½ wᵀ (A + damping · D) w + bᵀ w,

where `A = Vᵀ (C + L2) V` for the curvature C, `D = Vᵀ V` and `b = Vᵀ g` for the gradient g.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from curvax._types import Array


class QuadraticModel(NamedTuple):
    """The three parts of the model: A, D and b; see the module."""

    curvature: Array
    identity: Array
    gradient: Array

    def change(self, coefficients: Sequence[Any], damping: Any) -> Array:
        """Return the predicted change of the loss."""
        w = jnp.stack([jnp.asarray(c, self.gradient.dtype) for c in coefficients])
        return w @ (self._matrix(damping) @ w) / 2 + self.gradient @ w

    def minimiser(self, damping: Any, fixed: Sequence[Any]) -> list[Array]:
        """Return the coefficients of the minimum; of the at most two, some may be fixed.

        Directions along which the model is flat to rounding, because a vector is zero or linearly
        dependent on the others, get a coefficient of zero.
        """
        matrix, b = self._matrix(damping), self.gradient
        known = [None if c is None else jnp.asarray(c, b.dtype) for c in fixed]
        free = [k for k, c in enumerate(known) if c is None]
        slope = list(b)
        for k, c in enumerate(known):
            if c is not None:
                slope = [s + matrix[j, k] * c for j, s in enumerate(slope)]
        found: dict[int, Array] = {}
        if len(free) == 1:
            (k,) = free
            found[k] = _quotient(-slope[k], matrix[k, k], matrix[k, k])
        elif free:
            p, v = free
            share = _quotient(matrix[p, v], matrix[p, p], matrix[p, p])
            rest = matrix[v, v] - share * matrix[p, v]
            found[v] = _quotient(share * slope[p] - slope[v], rest, matrix[v, v])
            found[p] = _quotient(-slope[p] - matrix[p, v] * found[v], matrix[p, p], matrix[p, p])
        return [found[k] if c is None else c for k, c in enumerate(known)]

    def _matrix(self, damping: Any) -> Array:
        return self.curvature + jnp.asarray(damping, self.identity.dtype) * self.identity


def _quotient(numerator: Array, pivot: Array, scale: Array) -> Array:
    """Return the quotient, or zero where the pivot is zero to rounding."""
    told = pivot > 10 * jnp.finfo(pivot.dtype).eps * scale
    return jnp.where(told, numerator / jnp.where(told, pivot, 1), 0)
