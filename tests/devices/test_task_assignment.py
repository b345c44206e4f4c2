"""Tasks are assigned evenly, and their results do not depend on the assignment."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from curvax.devices.task_assignment import assign, run_assigned
from helpers import assert_same, mesh_of

WORK = st.lists(st.floats(0, 100), max_size=12)


@given(work=WORK, count=st.integers(1, 5))
def test_no_device_has_much_more_work_than_necessary(work, count):
    owners = assign(work, count)
    loads = np.zeros(count)
    np.add.at(loads, np.asarray(owners, int), np.asarray(work, float))
    assert len(owners) == len(work)
    # Under any assignment one device has the average, one the largest task, and if there are more
    # tasks than devices, one has two of the first tasks. The largest first is within 4/3 of that.
    first = [*sorted(work, reverse=True), *[0.0] * (count + 1)]
    best = max([sum(work) / count, first[0], first[count - 1] + first[count]])
    assert loads.max() <= best * 4 / 3 + 1e-9


def test_equal_tasks_are_assigned_equally():
    assert sorted(assign([1.0] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert assign([], 3) == []


def test_without_an_axis_all_tasks_are_computed():
    found = run_assigned([lambda: jnp.ones(2), lambda: {"a": jnp.zeros(())}], [1.0, 2.0], None)
    assert jax.tree.map(jnp.shape, found) == [(2,), {"a": ()}]
    assert run_assigned([], [], None) == []


def test_the_axis_may_be_one_of_a_vmap():
    assigned = lambda x: run_assigned([lambda: jnp.sin(x), lambda: 2 * x], [1.0, 2.0], "data")
    mapped = jax.vmap(assigned, in_axes=None, out_axes=0, axis_name="data", axis_size=3)
    found = mapped(jnp.ones(2))
    np.testing.assert_allclose(found[0], np.full((3, 2), np.sin(1)))
    np.testing.assert_allclose(found[1], np.full((3, 2), 2.0))


MATRIX = jnp.cos(jnp.arange(9.0)).reshape(3, 3)
ROWS = jnp.sin(jnp.arange(36.0)).reshape(12, 3)


def tasks(matrix, total, gathered):
    """Functions of an argument, of a sum over devices, of both, and of neither.

    By its type, what was gathered may differ between devices; its values do not.
    """
    return [
        lambda: matrix @ matrix,
        lambda: {"sine": jnp.sin(total), "ones": jnp.ones(3)},
        lambda: jnp.arange(4),
        lambda: jnp.linalg.inv(total + jnp.eye(3)) @ matrix,
        lambda: (total[0, 0] > 0, ()),
        lambda: [gathered**2, jnp.zeros(2)],
    ]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_are_those_of_one_device(count, check_vma):
    def local(matrix, rows):
        total = lax.psum(rows.T @ rows, "data")
        gathered = lax.all_gather(rows, "data", tiled=True)
        work = [3.0, 1.0, 1.0, 2.0, 0.5, 1.0]
        return run_assigned(tasks(matrix, total, gathered), work, "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(local, mesh=mesh_of(count), check_vma=check_vma, **specs)
    expected = [task() for task in tasks(MATRIX, ROWS.T @ ROWS, ROWS)]
    assert_same(jax.jit(mapped)(MATRIX, ROWS), expected, 1e-10, 0)


@pytest.mark.parametrize(
    ("count", "num_tasks", "sent"),
    [(2, 4, ("36", "all-gather")), (4, 3, ("36", "all-gather")), (8, 3, ("27", "all-reduce"))],
)
def test_programs_and_what_they_send_grow_with_tasks_and_not_with_devices(count, num_tasks, sent):
    """One collective operation, of as few bytes as possible, and a branch for each device."""

    def local(matrix):
        powers = [lambda k=k: jnp.sin(matrix) ** k for k in range(2, 2 + num_tasks)]
        return run_assigned(powers, [1.0] * num_tasks, "data")

    specs = {"in_specs": P(), "out_specs": P()}
    program = jax.jit(jax.shard_map(local, mesh=mesh_of(count), check_vma=False, **specs))
    text = program.lower(MATRIX).compile().as_text()
    assert re.findall(r"f64\[(\d+)\]\S* (all-\w+)\(", text) == [sent]
    (branches,) = re.findall(r"branch_computations={(.*?)}", text)
    assert branches.count("%") == min(count, num_tasks + 1)
    for found, power in zip(program(MATRIX), range(2, 2 + num_tasks), strict=True):
        np.testing.assert_allclose(found, np.sin(MATRIX) ** power, rtol=1e-12)
