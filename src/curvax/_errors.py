"""The public name in error messages, and checks of plain arguments that public functions share."""

import operator
import sys
from types import FrameType
from typing import Any

_PASSED_OVER = {"jax", "contextlib", "dataclasses", "functools", "jaxtyping", "beartype"}
"""Packages whose frames may lie between two of curvax's own."""


def where() -> str:
    """Return the public name that the user called, such as `curvax.hessian`.

    Error messages begin with it. It is read from the stack: the outermost public function or class
    of curvax below the user's own code, where frames of JAX are passed over. If curvax calls a
    user-supplied function that calls curvax, the inner call is named. If a function of curvax is
    passed to another directly, as in `hessian(chunked_vmap(f), x)`, there is no frame of the user
    between them, and the outer one is named.
    """
    # From the caller on: a frame that is a local of itself, as `inspect.currentframe()` would be,
    # keeps the arrays of all callers until the next garbage collection.
    name, frame = "curvax", sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "curvax":
            name = _public_name(frame) or name
        elif package not in _PASSED_OVER:
            break
        frame = frame.f_back
    return name


def _public_name(frame: FrameType) -> str | None:
    """Return the name of the public function or class that a frame belongs to, if to any."""
    public = sys.modules["curvax"].__all__
    own = frame.f_code.co_qualname.partition(".")[0]
    first = frame.f_code.co_varnames[:1]
    # Reading the locals of a frame keeps a copy of them for as long as the frame lives.
    owner = frame.f_locals.get(first[0]) if first in (("self",), ("cls",)) else None
    classes = (owner if isinstance(owner, type) else type(owner)).__mro__
    names = [own, *(each.__name__ for each in classes)]
    return next((f"curvax.{name}" for name in names if name in public), None)


def as_integer(x: Any) -> int | None:
    """Return `x` as a Python int if it is an integer that is known now, not a bool; else None."""
    try:
        return None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        return None


def check_size(name: str, size: Any) -> int | None:
    """Return a size as the user gave it, as a positive int, or None."""
    return None if size is None else check_count(name, size)


def check_count(name: str, count: Any) -> int:
    """Return a number of things as the user gave it, as a positive int."""
    number = as_integer(count)
    if number is None:
        given = "None" if count is None else f"{type(count).__name__} {count!r}"
        raise TypeError(
            f"{where()}: {name} must be a Python integer, got {given}. "
            f"It shapes the program, so it cannot be a traced value or a fraction."
        )
    if number < 1:
        raise ValueError(f"{where()}: {name} must be at least 1, got {number}.")
    return number


def check_divides(count: int, length: int, what: str, split: str) -> None:
    """Check that `what`, which has `length` examples, can be split evenly by `count`.

    `split` is how: "among 8 devices", or "into microbatches of 8".
    """
    if length % count:
        lower = length - length % count
        one_of = f"{lower} or {lower + count}" if lower else f"{count}"
        raise ValueError(
            f"{where()}: {what} is split evenly {split}, but has {length} examples, which {count} "
            f"does not divide. Use {one_of}."
        )
