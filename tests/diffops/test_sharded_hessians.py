"""Points that are already sharded have the Hessian that one device computes.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has two: `sharded_hessians.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("sharded_hessians.py")


def test_sharded_points_have_the_hessian_of_one_device():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    run = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Hessians agree" in run.stdout
