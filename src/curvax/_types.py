"""Types: the aliases that signatures are written in, and the dtypes to compute in."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array as Array

PyTree: TypeAlias = Any
"""A tree of containers as JAX knows them, with arrays for leaves unless something else is said."""

Fun: TypeAlias = Callable[..., Any]
"""A user-supplied function of pytrees to a pytree."""

Axes: TypeAlias = int | Sequence[Any] | PyTree | None
"""`in_axes` or `out_axes` as `jax.vmap` takes them: an axis, None, or a pytree prefix of both."""

Size: TypeAlias = int | Array
"""A number of things: a Python int where it shapes the program, traced where it need not."""

Order: TypeAlias = Literal["strided", "contiguous"]
"""How examples are dealt out to microbatches."""

VmapFn: TypeAlias = Callable[..., Fun]
"""A function with the signature of `jax.vmap`."""

TreeDef: TypeAlias = Any
"""The structure of a pytree; `jax.tree_util.PyTreeDef` is not a type to type checkers."""

Carry: TypeAlias = PyTree
"""What a loop hands from one step to the next."""


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
