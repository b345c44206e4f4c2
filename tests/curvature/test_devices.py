"""A batch that is split among devices gives the estimate of one device.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has two: `device_programs.py`.
"""

from pathlib import Path

from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("device_programs.py")


def test_estimates_on_two_devices_are_those_of_one():
    assert "estimates agree" in run_on_devices(PROGRAMS, 2)
