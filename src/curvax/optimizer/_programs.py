"""Compiled programs of the pure functions, which take over the buffers of what they replace."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Programs"]


class Programs:
    """Runs functions, compiled when they are first run, or as they are.

    Arguments:
        is_compiled: whether to compile them.
        is_donating: whether they may use the buffers of those arguments that are to be replaced.
    """

    def __init__(self, is_compiled: bool, is_donating: bool) -> None:
        self._is_compiled, self._is_donating = is_compiled, is_donating
        self._known: dict[str, Callable[..., Any]] = {}

    def run(
        self,
        name: str,
        fun: Callable[..., Any],
        args: Sequence[Any],
        replaced: Sequence[int] = (),
    ) -> Any:
        """`fun(*args)`, where some arguments are replaced by the result."""
        if not self._is_compiled:
            return fun(*args)
        donated = tuple(replaced) if self._is_donating else ()
        if name not in self._known:
            self._known[name] = jax.jit(fun, donate_argnums=donated)
        return self._known[name](*_without_aliases(args, donated))

    def forget(self) -> None:
        """Drop what was compiled."""
        self._known.clear()


def _without_aliases(args: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """The arguments, with copies of arrays that are there twice: a buffer is donated only once."""
    seen = {id(x) for k, arg in enumerate(args) if k not in donated for x in jax.tree.leaves(arg)}

    def own(leaf: Any) -> Any:
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return [jax.tree.map(own, arg) if k in donated else arg for k, arg in enumerate(args)]
