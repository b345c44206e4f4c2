"""`Move`: an update of the parameters, with how it was made."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from curvax._types import Array, PyTree
from curvax.linalg import all_finite
from curvax.optimizer._quadratic import QuadraticModel

__all__ = ["Move"]


class Move(NamedTuple):
    """A sum of vectors times coefficients: those of the direction and of the last update.

    `scaled_norm` is the inner product of the gradient and the direction, times the square of the
    learning rate.
    """

    update: PyTree
    vectors: tuple[PyTree, PyTree]
    coefficients: Sequence[Array]
    scaled_norm: Array
    model: QuadraticModel | None

    @property
    def is_finite(self) -> Array:
        """Whether the update is, if the last one was; the answer may be no for what is huge.

        The norm is a sum over elements of the gradient times those of the direction, and so it is
        not finite if one of them is not, whatever the other is. But it does not tell whether an
        update that is finite is still so in a dtype of a smaller range.
        """
        numbers = jnp.isfinite(jnp.stack([self.scaled_norm, *self.coefficients]))
        largest = jnp.finfo(self.scaled_norm.dtype).max
        narrow = [x for x in jax.tree.leaves(self.update) if jnp.finfo(x.dtype).max < largest]
        return jnp.all(numbers) & all_finite(narrow)
