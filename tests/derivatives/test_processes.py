"""Several processes, started as users start them, compute what one computes.

What each of them does is in `process_programs.py`.
"""

import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from derivatives import process_programs
from helpers import run_processes, started_processes

PROGRAM = Path(process_programs.__file__)


def run(folder, count, *checks, devices=1):
    return run_processes(PROGRAM, count, str(folder), *checks, devices=devices)


class TestTwoProcesses:
    """With two devices each."""

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, tmp_path_factory):
        return run(tmp_path_factory.mktemp("results"), 2, "store", "memory", "alone", devices=2)

    @pytest.mark.parametrize("check", ["store", "memory", "alone"])
    def test_results_are_those_of_one(self, written, check):
        """In one store, in memory, and in one process by itself."""
        assert [f"{check} done" in text for text in written] == [True, True]

    def test_sizes_fit_the_budget_of_the_first(self, written):
        """And not that of the other."""
        sizes = [re.findall(r"sizes \[(\d+)\]", text) for text in written]
        assert sizes[0] == sizes[1]
        assert sizes[0][0] == "2"


def test_processes_that_disagree_all_raise(tmp_path):
    run(tmp_path, 2, "disagreement")


@pytest.mark.slow
def test_three_processes_that_disagree_all_raise(tmp_path):
    run(tmp_path, 3, "disagreement")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_if_one_process_is_killed_the_others_stop_and_the_store_resumes(tmp_path, victim):
    """Within the heartbeat time; with as many processes as one likes, on other devices."""
    done = tmp_path / "killed" / ".curvax" / "done"
    with started_processes(PROGRAM, 2, str(tmp_path), "slowly") as processes:
        wait_for(lambda: done.is_dir() and len([*done.iterdir()]) >= 4)
        processes[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        other = processes[1 - victim]
        other.communicate(timeout=process_programs.HEARTBEAT + 20)
        assert other.returncode != 0
    finished = len([*done.iterdir()])
    assert 4 <= finished < 24, f"{finished} blocks after {time.monotonic() - begin:.0f} s"
    shutil.copytree(tmp_path / "killed", tmp_path / "again" / "killed")
    run(tmp_path, 1, "resumed", devices=2)
    run(tmp_path / "again", 3, "resumed")
