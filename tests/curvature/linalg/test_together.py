"""Powers and eigenvectors that are computed together are those computed alone, on any mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from curvature.linalg.matrices import positive
from curvax.curvature.linalg.psd import psd_eigh, psd_power
from curvax.curvature.linalg.tasks import Eigenvectors, Power, run_matrix_tasks
from helpers import assert_same, mesh_of


def test_results_are_in_order_and_what_is_no_task_is_kept():
    matrix = jnp.asarray(positive((2, 4, 4)))
    found = run_matrix_tasks([Power(matrix, 0.1, -1, 2.0), "nothing", Eigenvectors(matrix)])
    np.testing.assert_allclose(found[0], psd_power(matrix, 0.1, -1, 2.0))
    assert found[1] == "nothing"
    for a, b in zip(found[2], psd_eigh(matrix), strict=True):
        np.testing.assert_allclose(a, b)


def test_the_rows_of_a_task_give_its_result():
    """As they do on several devices; here under `vmap`."""
    matrix = jnp.asarray(positive((2, 5, 5)))
    for task in (Power(matrix, 0.1, -1, 2.0), Power(matrix, 0.1, -0.5), Eigenvectors(matrix)):
        rows = jax.vmap(task.each)(*task.rows())
        for a, b in zip(
            jax.tree.leaves(task.of_rows(rows)), jax.tree.leaves(task.alone()), strict=True
        ):
            np.testing.assert_allclose(abs(a), abs(b), rtol=1e-9)


SHAPES = [(5, 5), (3, 2, 5, 5), (7, 7), (5, 5)]
MATRICES = [jnp.asarray(positive(shape, seed)) for seed, shape in enumerate(SHAPES)]
MATRICES.append(jnp.zeros((4, 4)))
WEIGHTS = jnp.broadcast_to(jnp.asarray([0.1, 0.2, 0.3])[:, None], (3, 2))


def tasks(matrices):
    """Stacks of matrices, of several sizes and dtypes."""
    first, stack, other, last, zero = matrices
    return [
        Power(first, 0.1, -1),
        Power(stack, WEIGHTS, -1, 2.0),
        Eigenvectors(stack),
        jnp.ones(3),  # No task at all.
        Power(other, 0.0, -0.5, 3.0),
        Power(zero, 0.25, -1),
        Power(stack, 0.3, 1),
        Eigenvectors(last),
        Power(jnp.zeros((2, 0, 0)), 0.1, -1),
        Power(last, 0.2, -0.5),
        Power(last.astype(jnp.float32), 0.2, -1),
    ]


def without_signs(found):
    """Eigenvectors are unique up to their signs, which cancel in products."""
    values = {2: found[2], 7: found[7]}
    squares = {
        k: (x, (v * x[..., None, :]) @ jnp.matrix_transpose(v)) for k, (x, v) in values.items()
    }
    return [squares.get(k, x) for k, x in enumerate(found)]


@functools.cache
def on_devices(count, check_vma):
    run = lambda matrices: without_signs(run_matrix_tasks(tasks(matrices), "data"))
    specs = {"in_specs": P(), "out_specs": P()}
    mapped = jax.shard_map(run, mesh=mesh_of(count), check_vma=check_vma, **specs)
    return jax.jit(mapped).lower(MATRICES).compile()


@pytest.mark.parametrize("check_vma", [True, False], ids="check_vma={}".format)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_matrices_computed_on_several_devices_are_those_of_one(count, check_vma):
    expected = without_signs(run_matrix_tasks(tasks(MATRICES)))
    found = on_devices(count, check_vma)(MATRICES)
    assert_same(found[:-1], expected[:-1], 1e-9, 1e-12)
    assert_same(found[-1], expected[-1], 1e-5, 1e-12)


def test_the_program_does_not_grow_with_the_number_of_devices():
    """It differs in the assignment of matrices alone, and sends sums only."""
    cases = [(count, check_vma) for count in (2, 3, 8) for check_vma in (True, False)]
    texts = [on_devices(*case).as_text() for case in cases]
    reductions = {len(re.findall(r" all-reduce(-start)?\(", text)) for text in texts}
    lengths = [text.count(" = ") for text in texts]
    assert len(reductions) == 1
    assert max(lengths) <= 1.05 * min(lengths)
    assert not any("all-gather" in text for text in texts)
