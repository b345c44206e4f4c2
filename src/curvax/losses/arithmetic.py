"""The arithmetic of batches that the losses share.

A loss computes in its own dtype, except that half precision is too coarse for logarithms and
exponentials: these are taken in float32, and what comes out is cast back. Numbers that belong to
whole examples (a weight, a variance) are scalars, or have the leading axes of what they scale.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, at_least_single

__all__ = [
    "Factor",
    "Shape",
    "columns",
    "over_examples",
    "replicated_one_hot",
    "sum_of_events",
    "transposed",
    "widened",
    "widest",
]


Shape = tuple[int, ...]
Factor = Callable[[Array], tuple[Array, ...]]


def widened(x: ArrayLike) -> Array:
    """Real numbers in the dtype in which to compute with them."""
    array = jnp.asarray(x)
    return array.astype(at_least_single(array.dtype))


def widest(arrays: Iterable[Array]) -> Any:
    """The dtype of the most bits among these arrays."""
    return max((x.dtype for x in arrays), key=lambda dtype: jnp.finfo(dtype).bits)


def over_examples(x: ArrayLike, like: Array) -> Array:
    """`x` with axes of length one at its end, so that it multiplies the examples of `like`."""
    array = jnp.asarray(x).astype(like.dtype)
    return array.reshape(array.shape + (1,) * (like.ndim - array.ndim)) if array.ndim else array


def columns(x: Array) -> Array:
    """A batch of arrays as they are, and a batch of numbers as one of vectors of length one."""
    return x if x.ndim > 1 else x[..., None]


def sum_of_events(x: Array) -> Array:
    """The sum over all axes but the first: one number for each example."""
    return jnp.sum(x, axis=tuple(range(1, x.ndim)))


def transposed(factor: Factor, shape: Shape, dtype: Any) -> Callable[[Sequence[Array]], Array]:
    """The transpose of a linear function of one array of this shape and dtype."""
    transpose = jax.linear_transpose(factor, jax.ShapeDtypeStruct(shape, dtype))

    def apply(vector: Sequence[Array]) -> Array:
        (product,) = transpose(tuple(vector))
        return product

    return apply


def replicated_one_hot(index: Sequence[int], shape: Shape, dtype: Any) -> Array:
    """Zeros, but for a one at `index` of each slice along the first axis."""
    if len(index) != len(shape) - 1:
        raise ValueError(
            f"curvax: the index of a replicated one-hot vector has one number for each axis but "
            f"the first of the factor's inner shape {shape}, got {tuple(index)}."
        )
    return jnp.zeros(shape, dtype).at[(slice(None), *index)].set(1)
