"""What runs within a budget fits it, and blocks a tenth larger would not."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import curvax
from derivatives.budgeted import PROGRAMS
from helpers import as_users_run

pytestmark = pytest.mark.optimised

# It shares examples out evenly, so all sizes that make as many microbatches are one program; what
# must not fit there is one microbatch less.
EVEN = "per-example gradients"

SCRIPT = Path(__file__).parent / "budgeted.py"


def needs(program, size):
    return curvax.memory_usage(program.build(size), *program.args).added_bytes


def planned(program, budget):
    with curvax.recorded_plans() as plans:
        jax.block_until_ready(jax.tree.leaves(program.run(budget)))
    [plan] = plans
    return plan


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 2 else [])
        for number, name in enumerate(PROGRAMS)
    ],
)
def test_over_two_decades_it_fits_and_a_tenth_more_does_not(name):
    program = PROGRAMS[name]()
    least = needs(program, 1)
    sizes = []
    for budget in (1.2 * least, 120 * least):
        plan = planned(program, int(budget))
        sizes.append(plan.batch_size)
        assert plan.budget_bytes == int(budget)
        assert plan.usage.added_bytes <= budget
        if plan.batch_size < plan.max_size:
            larger = min(plan.max_size, math.ceil(1.1 * plan.batch_size))
            if name == EVEN and -(-plan.max_size // larger) == plan.num_batches:
                larger = -(-plan.max_size // (plan.num_batches - 1))
            assert needs(program, larger) > budget
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_the_plan_is_of_the_program_that_runs():
    program = PROGRAMS["FFT optics"]()
    plan = planned(program, 3 * needs(program, 1))
    assert plan.usage.added_bytes == needs(program, plan.batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP Hessian", "FFT optics"])
@pytest.mark.parametrize("factor", [2, 8])
def test_no_size_much_larger_fits(name, factor):
    """All of them are compiled and asked."""
    program = PROGRAMS[name]()
    budget = factor * needs(program, 1)
    plan = planned(program, budget)
    largest = max(s for s in range(1, plan.max_size + 1) if needs(program, s) <= budget)
    assert plan.batch_size >= largest / 1.1


def resident(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    result = subprocess.run(command, env=as_users_run(), check=True, capture_output=True, text=True)
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_stays_within_the_budget():
    """All columns at once would not."""
    budget, compiler = 150_000_000, 60_000_000
    assert resident("within", budget) < budget + compiler
    assert resident("at-once") > budget + compiler


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_hessian_of_20000_parameters_goes_to_disk_in_less_than_a_gigabyte(tmp_path):
    """It has 1.6; the rest is what the interpreter had with JAX, before anything was compiled."""
    assert resident("to-disk", tmp_path / "H.zarr") < 1e9
    shutil.rmtree(tmp_path / "H.zarr")
