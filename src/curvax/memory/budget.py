"""Memory budgets: how much memory there is, and bytes as users write and messages print them."""

import os
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

from curvax import _jax
from curvax._errors import as_integer, where


def available_memory(device: Any = None) -> int:
    """The number of bytes that can still be allocated on a device.

    On an accelerator, its limit minus what is in use. On a CPU, the least of what the system has
    available, what the control groups (version 1 or 2) of the process still allow, and what its
    address-space limit leaves.

    Arguments:
        device: a `jax.Device`; by default the one on which JAX computes by default.

    Returns:
        Bytes. It changes from one moment to the next; a plan made for a fraction of it is made
        for what there was then.

    Raises:
        NotImplementedError: if neither the device nor the operating system tells.

    Examples:
        >>> from curvax import available_memory
        >>> available_memory() > 0
        True
    """
    device = _jax.default_device() if device is None else device
    if device.platform != "cpu":
        return _of_accelerator(device)
    return _of_host(Path("/"))


def _of_accelerator(device: Any) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise NotImplementedError(
            f"curvax.available_memory: {device} does not tell how much memory it has. Give the "
            f"budget in bytes."
        )
    return max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def _of_host(root: Path) -> int:
    """Return the bytes available on the machine whose file system begins at `root`.

    Several limits hold at once, and the least of them counts: what the system has
    available, what the control groups of the process allow (containers and batch systems limit
    memory by these), and the process's own limit on its address space. A control group is limited
    by all groups above it as well. Files that a group has merely cached count as used but are given
    up when needed, so they are counted as available.
    """
    amounts = [*_of_system(root), *_of_groups(root), *_of_address_space(root)]
    if not amounts:
        raise NotImplementedError(
            f"curvax.available_memory: this system ({sys.platform}) does not tell how much memory "
            f"it has. Give the budget in bytes."
        )
    return max(0, min(amounts))


def _of_system(root: Path) -> Iterator[int]:
    available = _entry(_read(root / "proc/meminfo"), "MemAvailable:")
    if available is not None:
        yield available * 1024
        return
    try:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return


def _of_groups(root: Path) -> Iterator[int]:
    """What each control group that the process is in still allows, and each group above."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, *rest = line.split(":", 2)
        if len(rest) < 2 or not number.isdecimal():
            continue
        controllers, path = rest
        if controllers == "":
            names = "memory.max", "memory.current", "inactive_file"
            yield from _of_path(root / "sys/fs/cgroup", path, *names)
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _of_path(root / "sys/fs/cgroup/memory", path, *names)


def _of_path(mount: Path, path: str, limit: str, used: str, cached: str) -> Iterator[int]:
    # Inside a container the path may be one that only the host can see; the mount is then its end.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        most, now = _read(group / limit).strip(), _read(group / used).strip()
        if most.isdecimal() and now.isdecimal():
            idle = _entry(_read(group / "memory.stat"), cached) or 0
            yield int(most) - int(now) + idle


def _of_address_space(root: Path) -> Iterator[int]:
    try:
        import resource
    except ImportError:  # Windows.
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read(root / "proc/self/statm").split()
    if limit != resource.RLIM_INFINITY and pages and pages[0].isdecimal():
        yield limit - int(pages[0]) * resource.getpagesize()


def _entry(text: str, name: str) -> int | None:
    """The number on the line that begins with the word `name`, if there is such a line."""
    for words in map(str.split, text.splitlines()):
        if words[:1] == [name] and words[1:] and words[1].isdecimal():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    """The text of a file of the system's, or nothing if there is none to be read."""
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


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
    number = as_integer(x)
    if number is not None:
        return _positive(number, x)
    if isinstance(x, str):
        return _parse_text(x)
    if isinstance(x, float):  # NumPy's float64 is one, too.
        return _fraction(x, x)
    raise TypeError(f"{where()}: {_EXPECTED}; got {type(x).__name__} {x!r}.")


def format_bytes(count: int) -> str:
    """A number of bytes for people to read, in binary units."""
    size, unit = float(count), "B"
    for prefix in _PREFIXES:
        if abs(size) < 1024:
            break
        size, unit = size / 1024, f"{prefix.replace('k', 'K')}iB"
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    unit = match and match[2].lower()
    if match is None or unit not in _UNITS:
        raise ValueError(
            f"{where()}: {text!r} is no amount of memory. {_EXPECTED}. Units are B, kB, MB, GB, "
            f"TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (powers of 1024)."
        )
    amount, factor = Fraction(match[1]), _UNITS[unit]  # As written: 1.001 kB are 1001 bytes.
    if factor is None:
        return _fraction(float(amount / 100), text)
    return _positive(int(amount * factor), text)


def _fraction(fraction: float, given: Any) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(f"{where()}: a fraction must be in (0, 1], got {given!r}. {_EXPECTED}.")
    return _positive(int(fraction * available_memory()), given)


def _positive(count: int, given: Any) -> int:
    if count < 1:
        raise ValueError(f"{where()}: an amount of memory is at least one byte, got {given!r}.")
    return count


class MemoryBudgetError(MemoryError):
    """No size of a program fits into the memory budget.

    Attributes:
        budget_bytes: the budget that was given.
        smallest_budget: the least that would do, for the smallest program that was tried.
    """

    budget_bytes: int
    smallest_budget: int

    def __init__(self, budget_bytes: int, smallest_budget: int, where: str, advice: str) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_budget = smallest_budget
        self._rest = where, advice
        super().__init__(
            f"{where}: nothing fits into {format_bytes(budget_bytes)} ({budget_bytes} bytes). "
            f"The smallest budget that would do is {format_bytes(smallest_budget)} "
            f"({smallest_budget} bytes). {advice}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.budget_bytes, self.smallest_budget, *self._rest)
