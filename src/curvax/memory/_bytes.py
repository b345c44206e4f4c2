"""Numbers of bytes, as users write them and as messages print them."""

import re
from fractions import Fraction
from typing import Any, TypeAlias

from curvax._checks import as_integer
from curvax.memory._available import available_memory

__all__ = ["Budget", "format_bytes", "parse_memory"]

Budget: TypeAlias = int | float | str
"""An amount of memory as `parse_memory` takes it."""

_PREFIXES = "kMGTP"
_UNITS = (
    {"b": 1, "%": None}
    | {f"{prefix.lower()}b": 1000**i for i, prefix in enumerate(_PREFIXES, 1)}
    | {f"{prefix.lower()}ib": 1024**i for i, prefix in enumerate(_PREFIXES, 1)}
)
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]{1,2})?)\s*([a-z%]+)\s*", re.IGNORECASE)
_EXPECTED = (
    "Give bytes as a Python int, a string with a unit such as '512MB', '1.5 GiB' or '50%', or a "
    "float in (0, 1] for that fraction of what is available"
)


def parse_memory(x: Budget) -> int:
    """A number of bytes, from the ways in which people write one.

    Arguments:
        x: bytes as an integer; a string with a unit, decimal (`"512MB"` is 512 000 000 bytes) or
            binary (`"1.5 GiB"` is 1.5 * 2**30), in upper or lower case, or a percentage
            (`"50%"`); or a float in (0, 1], that fraction of `available_memory()`. So `1` is one
            byte, and `1.0` all there is.

    Returns:
        The number of bytes, at least 1.

    Raises:
        ValueError: if the amount is not positive, a fraction exceeds 1, or a string is not a
            number with a known unit.
        TypeError: if `x` is of another type.

    Examples:
        >>> from curvax import parse_memory
        >>> parse_memory("512MB"), parse_memory("1.5 GiB"), parse_memory(4096)
        (512000000, 1610612736, 4096)
    """
    where = "curvax.parse_memory"
    number = as_integer(x)
    if number is not None:
        return _positive(number, x, where)
    if isinstance(x, str):
        return _parse_text(x, where)
    if isinstance(x, float):  # NumPy's float64 is one, too.
        return _fraction(x, x, where)
    raise TypeError(f"{where}: {_EXPECTED}; got {type(x).__name__} {x!r}.")


def format_bytes(count: int) -> str:
    """A number of bytes for people to read, in binary units."""
    size, unit = float(count), "B"
    for prefix in _PREFIXES:
        if abs(size) < 1024:
            break
        size, unit = size / 1024, f"{prefix.replace('k', 'K')}iB"
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def _parse_text(text: str, where: str) -> int:
    match = _AMOUNT.fullmatch(text)
    unit = match and match[2].lower()
    if match is None or unit not in _UNITS:
        raise ValueError(
            f"{where}: {text!r} is no amount of memory. {_EXPECTED}. Units are B, kB, MB, GB, TB, "
            f"PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (powers of 1024)."
        )
    amount, factor = Fraction(match[1]), _UNITS[unit]  # As written: 1.001 kB are 1001 bytes.
    if factor is None:
        return _fraction(float(amount / 100), text, where)
    return _positive(int(amount * factor), text, where)


def _fraction(fraction: float, given: Any, where: str) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(f"{where}: a fraction must be in (0, 1], got {given!r}. {_EXPECTED}.")
    return _positive(int(fraction * available_memory()), given, where)


def _positive(count: int, given: Any, where: str) -> int:
    if count < 1:
        raise ValueError(f"{where}: an amount of memory is at least one byte, got {given!r}.")
    return count
