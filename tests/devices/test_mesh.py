"""What a user gives as a mesh is checked, and functions run on all of its devices.

JAX fixes its number of devices when it starts, so `mesh_programs.py` runs in a process of its own,
which has eight.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from curvax.devices.mesh_axis import MeshAxis
from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("mesh_programs.py")
ONE = Mesh(np.array(jax.devices()[:1]), ("data",))
TWO = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_no_mesh_is_none():
    assert MeshAxis.of(None, None) is None


def test_the_axis_of_a_mesh_with_one_need_not_be_named():
    assert MeshAxis.of(ONE, None) == MeshAxis.of(ONE, "data") == MeshAxis(ONE, ("data",))
    assert MeshAxis.of(TWO, ["model", "data"]) == MeshAxis(TWO, ("model", "data"))


def test_meshes_are_keys():
    same = Mesh(np.array(jax.devices()[:1]), ("data",))
    other = Mesh(np.array(jax.devices()[:1]), ("other",))
    assert len({MeshAxis.of(mesh, None) for mesh in (ONE, same, other)}) == 2


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((None, "data", False), ValueError, r"axis='data' is an axis of a mesh; give mesh as well"),
        ((None, None, True), ValueError, r"replicated=True asks for .* give mesh as well"),
        ((8, None, False), TypeError, r"must be a jax.sharding.Mesh.* got int"),
        (
            (AbstractMesh((1,), ("data",)), None, False),
            TypeError,
            r"must be a jax.sharding.Mesh.* got AbstractMesh",
        ),
        ((TWO, None, False), ValueError, r"the axes \('data', 'model'\); say along which"),
        ((ONE, "batch", False), ValueError, r"axis='batch' must name .* which has \('data',\)"),
        ((TWO, ("data", "data"), False), ValueError, r"must name one or more axes"),
        ((TWO, (), False), ValueError, r"must name one or more axes"),
        ((TWO, 0, False), ValueError, r"axis=0 must name one or more axes"),
    ],
)
def test_what_makes_no_sense_is_refused(given, error, words, unchecked):
    mesh, axis, replicated = given
    with pytest.raises(error, match="^curvax: .*" + words):
        MeshAxis.of(mesh, axis, replicated)


def test_specs_say_along_which_axis_arrays_are_split():
    axis = MeshAxis(TWO, ("data",))
    assert axis.spec(None) == PartitionSpec()
    assert axis.spec(2) == PartitionSpec(None, None, ("data",))
    assert axis.sharding(0) == NamedSharding(TWO, PartitionSpec("data"))
    assert axis.count == 1
    assert not axis.is_multi_process


def test_a_function_on_one_device_is_itself():
    axis = MeshAxis(ONE, ("data",))
    split, whole = axis.spec(0), axis.spec(None)
    on_all = axis.shard_map(lambda x, w: axis.psum(x * w["w"]), (split, whole), whole)
    assert on_all(jnp.arange(3.0), {"w": jnp.ones(())}).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_on_the_devices_of_the_mesh_or_nowhere_is_placed_well(kind):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(kind,))
    placed = jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec("data")))
    tree = {"placed": placed, "not": jnp.ones(2), "numpy": np.ones(2), "number": 3}
    MeshAxis(mesh, ("data",)).check_placement("x", tree)


def test_eight_devices_do_what_one_does():
    assert "programs agree" in run_on_devices(PROGRAMS, 8)
