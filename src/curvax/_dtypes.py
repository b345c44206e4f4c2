"""Dtypes: at least single precision for sums, and the promotion of weak types in a carry."""

from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array

__all__ = ["at_least_single", "promote_weak"]


def at_least_single(dtype: Any) -> Any:
    """Return the dtype to compute and sum in: float32 in place of half precision."""
    is_half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_half else jnp.dtype(dtype)


def promote_weak(carry: Array, returned: Any) -> Array:
    """Promote an initial carry of weak type to the dtype that a loop's body returns.

    Equal to what `jax.lax.scan` does with Python numbers in its `init`.
    """
    is_weak = jax.typeof(carry).weak_type and carry.dtype != returned.dtype
    return carry.astype(jnp.result_type(carry, returned)) if is_weak else carry
