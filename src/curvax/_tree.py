"""Pytrees: values that JAX shall not look into, prefixes, and names for leaves.

`Static` is public: it carries a hashable Python value through `jit` and pytrees as part of the
structure. The rest is the little pytree algebra that several packages share.
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
    """A value that JAX treats as part of the structure of a pytree, not as data.

    A `Static` has no leaves. Passed to a function under `jax.jit`, it arrives unchanged, and the
    function is traced again when a call brings one with another value. Two are equal when their
    values are equal and of one type, so that `Static(1)`, `Static(1.0)` and `Static(True)`
    are never taken for each other. Within a container, Python's own equality decides.

    Arguments:
        value: what to wrap. It must be hashable.

    Raises:
        TypeError: `value` is not hashable.

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
        mine, theirs = self.value, other.value
        return type(mine) is type(theirs) and (mine is theirs or mine == theirs)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __repr__(self) -> str:
        return f"Static({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Static, (self.value,))


def broadcast_prefix(prefix: PyTree, tree: PyTree) -> list[Any]:
    """One entry of `prefix` for each leaf of `tree`; None in the prefix is an entry.

    Raises ValueError if `prefix` is not a prefix of `tree`.
    """
    entries: list[Any] = []
    jax.tree.map(
        lambda entry, part: entries.extend([entry] * len(jax.tree.leaves(part))),
        prefix,
        tree,
        is_leaf=lambda x: x is None,
    )
    return entries


def leaf_name(name: str, path: tuple[Any, ...]) -> str:
    """How an error message calls the leaf at `path` below the argument called `name`."""
    return name + jax.tree_util.keystr(path)


def as_key(tree: PyTree) -> Hashable:
    """A pytree as a key: by its structure, and the values of its leaves where they have one.

    Leaves that cannot be hashed are themselves only. Numbers of different types are different, and
    those of different bits: `0.0` and `-0.0`.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_jax.value_key, leaves))
