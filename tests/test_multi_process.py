"""The example with several processes computes what one process does, and leaves nothing running."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples import multi_process

from helpers import as_users_run

ROOT = Path(__file__).parents[1]


def test_two_processes_compute_what_one_does():
    run = subprocess.run(
        [sys.executable, "-m", "examples.multi_process"],
        env=as_users_run() | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    losses = re.findall(r"process (\d) of 2, 1 of 2 devices: loss (\S+) → (\S+)", run.stdout)
    assert sorted(number for number, *_ in losses) == ["0", "1"]
    assert len({tuple(others) for _, *others in losses}) == 1
    before, after = map(float, losses[0][1:])
    assert after < before / 5
    assert "The Hessian is the same, to" in run.stdout
    assert "So are parameters after 10 steps, to" in run.stdout


def test_a_process_that_fails_ends_the_wait_for_others():
    programs = ["raise SystemExit(3)", "import time; time.sleep(60)"]
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        with pytest.raises(SystemExit, match=r"their exit codes are \[3, None\]"):
            multi_process.wait_for(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_the_wait_has_an_end(monkeypatch):
    monkeypatch.setattr(multi_process, "SECONDS", 0.3)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(SystemExit, match="took more than"):
            multi_process.wait_for([process])
    finally:
        process.kill()
        process.wait()


def test_a_process_of_a_cluster_needs_a_folder(capsys):
    with pytest.raises(SystemExit):
        multi_process.main(["--cluster"])
    assert "give a folder for the results: --out" in capsys.readouterr().err
