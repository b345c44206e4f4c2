"""Tasks are assigned evenly, and their results do not depend on it.

JAX fixes its number of devices when it starts, so `task_assignment_programs.py` runs in a process
of its own, which has eight.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from curvax.devices.task_assignment import assign, run_assigned
from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("task_assignment_programs.py")
WORK = st.lists(st.floats(0, 100), max_size=12)


@given(work=WORK, count=st.integers(1, 5))
def test_nobody_has_much_more_than_is_necessary(work, count):
    owners = assign(work, count)
    loads = np.zeros(count)
    np.add.at(loads, np.asarray(owners, int), np.asarray(work, float))
    assert len(owners) == len(work)
    # Whatever is done, one has the average, one the largest task, and if there are more tasks than
    # devices, one has two of the first tasks; the largest first is within 4/3 of the best.
    first = [*sorted(work, reverse=True), *[0.0] * (count + 1)]
    best = max([sum(work) / count, first[0], first[count - 1] + first[count]])
    assert loads.max() <= best * 4 / 3 + 1e-9


def test_equal_tasks_are_shared_equally():
    assert sorted(assign([1.0] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert assign([], 3) == []


def test_without_an_axis_everything_is_computed():
    found = run_assigned([lambda: jnp.ones(2), lambda: {"a": jnp.zeros(())}], [1.0, 2.0], None)
    assert jax.tree.map(jnp.shape, found) == [(2,), {"a": ()}]
    assert run_assigned([], [], None) == []


def test_the_axis_may_be_one_of_a_vmap():
    shared = lambda x: run_assigned([lambda: jnp.sin(x), lambda: 2 * x], [1.0, 2.0], "devices")
    found = jax.vmap(shared, in_axes=None, out_axes=0, axis_name="devices", axis_size=3)(
        jnp.ones(2)
    )
    np.testing.assert_allclose(found[0], np.full((3, 2), np.sin(1)))
    np.testing.assert_allclose(found[1], np.full((3, 2), 2.0))


def test_several_devices_return_what_one_computes():
    """By programs that grow with the tasks and not with the devices, as does what they send."""
    assert "programs agree" in run_on_devices(PROGRAMS, 8)
