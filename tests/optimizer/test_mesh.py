"""Steps on several devices of a mesh are those of one device.

JAX fixes its number of devices when it starts, so the checks run in processes of their own, which
have eight: `mesh_programs.py`.
"""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import run_on_devices
from optimizer.problems import make

PROGRAMS = Path(__file__).with_name("mesh_programs.py")
BY_DEFAULT = [("mlp", "adaptive", "11"), ("cnn", "fixed", "00")]
TRAININGS = [
    pytest.param(*case, marks=[] if case in BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(
        ("mlp", "cnn", "transformer"), ("fixed", "adaptive"), ("00", "01", "10", "11")
    )
]


def check(*arguments):
    written = run_on_devices(PROGRAMS, 8, *arguments)
    assert "all agree" in written
    return written


@pytest.mark.parametrize(("model", "rules", "flags"), TRAININGS)
def test_training_is_the_same_on_one_two_and_eight_devices(model, rules, flags):
    """Whether or not they share out inverses (first flag) and products with them (second)."""
    check("training", model, rules, flags)


def test_what_is_drawn_does_not_depend_on_the_number_of_devices():
    check("modes")


def test_axes_may_be_explicit_or_not_and_parameters_split_along_others():
    """Also in a loop of the caller's, inside of `jit`; and what was split stays so."""
    check("meshes")


def test_everything_else_works_on_a_mesh():
    """`fit`, `burnin`, `compute_*`; states that are saved and restored; buffers are donated."""
    check("methods")


def test_all_devices_refuse_curvature_that_is_not_finite_on_one():
    """Block by block, as one device does; with a state that is whole, or split."""
    check("refused")


def test_a_step_may_be_taken_inside_of_a_map_of_the_callers():
    check("own_map")


def test_wrong_arguments_on_a_mesh_are_told():
    check("errors")


def test_the_compiled_step_sends_no_more_among_eight_devices_than_among_two():
    written = check("collectives")
    found = json.loads(written.splitlines()[0])
    assert found["8"][0] <= found["2"][0] < 10
    assert found["8"][1] <= found["2"][1]


def test_inverses_are_shared_out_evenly_among_eight_devices():
    """By the sum of cubes of the sizes of the matrices that each device inverts in a step."""
    work = json.loads(check("balance").splitlines()[0])
    loads = [sum(own) for own in work]
    assert len(loads) == 8
    largest = max(x for own in work for x in own)
    assert max(loads) <= 1.3 * max(np.mean(loads), largest)


def test_processes_must_be_given_a_budget_in_bytes(monkeypatch):
    make(multi_device=True, memory_budget="50%")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"memory_budget='50%' is a fraction .* Give bytes"):
        make(multi_device=True, memory_budget="50%")


@pytest.mark.usefixtures("unchecked")
def test_a_mesh_that_is_none_is_told():
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, such as .* got int"):
        make(mesh=8)


def test_a_mesh_must_have_the_named_axis():
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    with pytest.raises(ValueError, match=r"\('data', 'model'\), none of which is pmap_axis_name"):
        make(mesh=mesh)
    assert make(mesh=mesh, pmap_axis_name="data").mesh is mesh
    assert make(mesh=jax.make_mesh((1,), ("any",))).mesh.axis_names == ("any",)
