"""A quadratic model of the loss in the span of a few vectors, and its minimum.

For an update `w₁ v₁ + w₂ v₂ + …` with coefficients `w`, the model predicts that the loss changes by

    ½ wᵀ (A + damping · D) w + bᵀ w,

where `A = Vᵀ (C + l2_reg · I) V` for the curvature C, with the identity I of the parameters that
are regularised, `D = Vᵀ V`, and `b = Vᵀ g` for the gradient g. Its minimum over learning rate and
momentum is section 7 of Martens & Grosse (2015), "Optimizing neural networks with
Kronecker-factored approximate curvature".
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array


class QuadraticModel(NamedTuple):
    """The matrices A and D and the vector b of a quadratic model of the loss.

    The predicted change of the loss is `½ wᵀ (A + damping · D) w + bᵀ w`.

    Attributes:
        curvature: The matrix A of products `vᵢᵀ (C + l2_reg · I) vⱼ`, with the curvature C of the
            loss and the identity I of the parameters that are regularised.
        identity: The identity, projected: the matrix D of inner products `vᵢᵀ vⱼ`.
        gradient: The vector b of inner products `vᵢᵀ g`.
    """

    curvature: Array
    identity: Array
    gradient: Array

    def change(self, coefficients: Sequence[ArrayLike], damping: ArrayLike) -> Array:
        """Return the predicted change of the loss."""
        w = jnp.stack([jnp.asarray(c, self.gradient.dtype) for c in coefficients])
        return w @ (self._matrix(damping) @ w) / 2 + self.gradient @ w

    def minimiser(self, damping: ArrayLike, fixed: Sequence[ArrayLike | None]) -> list[Array]:
        """Return the coefficients that minimise the model.

        `fixed` has one entry per vector: its coefficient, or None if it is free. At most two may be
        free. A direction along which the model is not curved upward beyond rounding, for
        example because a vector is zero or linearly dependent on the others, gets a coefficient of
        zero.
        """
        matrix, b = self._matrix(damping), self.gradient
        known = [None if c is None else jnp.asarray(c, b.dtype) for c in fixed]
        free = [k for k, c in enumerate(known) if c is None]
        # The gradient of the model where free coefficients are zero.
        slope = list(b)
        for k, c in enumerate(known):
            if c is not None:
                slope = [s + matrix[j, k] * c for j, s in enumerate(slope)]
        solved: dict[int, Array] = {}
        if len(free) == 1:
            (k,) = free
            solved[k] = _quotient(-slope[k], matrix[k, k], matrix[k, k])
        elif free:
            # Gaussian elimination of the first coefficient; `rest` is the Schur complement.
            first, second = free
            pivot, coupling = matrix[first, first], matrix[first, second]
            ratio = _quotient(coupling, pivot, pivot)
            rest = matrix[second, second] - ratio * coupling
            numerator = ratio * slope[first] - slope[second]
            solved[second] = _quotient(numerator, rest, matrix[second, second])
            solved[first] = _quotient(-slope[first] - coupling * solved[second], pivot, pivot)
        return [solved[k] if c is None else c for k, c in enumerate(known)]

    def _matrix(self, damping: ArrayLike) -> Array:
        return self.curvature + jnp.asarray(damping, self.identity.dtype) * self.identity


def _quotient(numerator: Array, pivot: Array, scale: Array) -> Array:
    """Return the quotient, or zero where the pivot is not positive beyond rounding of `scale`."""
    is_nonzero = pivot > 10 * jnp.finfo(pivot.dtype).eps * scale
    return jnp.where(is_nonzero, numerator / jnp.where(is_nonzero, pivot, 1), 0)
