"""The state of a block: a pytree whose fields can be replaced, with a cache of powers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["BlockState", "MatrixPower", "Powers", "Refresh", "copied", "power_key", "powers_of"]

Powers = float | int | Sequence[float | int] | None
"""One power, or several."""


@dataclass(frozen=True)
class MatrixPower:
    """Which power of a block is asked for: `(matrix + identity_weight * identity) ** power`."""

    identity_weight: Any
    power: float | int
    is_exact: bool
    is_cached: bool


@dataclass(frozen=True)
class Refresh:
    """What of a block's cache is to be computed again, with what is added to the diagonal."""

    identity_weight: Any
    exact: tuple[float, ...]
    approx: tuple[float, ...]
    eigenvalues: bool

    @property
    def powers(self) -> tuple[float, ...]:
        """All powers, for blocks that have only exact ones."""
        return tuple(sorted({*self.exact, *self.approx}))


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
    short = f"{float(power):g}"
    return short if float(short) == power else repr(float(power))
