"""Print the path of a Python interpreter that starts: of a version such as 3.11, or the newest.

    python3 scripts/find_python.py 3.11
    python3 scripts/find_python.py newest

The search covers the running interpreter, those on the PATH, and those that a version manager
(pyenv, uv, conda, asdf, mise) has installed but not necessarily activated, in this order. A shim
that does not start is ignored, and so is a preview release. The newest is one of 3.11 to 3.14.
Without a match nothing is printed, and the exit code is 1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST, NEWEST = 11, 14
"""The versions 3.x for which JAX, and so curvax, is tested or expected to install."""

MANAGERS = {
    "PYENV_ROOT": ("~/.pyenv", "versions/*/bin/python3.*"),
    "UV_PYTHON_INSTALL_DIR": ("~/.local/share/uv/python", "*/bin/python3.*"),
    "CONDA_ROOT": ("~/miniconda3", "envs/*/bin/python3.*"),
    "ASDF_DATA_DIR": ("~/.asdf", "installs/python/*/bin/python3.*"),
    "MISE_DATA_DIR": ("~/.local/share/mise", "installs/python/*/bin/python3.*"),
}
"""For each version manager the variable of its folder, the default folder, and a glob pattern."""


NAME = r"python3\.\d+"


def candidates() -> Iterator[str]:
    """Yield paths that may be interpreters, in order of preference among equal versions."""
    yield sys.executable
    for minor in range(NEWEST, OLDEST - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            yield found
    for variable, (usual, pattern) in MANAGERS.items():
        folder = Path(os.environ.get(variable) or usual).expanduser()
        paths = sorted(folder.glob(pattern), reverse=True)
        yield from (str(path) for path in paths if re.fullmatch(NAME, path.name))


def version(path: str) -> tuple[int, ...] | None:
    """Return the version of an interpreter, or None if it does not start or is a preview."""
    command = [path, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:4])"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    *numbers, level = run.stdout.split()
    return tuple(map(int, numbers)) if level == "final" else None


def find(wanted: str) -> str | None:
    """Return the path of an interpreter of the wanted version, or None."""
    known = {path: version(path) for path in dict.fromkeys(candidates())}
    series = {path: v for path, v in known.items() if v and OLDEST <= v[1] <= NEWEST}
    if wanted != "newest":
        series = {path: v for path, v in series.items() if f"{v[0]}.{v[1]}" == wanted}
    # `max` takes the first of equals.
    return max(series, key=lambda path: series[path][:2], default=None)


if __name__ == "__main__":
    path = find(sys.argv[1])
    if path is None:
        sys.exit(1)
    print(path)
