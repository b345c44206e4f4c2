"""What libraries allocate besides the compiler's account is in the usage of a program."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import curvax
from helpers import as_users_run

pytestmark = pytest.mark.optimised

MATRIX = jax.ShapeDtypeStruct((512, 512), jnp.float32)
IMAGES = jax.ShapeDtypeStruct((32, 28, 28, 16), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.float32)
LONG = jax.ShapeDtypeStruct((500_009,), jnp.float32)
BATCH = jax.ShapeDtypeStruct((150, 128, 128), jnp.float32)
LAYOUT = ("NHWC", "HWIO", "NHWC")

# A program, its arguments, and what it was measured to allocate besides the account, in MB.
MEASURED = {
    "eigh": (jnp.linalg.eigh, [MATRIX], 2.1),
    "svd": (jnp.linalg.svd, [MATRIX], 3.1),
    "products": (lambda a: a @ a.mT, [BATCH], 9.8),
    "transposed product": (lambda a, b: a.T @ b, [MATRIX, MATRIX], 2.7),
    "convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT),
        [IMAGES, KERNEL],
        16.0,
    ),
    "fft of a prime length": (jnp.fft.rfft, [LONG], 36.9),
    "sort": (jnp.sort, [LONG], 8.0),
    "no library": (jnp.tanh, [MATRIX], 0.0),
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="formulas for libraries on CPU")
@pytest.mark.parametrize("name", MEASURED)
def test_scratch_is_bounded_by_the_usage(name):
    program, args, measured = MEASURED[name]
    usage = curvax.memory_usage(program, *args)
    rest = usage.output_bytes + usage.temp_bytes - usage.alias_bytes
    assert usage.added_bytes == rest + usage.scratch_bytes
    assert 0.97e6 * measured <= usage.scratch_bytes <= 3e6 * measured
    assert "library scratch" in str(usage)


def test_small_calls_do_not_count():
    small = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert curvax.memory_usage(lambda a: jnp.linalg.eigh(a @ a.T), small).scratch_bytes == 0


SCRIPT = Path(__file__).with_name("resident_budgets.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "name",
    [
        "eigh",
        "fisher",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("step", "adaptive_step")),
    ],
)
def test_resident_memory_stays_within_the_budget(name):
    command = [sys.executable, str(SCRIPT), name]
    environment = {**as_users_run(), "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    budget, taken = map(int, run.stdout.split())
    # The parts of a step are planned by themselves, and do not take all that they may.
    least = 0.25 if "step" in name else 0.5
    assert least * budget < taken <= 1.05 * budget, f"budget {budget}, taken {taken}"
