"""How much memory there is to be had, asked of the device or of the operating system.

On a CPU several limits hold at once, and the least of them counts: what the system has available,
what the control groups of the process allow (containers and batch systems limit memory by these),
and the process's own limit on its address space. A control group is limited by all groups above
it as well. Files that a group has merely cached count as used but are given up when needed, so
they are counted as available.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from curvax import _compat

__all__ = ["available_memory"]


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
    device = _compat.default_device() if device is None else device
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
    """Of the machine whose file system begins at `root`."""
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
