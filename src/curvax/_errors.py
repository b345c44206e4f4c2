"""Checks of plain arguments that several public functions share, with their messages."""

import operator
from typing import Any

__all__ = ["as_integer", "check_divides", "check_size"]


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


def check_divides(count: int, length: int, what: str, split: str, where: str) -> None:
    """Check that `what`, which has `length` examples, can be split evenly by `count`.

    `split` is how: "among 8 devices", or "into microbatches of 8".
    """
    if length % count:
        lower = length - length % count
        one_of = f"{lower} or {lower + count}" if lower else f"{count}"
        raise ValueError(
            f"{where}: {what} is split evenly {split}, but has {length} examples, which {count} "
            f"does not divide. Use {one_of}."
        )
