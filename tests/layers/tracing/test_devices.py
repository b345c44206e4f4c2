"""What is computed at layers inside of `shard_map`, summed over devices, is that of one device.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has two: `device_programs.py`.
"""

from pathlib import Path

from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("device_programs.py")


def test_sums_over_devices_are_those_of_one():
    assert "programs agree" in run_on_devices(PROGRAMS, 2)
