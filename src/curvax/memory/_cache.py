"""What was made for a function, kept as long as the function lives; as `jax.jit` does.

Functions are told apart by identity, and bound methods by that of their object, since Python makes
a new one each time it is asked for. What is kept must not refer to the function: it would never
be let go.
"""

import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["FunctionCache"]

T = TypeVar("T")


class FunctionCache(Generic[T]):
    """Values by function and key."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, dict[Hashable, T]]] = {}

    def get(self, fun: Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
        """The value for this function and key; made if there is none yet."""
        owner = fun.__self__ if inspect.ismethod(fun) else fun
        method = fun.__func__ if inspect.ismethod(fun) else None
        entries = self._of(owner)
        if entries is None:
            return make()
        full_key = method, key
        if full_key not in entries:
            entries[full_key] = make()
        return entries[full_key]

    def _of(self, owner: Any) -> dict[Hashable, T] | None:
        """The values kept for an object, or None if nothing can be kept for it."""
        number = id(owner)
        if number not in self._entries:
            try:
                reference = weakref.ref(owner, lambda _: self._entries.pop(number, None))
            except TypeError:
                return None
            self._entries[number] = reference, {}
        return self._entries[number][1]
