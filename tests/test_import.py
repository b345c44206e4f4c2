"""curvax costs its users the core dependencies and nothing else, all of its names included."""

import json
import subprocess
import sys

import pytest

# JAX and NumPy may load more of themselves.
CORE = {"curvax", "jax", "jaxlib", "jaxtyping", "numpy", "tqdm", "wadler_lindig"}

PROBE = """
import json, sys
import jax, jax.numpy
before = set(sys.modules)
import curvax
for name in curvax.__all__:
    getattr(curvax, name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_brings_in_only_the_core_dependencies():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    packages = {name.partition(".")[0] for name in json.loads(run.stdout)}
    assert "curvax" in packages
    assert packages - sys.stdlib_module_names <= CORE


def test_names_are_listed():
    import curvax

    assert "hessian" in dir(curvax)
    assert set(curvax.__all__) <= set(dir(curvax))


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    import curvax

    assert curvax.__version__ == version("curvax")


def test_another_name_is_an_error():
    import curvax

    with pytest.raises(AttributeError, match="module 'curvax' has no attribute 'hesian'"):
        _ = curvax.hesian
