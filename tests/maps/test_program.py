"""The program of a map follows from its arguments alone."""

from pathlib import Path

from helpers import run_on_devices


def test_the_program_of_a_map_does_not_depend_on_the_number_of_devices():
    program = Path(__file__).with_name("program_text.py")
    one, eight = (run_on_devices(program, count) for count in (1, 8))
    assert one.count("module @") == 11
    assert one == eight
