"""The program of a map is a function of its arguments alone."""

import subprocess
import sys
from pathlib import Path

import jax

from helpers import as_users_run
from maps.program_text import program_text


def test_the_program_of_a_map_does_not_depend_on_the_number_of_devices():
    """With one device, in a process that starts with one, and with eight."""
    program = Path(__file__).with_name("program_text.py")
    command = [sys.executable, str(program)]
    one = subprocess.run(command, env=as_users_run(), check=True, capture_output=True, text=True)
    assert len(jax.devices()) == 8
    assert one.stdout.count("module @") == 11
    assert one.stdout == program_text()
