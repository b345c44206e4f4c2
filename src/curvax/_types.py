"""The type aliases that curvax's signatures are written in.

They say what a value is for.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from jax import Array

__all__ = ["Array", "Axes", "Carry", "Fun", "Order", "PyTree", "Size", "TreeDef", "VmapFn"]


PyTree: TypeAlias = Any
"""A tree of containers as JAX knows them, with arrays for leaves unless something else is said."""

Fun: TypeAlias = Callable[..., Any]
"""A function of the user's, of pytrees to a pytree."""

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
