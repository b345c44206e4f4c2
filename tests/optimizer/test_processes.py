"""The same script in two processes takes the steps of one device."""

from pathlib import Path

import pytest

from helpers import run_processes

PROGRAMS = Path(__file__).with_name("process_programs.py")


@pytest.mark.parametrize("checks", ["some", "split", pytest.param("rest", marks=pytest.mark.slow)])
def test_two_processes_take_the_steps_of_one_device(checks):
    """With two devices each; they are told if they differ in shapes, and may split a state."""
    written = run_processes(PROGRAMS, 2, checks, devices=2)
    assert all("all agree" in own for own in written)
