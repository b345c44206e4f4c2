"""Matrices that are computed together are what they are alone, on any number of devices.

JAX fixes its number of devices when it starts, so `together_programs.py` runs in a process of its
own, which has eight.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from curvature.linalg.matrices import positive
from curvax.curvature.linalg.psd import psd_eigh, psd_power
from curvax.curvature.linalg.tasks import Eigenvectors, Power, run_matrix_tasks
from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("together_programs.py")


def test_tasks_are_computed_in_order_and_the_rest_is_left_as_it_is():
    matrix = jnp.asarray(positive((2, 4, 4)))
    found = run_matrix_tasks([Power(matrix, 0.1, -1, 2.0), "nothing", Eigenvectors(matrix)])
    np.testing.assert_allclose(found[0], psd_power(matrix, 0.1, -1, 2.0))
    assert found[1] == "nothing"
    for a, b in zip(found[2], psd_eigh(matrix), strict=True):
        np.testing.assert_allclose(a, b)


def test_rows_of_a_task_make_its_result():
    """What is done on several devices, on one."""
    matrix = jnp.asarray(positive((2, 5, 5)))
    for task in (Power(matrix, 0.1, -1, 2.0), Power(matrix, 0.1, -0.5), Eigenvectors(matrix)):
        rows = jax.vmap(task.each)(*task.rows())
        for a, b in zip(
            jax.tree.leaves(task.of_rows(rows)), jax.tree.leaves(task.alone()), strict=True
        ):
            np.testing.assert_allclose(abs(a), abs(b), rtol=1e-9)


def test_matrices_shared_out_among_devices_are_those_of_one():
    """With stacks of them, of several sizes and dtypes; and programs do not grow with devices."""
    assert "programs agree" in run_on_devices(PROGRAMS, 8)
