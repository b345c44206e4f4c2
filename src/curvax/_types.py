"""Type aliases that signatures are written in, and the dtypes to compute in."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as Array
from jax.typing import ArrayLike as ArrayLike, DTypeLike as DTypeLike
from jaxtyping import Float as Float

PyTree: TypeAlias = Any
"""A pytree as JAX defines it, with arrays for leaves unless stated otherwise."""

Fun: TypeAlias = Callable[..., Any]
"""A user-supplied function from pytrees to a pytree."""

DType: TypeAlias = np.dtype[np.generic]
"""A dtype of NumPy or of `ml_dtypes`, such as bfloat16."""

Axes: TypeAlias = int | Sequence[Any] | PyTree | None
"""`in_axes` or `out_axes` of `jax.vmap`: an axis, None, or a pytree prefix of these."""

Size: TypeAlias = int | Array
"""A count or an index: a Python int where it shapes the program, possibly traced elsewhere."""

Order: TypeAlias = Literal["strided", "contiguous"]
"""Assignment of examples to microbatches."""

VmapFn: TypeAlias = Callable[..., Fun]
"""A function with the signature of `jax.vmap`."""

TreeDef: TypeAlias = Any
"""The structure of a pytree. `jax.tree_util.PyTreeDef` has no stubs, so it is no static type."""

Carry: TypeAlias = PyTree
"""The carry of a loop."""


def at_least_single(dtype: DTypeLike) -> DType:
    """Return the dtype to compute and accumulate in: float32 instead of half precision."""
    is_half = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_half else jnp.dtype(dtype)


def promote_weak(carry: Array, returned: Array | jax.ShapeDtypeStruct) -> Array:
    """Promote an initial carry of weak type to the dtype that the loop body returns.

    Equal to what `jax.lax.scan` does with Python scalars in its `init`.
    """
    is_weak = jax.typeof(carry).weak_type and carry.dtype != returned.dtype
    return carry.astype(jnp.result_type(carry, returned)) if is_weak else carry
