"""Tasks shared out among devices, compared with computing them all. Run by `test_share.py`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from curvax.devices.task_assignment import run_assigned

jax.config.update("jax_enable_x64", True)

MATRIX = jnp.cos(jnp.arange(9.0)).reshape(3, 3)
ROWS = jnp.sin(jnp.arange(36.0)).reshape(12, 3)
WORK = [3.0, 1.0, 1.0, 2.0, 0.5, 1.0]


def tasks(matrix, total, gathered):
    """What is made of an argument, of a sum over devices, of both, and of neither.

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


def on_devices(local, count, check_vma, in_specs):
    """A function on so many devices, with the same results on all of them."""
    mesh = jax.make_mesh(
        (count,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )
    options = {"mesh": mesh, "out_specs": PartitionSpec(), "check_vma": check_vma}
    return jax.shard_map(local, in_specs=in_specs, **options)


def check(count, check_vma):
    def local(matrix, rows):
        total = lax.psum(rows.T @ rows, "devices")
        gathered = lax.all_gather(rows, "devices", tiled=True)
        return run_assigned(tasks(matrix, total, gathered), WORK, "devices")

    specs = PartitionSpec(), PartitionSpec("devices")
    shared = on_devices(local, count, check_vma, specs)
    expected = [task() for task in tasks(MATRIX, ROWS.T @ ROWS, ROWS)]
    found = jax.jit(shared)(MATRIX, ROWS)
    same_type = lambda a, b: a.shape == b.shape and a.dtype == b.dtype
    assert all(jax.tree.leaves(jax.tree.map(same_type, found, expected)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, expected)


def check_program(count, num_tasks, sent):
    """One collective operation, of as few bytes as can be, and a branch for each share."""

    def local(matrix):
        powers = [lambda k=k: jnp.sin(matrix) ** k for k in range(2, 2 + num_tasks)]
        return run_assigned(powers, [1.0] * num_tasks, "devices")

    program = jax.jit(on_devices(local, count, False, (PartitionSpec(),)))
    text = program.lower(MATRIX).compile().as_text()
    assert re.findall(r"f64\[(\d+)\]\S* (all-\w+)\(", text) == [sent]
    (branches,) = re.findall(r"branch_computations={(.*?)}", text)
    assert branches.count("%") == min(count, num_tasks + 1)
    for found, power in zip(program(MATRIX), range(2, 2 + num_tasks), strict=True):
        np.testing.assert_allclose(found, np.sin(MATRIX) ** power, rtol=1e-12)


for number in (1, 2, 3):
    check(number, check_vma=True)
    check(number, check_vma=False)
check_program(2, num_tasks=4, sent=("36", "all-gather"))
check_program(4, num_tasks=3, sent=("36", "all-gather"))
check_program(8, num_tasks=3, sent=("27", "all-reduce"))
print("programs agree")  # noqa: T201
