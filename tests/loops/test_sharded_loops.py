"""Inputs that are already sharded give the numbers that one device gives.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has four: `sharded_loops.py`.
"""

from pathlib import Path

import pytest

from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("sharded_loops.py")


@pytest.mark.parametrize("choice", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_sharded_inputs_give_the_numbers_of_one_device(choice):
    assert "loops agree" in run_on_devices(PROGRAMS, 4, choice)
