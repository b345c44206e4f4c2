"""Inputs that are already sharded give the numbers that one device gives.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has four: `sharded_loops.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("sharded_loops.py")


@pytest.mark.parametrize("choice", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_sharded_inputs_give_the_numbers_of_one_device(choice):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, str(PROGRAMS), choice],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "loops agree" in run.stdout
