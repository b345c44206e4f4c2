"""What is checked when a loss is registered, with the messages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array

__all__ = ["check_mask", "check_predictions", "check_same_shape", "check_variance", "check_weight"]


def check_predictions(x: ArrayLike, name: str, *, min_ndim: int = 0) -> Array:
    """Predictions as an array of real floating-point numbers."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{where()}: {name} must be real floating-point numbers, got {array.dtype}. Curvature "
            f"is taken in them; convert them if they are meant to be real."
        )
    if array.ndim < min_ndim:
        raise ValueError(
            f"{where()}: {name} must have at least {min_ndim} axis, got the shape {array.shape}."
        )
    return array


def check_same_shape(targets: ArrayLike, predictions: Array, name: str) -> Array:
    """Targets as an array of the shape of the predictions, which `name` calls."""
    array = jnp.asarray(targets)
    if array.shape != predictions.shape:
        raise ValueError(
            f"{where()}: targets must have the shape of {name}, {predictions.shape}, got "
            f"{array.shape}. Reshape or broadcast them first."
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{where()}: targets must be real numbers, got {array.dtype}.")
    return array


def check_mask(mask: ArrayLike, logits: Array) -> Array:
    """A mask as an array of one number for each example."""
    array, expected = jnp.asarray(mask), logits.shape[:-1]
    if array.shape != expected:
        raise ValueError(
            f"{where()}: a mask says of each example whether it counts, so for logits of shape "
            f"{logits.shape} its shape is {expected}, got {array.shape}."
        )
    return array


def check_weight(weight: ArrayLike, predictions: Array) -> Array:
    """A weight as an array: a scalar, or one number for each example; not negative."""
    array = _of_examples(weight, "weight", predictions)
    if _is_known(weight) and np.any(np.less(weight, 0)):
        raise ValueError(
            f"{where()}: weight must not be negative, got {weight!r}: curvature would be negative "
            f"too. Put the sign into the loss itself."
        )
    return array


def check_variance(variance: ArrayLike, predictions: Array) -> Array:
    """A variance as an array: a scalar, or one number for each example; positive."""
    array = _of_examples(variance, "variance", predictions)
    if _is_known(variance) and np.any(np.less_equal(variance, 0)):
        raise ValueError(f"{where()}: variance must be positive, got {variance!r}.")
    return array


def _is_known(x: Any) -> bool:
    """Whether the numbers are at hand, without waiting for a device."""
    return not isinstance(x, jax.Array)


def _of_examples(x: ArrayLike, name: str, predictions: Array) -> Array:
    array = jnp.asarray(x)
    if array.shape not in ((), predictions.shape[:1]):
        raise ValueError(
            f"{where()}: {name} must be a number, or one for each example in an array of shape "
            f"{predictions.shape[:1]}, got the shape {array.shape}."
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{where()}: {name} must be real, got {array.dtype}.")
    return array
