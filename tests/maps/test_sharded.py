"""Inputs that are already sharded give the numbers that one device gives.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has eight: `sharded_programs.py`.
"""

from pathlib import Path

import pytest

from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("sharded_programs.py")


@pytest.mark.parametrize(
    ("choice", "count"), [("some", 27), pytest.param("all", 54, marks=pytest.mark.slow)]
)
def test_sharded_inputs_give_the_numbers_of_one_device(choice, count):
    """On a mesh, whether its axes are explicit or not, and inside of `shard_map`."""
    assert f"{count} programs agree" in run_on_devices(PROGRAMS, 8, choice)
