"""`WeightedMovingAverage`: an exponential moving average with bias correction."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from curvax._cpu import all_finite
from curvax._types import Array, PyTree


@jax.tree_util.register_dataclass
@dataclass
class WeightedMovingAverage:
    """A weighted sum of values over time, with the sum of the weights.

    The value is their quotient, so that an average that was initialised with zeros is not biased
    towards zero. A value that is not finite is rejected: the average does not change, and the count
    of such values increases by one.

    Attributes:
        weight: The sum of the weights.
        raw_value: The weighted sum: an array or a pytree of arrays.
        refused: The number of values that were rejected because they were not finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> average = curvax.WeightedMovingAverage.zeros_array((2,))
        >>> average = average.update(jnp.array([1.0, 3.0]), 0.9, 0.1)
        >>> average.value
        Array([1., 3.], dtype=float32)
    """

    weight: Any  # JAX unflattens pytrees with leaves of any type.
    raw_value: PyTree
    refused: Any = field(default_factory=lambda: jnp.zeros((), jnp.int32))

    @classmethod
    def zeros_array(
        cls, shape: Sequence[int], dtype: DTypeLike = jnp.float32
    ) -> "WeightedMovingAverage":
        """Return an average of arrays of this shape, before any update.

        Arguments:
            shape: The shape of the arrays.
            dtype: The dtype of the arrays.

        Returns:
            The average, with weight zero.

        Examples:
            >>> import curvax
            >>> curvax.WeightedMovingAverage.zeros_array((2,)).value
            Array([0., 0.], dtype=float32)
        """
        return cls.zeros_like(jax.ShapeDtypeStruct(tuple(shape), dtype))

    @classmethod
    def zeros_like(cls, value: PyTree) -> "WeightedMovingAverage":
        """Return an average of values like this one, before any update.

        Arguments:
            value: A pytree of arrays or of `jax.ShapeDtypeStruct`s.

        Returns:
            The average, with weight zero.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> average = curvax.WeightedMovingAverage.zeros_like({"a": jnp.ones(2)})
            >>> average.value
            {'a': Array([0., 0.], dtype=float32)}
        """
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value)
        dtype = jnp.result_type(*jax.tree.leaves(zeros))
        return cls(jnp.zeros((), dtype), zeros)

    @property
    def value(self) -> PyTree:
        """The average; zero before any update."""
        return jax.tree.map(lambda x: self.scale.astype(x.dtype) * x, self.raw_value)

    @property
    def scale(self) -> Array:
        """The factor between the weighted sum and the average."""
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
            value: A value of the structure and the shapes of the average.
            old_weight_multiplier: Factor of the sum and the weight so far.
            new_weight: Weight of the value.
            is_finite: Whether the value is finite, if that is known; otherwise it is checked.

        Returns:
            The average itself.

        Raises:
            ValueError: If the value has another structure or other shapes.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> average = curvax.WeightedMovingAverage.zeros_array(())
            >>> for value in 2.0, 4.0, jnp.inf:  # The last is rejected.
            ...     average = average.update(jnp.asarray(value), 1.0, 1.0)
            >>> float(average.value), int(average.refused)
            (3.0, 1)
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
        """Return the average updated with a value.

        Equal to `update`, except that this average does not change.

        Arguments:
            value: A value of the structure and the shapes of the average.
            old_weight_multiplier: Factor of the sum and the weight so far.
            new_weight: Weight of the value.
            is_finite: Whether the value is finite, if that is known; otherwise it is checked.

        Returns:
            A new average.

        Raises:
            ValueError: If the value has another structure or other shapes.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> before = curvax.WeightedMovingAverage.zeros_array(())
            >>> after = before.updated(jnp.asarray(2.0), 1.0, 1.0)
            >>> float(before.value), float(after.value)
            (0.0, 2.0)
        """
        _check_like(self.raw_value, value)
        if is_finite is None:
            is_finite = all_finite(value)

        def averaged(old: Array, new: Array) -> Array:
            old_weight, weight = (
                jnp.asarray(w).astype(old.dtype) for w in (old_weight_multiplier, new_weight)
            )
            total = old * old_weight + jnp.asarray(new).astype(old.dtype) * weight
            return jnp.where(is_finite, total, old)

        new = self.copy()  # Of the same class, which may be a subclass.
        new.weight = averaged(self.weight, jnp.ones((), self.weight.dtype))
        new.raw_value = jax.tree.map(averaged, self.raw_value, value)
        new.refused = self.refused + jnp.where(is_finite, 0, 1).astype(self.refused.dtype)
        return new

    def sync(self, pmap_axis_name: str | None) -> "WeightedMovingAverage":
        """Average over the devices of a mapped axis, in place.

        Arguments:
            pmap_axis_name: Name of the axis; with None nothing happens.

        Returns:
            The average itself.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def mean(x):
            ...     average = curvax.WeightedMovingAverage.zeros_array(())
            ...     return average.update(x, 0.0, 1.0).sync("devices").value
            >>> jax.vmap(mean, axis_name="devices")(jnp.array([1.0, 3.0]))
            Array([2., 2.], dtype=float32)
        """
        if pmap_axis_name is not None:
            averaged = lax.pmean((self.raw_value, self.weight), pmap_axis_name)
            self.raw_value, self.weight = averaged
            self.refused = lax.pmax(self.refused, pmap_axis_name)
        return self

    def copy(self) -> "WeightedMovingAverage":
        """Return a copy, which later updates in place do not affect.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> average = curvax.WeightedMovingAverage.zeros_array(())
            >>> copy = average.copy()
            >>> average = average.update(jnp.asarray(2.0), 1.0, 1.0)
            >>> float(copy.value)
            0.0
        """
        return jax.tree.map(lambda x: x, self)


def _check_like(average: PyTree, value: PyTree) -> None:
    described = lambda tree: (
        jax.tree.structure(tree),
        [jnp.shape(x) for x in jax.tree.leaves(tree)],
    )
    if described(average) != described(value):
        raise ValueError(
            f"curvax.WeightedMovingAverage: the average is one of {described(average)}, but got a "
            f"value of {described(value)}."
        )
