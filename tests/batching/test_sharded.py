"""Inputs that are already sharded give the numbers that one device gives.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has eight: `sharded_programs.py`.
"""

from pathlib import Path

import pytest

from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("sharded_programs.py")


@pytest.mark.parametrize("part", ["auto", "explicit", "shard_map"])
def test_sharded_inputs_give_the_numbers_of_one_device(part):
    assert "programs agree" in run_on_devices(PROGRAMS, 8, part)
