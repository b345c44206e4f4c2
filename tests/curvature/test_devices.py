"""A batch that is split among devices gives the estimate of one device.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has two: `device_programs.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).with_name("device_programs.py")


def test_estimates_on_two_devices_are_those_of_one():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    run = subprocess.run(
        [sys.executable, str(PROGRAMS)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "estimates agree" in run.stdout
