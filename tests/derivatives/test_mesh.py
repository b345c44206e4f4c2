"""On a mesh of devices derivatives are those of one device, and cost each device its share.

JAX fixes its number of devices when it starts, so most checks run in a process of their own, which
has eight: `mesh_programs.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import curvax
from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("mesh_programs.py")
X = jnp.arange(3.0)
MESH = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))


def loss(x):
    return jnp.sum(x**3)


@pytest.fixture(scope="module")
def checked():
    """What the quick checks say, made one after the other by one process."""
    checks = "corners", "placed", "examples", "program", "budget", "disk", "errors", "progress"
    return run_on_devices(PROGRAMS, 8, *checks)


def test_each_function_gives_the_numbers_of_one_device(checked):
    """Split or whole as documented, also where lengths and blocks do not divide."""
    assert "corners: 7" in checked


@pytest.mark.slow
@pytest.mark.parametrize(("check", "count"), [("matrix", 384), ("explicit", 96)])
def test_devices_blocks_modes_and_remainders_all_crossed(check, count):
    assert f"{check}: {count}" in run_on_devices(PROGRAMS, 8, check)


def test_points_that_are_split_already_give_the_same(checked):
    assert "placed: 8" in checked


@pytest.mark.slow
def test_points_that_are_split_in_any_way_give_the_same():
    assert "placed_anyhow: 240" in run_on_devices(PROGRAMS, 8, "placed_anyhow")


def test_transformations_of_split_hessians():
    assert "transformed: done" in run_on_devices(PROGRAMS, 8, "transformed")


def test_examples_are_split_for_the_fisher_information(checked):
    assert "examples: done" in checked


def test_nothing_is_sent_and_memory_falls_with_the_number_of_devices(checked):
    assert "program: done" in checked


def test_a_budget_is_for_each_device(checked):
    assert "budget: done" in checked


def test_a_store_does_not_show_how_many_devices_there_were(checked):
    assert "disk: done" in checked


def test_errors_that_need_several_devices(checked):
    assert "errors: done" in checked


def test_the_progress_bar_is_that_of_one_device(checked):
    assert "progress: done" in checked


@pytest.mark.parametrize(
    "function",
    [
        curvax.jacobian,
        curvax.hessian,
        curvax.hessian_blocks,
        curvax.hessian_diagonal,
        curvax.gauss_newton,
    ],
    ids=lambda function: function.__name__,
)
class TestErrors:
    def test_an_axis_without_a_mesh(self, function):
        with pytest.raises(ValueError, match=rf"^curvax\.{function.__name__}: axis='i' is an axis"):
            function(loss, X, axis="i")

    def test_replicated_without_a_mesh(self, function):
        with pytest.raises(ValueError, match=r"replicated=True .*; give mesh as well\."):
            function(loss, X, replicated=True)

    def test_an_axis_that_the_mesh_does_not_have(self, function):
        with pytest.raises(ValueError, match=r"axis='j' must name .* the mesh, which has \('i',\)"):
            function(loss, X, mesh=MESH, axis="j")

    def test_without_compiling(self, function):
        with pytest.raises(ValueError, match="mesh= does not go with jit=False"):
            function(loss, X, mesh=MESH, jit=False)

    def test_something_else_for_a_mesh(self, function, unchecked):
        with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
            function(loss, X, mesh=jax.devices())


@pytest.mark.parametrize("function", [curvax.jacobian, curvax.hessian])
def test_whole_in_memory_and_on_disk_is_refused(function, tmp_path):
    with pytest.raises(ValueError, match=r"replicated=True .* and out= .*Leave one of them out"):
        function(loss, X, mesh=MESH, replicated=True, out=tmp_path / "result.zarr")
