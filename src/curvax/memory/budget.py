"""Memory budgets: the available memory, and amounts as users write and messages print them."""

import os
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from curvax import _jax
from curvax._errors import as_integer, where


@runtime_checkable
class Device(Protocol):
    """The part of a `jax.Device` that is needed here."""

    platform: str

    def memory_stats(self) -> dict[str, int] | None:
        """Return the device's memory statistics, None if it has none."""
        ...


def available_memory(device: Device | None = None) -> int:
    """Return the number of bytes that can still be allocated on a device.

    On an accelerator, this is its limit minus the bytes in use, by `device.memory_stats()`. On a
    CPU, it is the smallest of three amounts: the memory that the system has available, what the
    process's cgroup limits (version 1 or 2) leave, and what its address-space limit leaves.

    Arguments:
        device: A `jax.Device`, None for JAX's default device.

    Returns:
        The number of bytes at the time of the call. A plan for a fraction of it is a plan for that
        number, even if less is available later.

    Raises:
        NotImplementedError: If neither the device nor the operating system reports its memory.

    Examples:
        >>> from curvax import available_memory
        >>> available_memory() > 0
        True
    """
    target: Device = _jax.default_device() if device is None else device
    if target.platform != "cpu":
        return _of_accelerator(target)
    return _of_host(Path("/"))


def _of_accelerator(device: Device) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise NotImplementedError(
            f"curvax.available_memory: {device} does not report how much memory it has. Give the "
            f"budget in bytes."
        )
    return max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def _of_host(root: Path) -> int:
    """Return the bytes available on the machine whose file system is mounted at `root`.

    Several limits apply, and the smallest decides: the memory that the system has available, the
    limits of the control groups of the process (by which containers and batch systems limit
    memory), and the limit on the address space of the process. A control group is also subject to
    the limits of its ancestors. The kernel counts a group's page cache as used but reclaims it
    when needed, so it counts as available here.
    """
    amounts = [*_of_system(root), *_of_groups(root), *_of_address_space(root)]
    if not amounts:
        raise NotImplementedError(
            f"curvax.available_memory: this system ({sys.platform}) does not report how much "
            f"memory it has. Give the budget in bytes."
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
    """Yield the bytes that each control group of the process, and each ancestor, still allows."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, *rest = line.split(":", 2)
        if len(rest) < 2 or not hierarchy.isdecimal():
            continue
        controllers, path = rest
        if controllers == "":
            names = "memory.max", "memory.current", "inactive_file"
            yield from _of_path(root / "sys/fs/cgroup", path, *names)
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _of_path(root / "sys/fs/cgroup/memory", path, *names)


def _of_path(mount: Path, path: str, limit: str, used: str, cached: str) -> Iterator[int]:
    # In a container the path may be visible to the host only; the group is then the mount itself.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit_bytes, used_bytes = _read(group / limit).strip(), _read(group / used).strip()
        if limit_bytes.isdecimal() and used_bytes.isdecimal():
            cached_bytes = _entry(_read(group / "memory.stat"), cached) or 0
            yield int(limit_bytes) - int(used_bytes) + cached_bytes


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
    """Return the integer on the line that begins with the word `name`, None without such a line."""
    for words in map(str.split, text.splitlines()):
        if words[:1] == [name] and words[1:] and words[1].isdecimal():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    """Return the text of a system file, or "" if it cannot be read."""
    try:
        return path.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""


Budget: TypeAlias = int | float | str
"""An amount of memory in the forms that `parse_memory` accepts."""

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
    """Return the number of bytes that an amount of memory stands for.

    Arguments:
        x: Bytes as an integer; a string with a unit, decimal (`"512MB"` is 512 000 000 bytes) or
            binary (`"1.5 GiB"` is 1.5 * 2**30), in upper or lower case; a string with a percentage
            (`"50%"`) or a float in (0, 1], a fraction of `available_memory()`. So `1` is one
            byte, and `1.0` is all available memory.

    Returns:
        The number of bytes, at least 1.

    Raises:
        ValueError: If the amount is not positive, a fraction exceeds 1, or a string is not a
            number with a known unit.
        TypeError: If `x` is of another type.

    Examples:
        >>> from curvax import parse_memory
        >>> parse_memory("512MB"), parse_memory("1.5 GiB"), parse_memory(4096)
        (512000000, 1610612736, 4096)
    """
    count = as_integer(x)
    if count is not None:
        return _positive(count, x)
    if isinstance(x, str):
        return _parse_text(x)
    if isinstance(x, float):  # Includes `np.float64`.
        return _fraction(x, x)
    raise TypeError(f"{where()}: {_EXPECTED}; got {type(x).__name__} {x!r}.")


def format_bytes(count: int) -> str:
    """Return a number of bytes as text in binary units, such as "1.50 GiB"."""
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
            f"{where()}: {text!r} is not an amount of memory. {_EXPECTED}. Units are B, kB, MB, "
            f"GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (powers of 1024)."
        )
    amount, factor = Fraction(match[1]), _UNITS[unit]  # Exact, so that 1.001 kB is 1001 bytes.
    if factor is None:
        return _fraction(float(amount / 100), text)
    return _positive(int(amount * factor), text)


def _fraction(fraction: float, given: Budget) -> int:
    if not 0 < fraction <= 1:
        raise ValueError(f"{where()}: a fraction must be in (0, 1], got {given!r}. {_EXPECTED}.")
    return _positive(int(fraction * available_memory()), given)


def _positive(count: int, given: Budget) -> int:
    if count < 1:
        raise ValueError(f"{where()}: an amount of memory is at least one byte, got {given!r}.")
    return count


class MemoryBudgetError(MemoryError):
    """An error: no size of a program fits into the memory budget.

    Attributes:
        budget_bytes: The given budget.
        smallest_budget: The smallest budget that suffices, for the smallest program that was tried.

    Examples:
        >>> import jax.numpy as jnp
        >>> from curvax import MemoryBudgetError, chunked_vmap
        >>> try:
        ...     chunked_vmap(jnp.sin, memory_budget="1kB")(jnp.ones((100, 10)))
        ... except MemoryBudgetError as error:
        ...     print(error.budget_bytes, error.smallest_budget >= 4000)
        1000 True
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

    def __reduce__(self) -> tuple[type, tuple[int | str, ...]]:
        return type(self), (self.budget_bytes, self.smallest_budget, *self._rest)
