"""`WeightedMovingAverage`: an average over time that knows its own weight."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from curvax._cpu import all_finite
from curvax._types import Array, PyTree


@jax.tree_util.register_dataclass
@dataclass
class WeightedMovingAverage:
    """A weighted sum of values over time, with the sum of the weights.

    Its value is the quotient, so that an average that began with zeros is not biased towards them.
    A value that is not finite is refused: the average stays what it was, and the count of such
    values goes up.

    Attributes:
        weight: the sum of the weights.
        raw_value: the weighted sum, an array or a pytree of arrays.
        refused: how many values were not finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> average = curvax.WeightedMovingAverage.zeros_array((2,))
        >>> average = average.update(jnp.array([1.0, 3.0]), 0.9, 0.1)
        >>> average.value
        Array([1., 3.], dtype=float32)
    """

    weight: Any  # Leaves of a pytree may be anything.
    raw_value: PyTree
    refused: Any = field(default_factory=lambda: jnp.zeros((), jnp.int32))

    @classmethod
    def zeros_array(cls, shape: Sequence[int], dtype: Any = jnp.float32) -> "WeightedMovingAverage":
        """An average of nothing yet, of arrays of this shape."""
        return cls.zeros_like(jax.ShapeDtypeStruct(tuple(shape), dtype))

    @classmethod
    def zeros_like(cls, value: PyTree) -> "WeightedMovingAverage":
        """An average of nothing yet, of values like this: arrays, or their shapes."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value)
        dtype = jnp.result_type(*jax.tree.leaves(zeros))
        return cls(jnp.zeros((), dtype), zeros)

    @property
    def value(self) -> PyTree:
        """The average; zero if there was no value yet."""
        return jax.tree.map(lambda x: self.scale.astype(x.dtype) * x, self.raw_value)

    @property
    def scale(self) -> Any:
        """What the weighted sum is multiplied by to be the average."""
        return 1 / jnp.where(self.weight == 0, 1, self.weight)

    def update(
        self,
        value: PyTree,
        old_weight_multiplier: ArrayLike,
        new_weight: ArrayLike,
        *,
        is_finite: ArrayLike | None = None,
    ) -> "WeightedMovingAverage":
        """Update the average with a value, in place.

        Arguments:
            value: a value like those before.
            old_weight_multiplier: what everything so far is multiplied with.
            new_weight: the weight of this value.
            is_finite: whether the value is finite, if that is known. Otherwise all of it is looked
                at.

        Returns:
            The average itself.

        Raises:
            ValueError: if the value has another structure or other shapes.
        """
        new = self.updated(value, old_weight_multiplier, new_weight, is_finite=is_finite)
        self.weight, self.raw_value, self.refused = new.weight, new.raw_value, new.refused
        return self

    def updated(
        self,
        value: PyTree,
        old_weight_multiplier: ArrayLike,
        new_weight: ArrayLike,
        *,
        is_finite: ArrayLike | None = None,
    ) -> "WeightedMovingAverage":
        """Equal to `update`, except that this average stays as it is and another is returned."""
        _check_alike(self.raw_value, value)
        if is_finite is None:
            is_finite = all_finite(value)

        def averaged(old: Array, new: Array) -> Array:
            old_weight, weight = (
                jnp.asarray(w).astype(old.dtype) for w in (old_weight_multiplier, new_weight)
            )
            total = old * old_weight + jnp.asarray(new).astype(old.dtype) * weight
            return jnp.where(is_finite, total, old)

        return WeightedMovingAverage(
            averaged(self.weight, jnp.ones((), self.weight.dtype)),
            jax.tree.map(averaged, self.raw_value, value),
            self.refused + jnp.where(is_finite, 0, 1).astype(self.refused.dtype),
        )

    def sync(self, pmap_axis_name: str | None) -> "WeightedMovingAverage":
        """Average over the devices of a mapped axis, in place; nothing if the name is None."""
        if pmap_axis_name is not None:
            averaged = lax.pmean((self.raw_value, self.weight), pmap_axis_name)
            self.raw_value, self.weight = averaged
            self.refused = lax.pmax(self.refused, pmap_axis_name)
        return self

    def copy(self) -> "WeightedMovingAverage":
        """Another average with the same value, that is changed on its own."""
        return jax.tree.map(lambda x: x, self)


def _check_alike(before: PyTree, value: PyTree) -> None:
    described = lambda tree: (
        jax.tree.structure(tree),
        [jnp.shape(x) for x in jax.tree.leaves(tree)],
    )
    if described(before) != described(value):
        raise ValueError(
            f"curvax.WeightedMovingAverage: the average is one of {described(before)}, but got a "
            f"value of {described(value)}."
        )
