"""Processes that run one program together plan its sizes as the first of them does."""

import re
from pathlib import Path

from helpers import run_processes

PROGRAMS = Path(__file__).with_name("process_programs.py")


def test_processes_of_one_mesh_take_the_plan_of_the_first():
    written = run_processes(PROGRAMS, 2, devices=2)
    sizes = [re.findall(r"sizes (\[.*\])", text) for text in written]
    assert len(sizes[0]) == 1
    assert sizes[0] == sizes[1]
