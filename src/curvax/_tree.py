"""Pytrees: static values, prefixes, and names of leaves.

`Static` is public: it carries a hashable Python value through `jit` and pytrees as part of the
structure. The rest is pytree algebra that several packages use.
"""

from collections.abc import Hashable
from typing import Any, Generic, TypeVar, final

import jax

from curvax import _jax
from curvax._types import PyTree

T = TypeVar("T", bound=Hashable)


@final
@jax.tree_util.register_static
class Static(Generic[T]):
    """A value that is part of the structure of a pytree, not data.

    A `Static` has no leaves. A function under `jax.jit` receives it unchanged, and is traced again
    for a different value. Two are equal if their values are equal and have the same type:
    `Static(1)`, `Static(1.0)` and `Static(True)` are all different. Inside a container, Python's
    equality applies, so `Static((1,)) == Static((True,))`.

    Arguments:
        value: The value to wrap. It must be hashable.

    Raises:
        TypeError: If `value` is not hashable.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> power = jax.jit(lambda x, n: x**n.value)
        >>> power(jnp.array(3.0), Static(2))
        Array(9., dtype=float32, weak_type=True)
    """

    __slots__ = ("value",)
    value: T

    def __init__(self, value: T) -> None:
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"curvax.Static: the value must be hashable, because jax.jit compares it from call "
                f"to call; got {type(value).__name__} {value!r}. Wrap an immutable form of it, "
                f"such as a tuple or a frozenset, or pass arrays as ordinary leaves."
            ) from error
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"curvax.Static cannot be changed; make a new one (tried {name!r})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"curvax.Static cannot be changed (tried to delete {name!r})")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        a, b = self.value, other.value
        return type(a) is type(b) and (a is b or a == b)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __repr__(self) -> str:
        return f"Static({self.value!r})"

    def __reduce__(self) -> tuple[type["Static[T]"], tuple[T]]:
        return (Static, (self.value,))


def broadcast_prefix(prefix: PyTree, tree: PyTree) -> list[Any]:
    """Return the entry of `prefix` for each leaf of `tree`; None counts as an entry.

    Raises:
        ValueError: If `prefix` is not a pytree prefix of `tree`.
    """
    entries: list[Any] = []
    jax.tree.map(
        lambda entry, part: entries.extend([entry] * len(jax.tree.leaves(part))),
        prefix,
        tree,
        is_leaf=lambda x: x is None,
    )
    return entries


def leaf_name(name: str, path: tuple[Hashable, ...]) -> str:
    """Return the name that error messages use for the leaf at `path` of an argument."""
    return name + jax.tree_util.keystr(path)


def as_key(tree: PyTree) -> Hashable:
    """Return a key for a pytree: its structure and the values of its leaves.

    Leaves that are not hashable are compared by identity. Numbers of different types differ, and so
    do numbers of different bits, such as `0.0` and `-0.0`.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_jax.value_key, leaves))
