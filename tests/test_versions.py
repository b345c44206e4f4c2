"""Which Python and which JAX curvax runs on, and what it says of others."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROBE = """
import jax
jax.__version__, jax.__version_info__ = {text!r}, {version!r}
import curvax
print(curvax.hessian(lambda x: x @ x, jax.numpy.ones(2))[0].tolist())
"""


def import_on(version):
    """Import and use curvax on a JAX that claims to be of this version."""
    probe = PROBE.format(text=".".join(map(str, version)), version=version)
    return subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )


def test_a_jax_that_is_too_old_is_rejected_with_a_remedy():
    run = import_on((0, 9, 2))
    assert run.returncode != 0
    assert run.stderr.strip().splitlines()[-1] == (
        "ImportError: curvax needs JAX 0.10 or newer, but JAX 0.9.2 is installed. "
        "Upgrade it with: pip install --upgrade jax jaxlib"
    )


def test_a_jax_that_is_newer_than_tested_is_tried():
    run = import_on((99, 0, 0))
    assert run.stdout.strip() == "[[2.0, 0.0], [0.0, 2.0]]", run.stderr


def find_python(wanted, **environment):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "find_python.py", wanted],
        env={"HOME": "/nowhere", "PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def interpreter(path, version):
    """Write a program that starts like an interpreter of this version; None does not start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + ("exit 127\n" if version is None else f"echo {version}\n"))
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(not (ROOT / "scripts").is_dir(), reason="the scripts are not in the package")
class TestFindPython:
    own = f"3.{sys.version_info.minor}"

    def test_the_one_that_asks_comes_first(self, tmp_path):
        interpreter(tmp_path / f"python{self.own}", self.own.replace(".", " ") + " 99 final")
        assert find_python(self.own, PATH=str(tmp_path)).stdout.strip() == sys.executable

    def test_a_shim_that_does_not_start_does_not_count(self, tmp_path):
        shim = interpreter(tmp_path / "shims" / "python3.14", None)
        real = tmp_path / "pyenv" / "versions" / "3.14.1" / "bin" / "python3.14"
        run = find_python("newest", PATH=str(Path(shim).parent))
        assert run.stdout.strip() != shim
        interpreter(real, "3 14 1 final")
        run = find_python("newest", PATH=str(Path(shim).parent), PYENV_ROOT=str(tmp_path / "pyenv"))
        assert run.stdout.strip() == str(real)

    def test_none_is_said_by_the_exit_code(self):
        run = find_python("3.10")
        assert (run.stdout, run.returncode) == ("", 1)
