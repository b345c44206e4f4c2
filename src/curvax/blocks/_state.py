"""The state of a block: a pytree whose fields can be replaced, with a cache of powers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["BlockState", "Powers", "copied", "power_key", "powers_of"]

Powers = float | int | Sequence[float | int] | None
"""One power, or several."""


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


def powers_of(powers: Powers) -> tuple[float, ...]:
    """Powers as they are given, each once, in order."""
    if powers is None:
        return ()
    several = powers if isinstance(powers, Sequence) else (powers,)
    return tuple(sorted({float(power) for power in several}))


def power_key(power: float | int) -> str:
    """Under which key of the cache a power is."""
    return f"{float(power):g}"
