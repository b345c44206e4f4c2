"""The cache of a block: which powers are in it, and how it is updated.

What takes long in an update, powers and eigenvectors of matrices, an update only asks for. Whoever
runs it has this computed, for many blocks together.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CacheUpdate",
    "MatrixPower",
    "Powers",
    "Refresh",
    "finished",
    "in_step",
    "power_key",
    "powers_of",
]

Powers = float | int | Sequence[float | int] | None
"""One power, or several."""


CacheUpdate = Generator[Sequence[Any], Any, Any]
"""An update of a cache. It yields tasks, is sent their results, and returns the new state.

So tasks of several blocks can be computed together; see `curvax.linalg.computed`.
"""


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


def in_step(updates: Sequence[CacheUpdate]) -> Generator[Sequence[Any], Any, list[Any]]:
    """Several updates as one: it yields what all of them do at a time, and returns all states."""
    states: list[Any] = [None] * len(updates)
    waiting, replies = dict(enumerate(updates)), dict[int, Any]()
    while waiting:
        asked: dict[int, Sequence[Any]] = {}
        for number, update in list(waiting.items()):
            try:
                asked[number] = update.send(replies.get(number))
            except StopIteration as end:
                states[number] = end.value
                del waiting[number]
        if asked:
            found = iter((yield [task for tasks in asked.values() for task in tasks]))
            replies = {number: [next(found) for _ in tasks] for number, tasks in asked.items()}
    return states


def finished(update: CacheUpdate, compute: Callable[..., Any]) -> Any:
    """What an update returns, whose tasks are computed by a function."""
    try:
        tasks = next(update)
        while True:
            tasks = update.send(compute(tasks))
    except StopIteration as end:
        return end.value
