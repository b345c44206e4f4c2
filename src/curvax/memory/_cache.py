"""What was made for a function, kept as long as the function lives.

Functions are told apart by identity, and bound methods by that of their object, since Python makes
a new one each time it is asked for. That says how long to keep something, not what a function
does: it may read what has changed since. Keys say what it does, see `curvax.memory._planned`. What
is kept must not refer to the function: it would never be let go.
"""

import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["FunctionCache"]

T = TypeVar("T")

MOST = 64
"""So many values are kept for a function, those that were last asked for."""


class FunctionCache(Generic[T]):
    """Values by function and key."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, dict[Hashable, T]]] = {}

    def get(self, fun: Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
        """Return the value for this function and key; make it if there is none yet."""
        value = self.find(fun, key)
        if value is None:
            value = make()
            self.keep(fun, key, value)
        return value

    def find(self, fun: Callable[..., Any], key: Hashable) -> T | None:
        """Return the value for this function and key, or None."""
        owner, method = _owner(fun)
        entries = self._of(owner) or {}
        full_key = method, key
        if full_key not in entries:
            return None
        entries[full_key] = value = entries.pop(full_key)  # As the last.
        return value

    def keep(self, fun: Callable[..., Any], key: Hashable, value: T) -> None:
        """Keep a value for this function and key, if anything can be kept for it."""
        owner, method = _owner(fun)
        entries = self._of(owner)
        if entries is None:
            return
        entries[method, key] = value
        while len(entries) > MOST:
            del entries[next(iter(entries))]

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


def _owner(fun: Callable[..., Any]) -> tuple[Any, Any]:
    """The object that a function lives as long as, and which of its methods it is."""
    return (fun.__self__, fun.__func__) if inspect.ismethod(fun) else (fun, None)
