"""Inputs that are already sharded give the numbers that one device gives.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has eight: `sharded_programs.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("sharded_programs.py")


@pytest.mark.parametrize("part", ["auto", "explicit", "shard_map"])
def test_sharded_inputs_give_the_numbers_of_one_device(part):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, str(PROGRAMS), part],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "programs agree" in run.stdout
