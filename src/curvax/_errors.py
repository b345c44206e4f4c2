"""Checks of plain arguments that several public functions share, with their messages."""

import operator
from typing import Any

__all__ = ["as_integer", "check_size"]


def as_integer(x: Any) -> int | None:
    """`x` as a Python int if it is an integer that is known now, and not a bool; else None."""
    try:
        return None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        return None


def check_size(name: str, size: Any, where: str) -> int | None:
    """A size as the user gave it, as a positive int, or None."""
    if size is None:
        return None
    number = as_integer(size)
    if number is None:
        raise TypeError(
            f"{where}: {name} must be a Python integer, got {type(size).__name__} {size!r}. "
            f"It shapes the program, so it cannot be a traced value or a fraction."
        )
    if number < 1:
        raise ValueError(f"{where}: {name} must be at least 1, got {number}.")
    return number
