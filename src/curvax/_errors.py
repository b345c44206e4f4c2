"""The public name that error messages begin with, and checks of integer arguments."""

import operator
import sys
from types import FrameType
from typing import SupportsIndex

_SKIPPED_PACKAGES = {"jax", "contextlib", "dataclasses", "functools", "jaxtyping", "beartype"}
"""Packages whose frames may lie between two frames of curvax."""


def where() -> str:
    """Return the public name that the user called, such as `curvax.hessian`.

    Error messages begin with it. It is read from the stack: it is the outermost public function or
    class of curvax above the user's frame, skipping frames of JAX. If curvax calls a user-supplied
    function that calls curvax, the inner call is named. If a function of curvax is passed to
    another directly, as in `hessian(chunked_vmap(f), x)`, no user frame separates them, and the
    outer one is named.
    """
    # Start at the caller: a frame that is a local of itself, as `inspect.currentframe()` would be,
    # is a reference cycle that keeps the arrays of all callers until the next garbage collection.
    name, frame = "curvax", sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "curvax":
            name = _public_name(frame) or name
        elif package not in _SKIPPED_PACKAGES:
            break
        frame = frame.f_back
    return name


def _public_name(frame: FrameType) -> str | None:
    """Return the name of the public function or class that a frame belongs to, or None."""
    public = sys.modules["curvax"].__all__
    outermost = frame.f_code.co_qualname.partition(".")[0]
    first = frame.f_code.co_varnames[:1]
    # Read locals only where needed: the copy that Python makes lives as long as the frame.
    owner = frame.f_locals.get(first[0]) if first in (("self",), ("cls",)) else None
    classes = (owner if isinstance(owner, type) else type(owner)).__mro__
    names = [outermost, *(cls.__name__ for cls in classes)]
    return next((f"curvax.{name}" for name in names if name in public), None)


def as_integer(x: object) -> int | None:
    """Return `x` as a Python int if it is a concrete integer and not a bool, else None."""
    if isinstance(x, bool) or not isinstance(x, SupportsIndex):
        return None
    try:
        return operator.index(x)
    except TypeError:  # A tracer, or an array that is not an integer.
        return None


def check_size(name: str, size: object) -> int | None:
    """Return a user-supplied size as a positive int, or None if it is None."""
    return None if size is None else check_count(name, size)


def check_count(name: str, count: object) -> int:
    """Return a user-supplied count as a positive int."""
    integer = as_integer(count)
    if integer is None:
        given = "None" if count is None else f"{type(count).__name__} {count!r}"
        raise TypeError(
            f"{where()}: {name} must be a Python integer, got {given}. "
            f"It shapes the program, so it cannot be a traced value or a fraction."
        )
    if integer < 1:
        raise ValueError(f"{where()}: {name} must be at least 1, got {integer}.")
    return integer


def check_divides(count: int, length: int, what: str, split: str) -> None:
    """Check that `count` divides the `length` examples of `what`.

    `split` completes "is split evenly": "among 8 devices", or "into microbatches of 8".
    """
    if length % count:
        lower = length - length % count
        one_of = f"{lower} or {lower + count}" if lower else f"{count}"
        raise ValueError(
            f"{where()}: {what} is split evenly {split}, but has {length} examples, which {count} "
            f"does not divide. Use {one_of}."
        )
