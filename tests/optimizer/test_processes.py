"""The same script in two processes, with two devices each, takes the steps of one device."""

from pathlib import Path

import pytest

from helpers import run_processes

PROGRAM = Path(__file__).with_name("process_programs.py")


@pytest.fixture(scope="module")
def written():
    """What two processes write that make the quick checks."""
    return run_processes(PROGRAM, 2, "steps", "split", "disagreement", devices=2)


def assert_done(check, written):
    assert [f"{check} done" in text for text in written] == [True, True]


def test_steps_are_those_of_one_device(written):
    """With a state that is saved and restored in between."""
    assert_done("steps", written)


def test_processes_that_differ_in_shapes_all_raise(written):
    """And none waits for the other forever."""
    assert_done("disagreement", written)


def test_a_sharded_state_is_gathered_by_each_process_and_sharded_again(written):
    assert_done("split", written)


@pytest.mark.slow
def test_other_methods_are_those_of_one_device():
    """And steps on a mesh with a second axis, with arrays that all processes have."""
    assert_done("rest", run_processes(PROGRAM, 2, "rest", devices=2))
