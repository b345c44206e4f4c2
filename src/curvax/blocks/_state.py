"""The state of a block: a pytree whose fields can be replaced, with a cache of powers."""

from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["BlockState", "copied"]


@dataclass
class BlockState:
    """What a block keeps. A class that extends it is made a dataclass and a pytree."""

    cache: dict[str, Any] | None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_dataclass(dataclass(cls))


jax.tree_util.register_dataclass(BlockState)


def copied(state: Any) -> Any:
    """A state with the same arrays, whose fields can be changed."""
    return jax.tree.map(lambda x: x, state)
