"""Maps that are split among the devices of a mesh give the numbers that one device gives.

JAX fixes its number of devices when it starts, so the checks run in processes of their own, which
have eight, of which meshes of any number are made: `mesh_programs.py` for what numbers come out,
`mesh_placement_programs.py` for where they are and what that takes.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import curvax
from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("mesh_programs.py")
PLACEMENT = Path(__file__).with_name("mesh_placement_programs.py")

# A map, a number of devices, of examples, and of those that are computed at once on each device.
CORNERS = {
    "one more for some devices": ["chunked_vmap,micro_vmap,micro_grad:3:13:2"],
    "fewer examples than devices": ["chunked_vmap,micro_vmap,micro_grad:8:5:all"],
    "a batch": ["microbatch:8:24:2"],
}
ALL_SIZES = "1,2,5,all"
ALL = {
    f"{name} on {devices}": [f"{name}:{devices}:24,19,5:{ALL_SIZES}"]
    for name in ("chunked_vmap", "micro_vmap", "micro_grad", "microbatch")
    for devices in (1, 2, 3, 8)
}


def agree(*arguments, programs=PROGRAMS):
    return int(run_on_devices(programs, 8, *arguments).split()[0])


@pytest.mark.parametrize("corner", CORNERS)
def test_values_and_derivatives_are_those_of_one_device(corner):
    assert agree("matrix", *CORNERS[corner]) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("part", ALL)
def test_values_and_derivatives_are_those_of_one_device_for_all_numbers(part):
    assert agree("matrix", *ALL[part]) >= 4


def test_no_example_is_computed_that_is_not_there():
    assert agree("exactness")


def test_outputs_of_any_dtype_can_be_collected_and_reduced():
    assert agree("dtypes")


@pytest.mark.parametrize("devices", ["3", pytest.param("2", marks=pytest.mark.slow)])
def test_the_first_microbatches_are_the_first_of_the_batch(devices):
    assert agree("limits", devices)


def test_results_are_split_as_documented_however_arrays_were():
    assert agree("placement", programs=PLACEMENT)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_other_axes_of_the_mesh_are_left_alone(kind):
    assert agree("model_axis", kind, programs=PLACEMENT)


def test_maps_can_be_mapped():
    assert agree("transformations", programs=PLACEMENT)


def test_devices_meet_once_for_each_sum_and_else_not_at_all():
    assert agree("collectives", programs=PLACEMENT)


def test_temporaries_fall_with_the_number_of_devices_and_budgets_are_for_each():
    assert agree("memory", programs=PLACEMENT)


def test_what_cannot_be_split_is_refused():
    assert agree("errors", programs=PLACEMENT)


MAPS = {
    "chunked_vmap": lambda **options: curvax.chunked_vmap(jnp.sin, **options),
    "micro_vmap": lambda **options: curvax.micro_vmap(jnp.sin, **options),
    "microbatch": lambda **options: curvax.microbatch(jnp.sin, 0, **options),
    "micro_grad": lambda **options: curvax.micro_grad(jnp.vdot, **options),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_is_given_as_a_mesh_is_checked(name, unchecked):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(TypeError, match=f"curvax.{name}: mesh must be a jax.sharding.Mesh"):
        MAPS[name](mesh=jax.devices())
    with pytest.raises(ValueError, match=f"curvax.{name}: axis='model' must name"):
        MAPS[name](mesh=mesh, axis="model")
    with pytest.raises(ValueError, match=f"curvax.{name}: axis='data' .* give mesh"):
        MAPS[name](axis="data")
    with pytest.raises(ValueError, match=f"curvax.{name}: replicated=True .* give mesh"):
        MAPS[name](replicated=True)
