"""Points that are already sharded have the Hessian that one device computes.

JAX fixes its number of devices when it starts, so the checks run in a process of their own, which
has two: `sharded_hessians.py`.
"""

from pathlib import Path

from helpers import run_on_devices

PROGRAM = Path(__file__).with_name("sharded_hessians.py")


def test_sharded_points_have_the_hessian_of_one_device():
    assert "Hessians agree" in run_on_devices(PROGRAM, 2)
