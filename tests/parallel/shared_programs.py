"""Tasks shared out among devices, compared with computing them all. Run by `test_share.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from curvax.parallel import share_out

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


def check(count, check_vma):
    def local(matrix, rows):
        total = lax.psum(rows.T @ rows, "devices")
        gathered = lax.all_gather(rows, "devices", tiled=True)
        return share_out(tasks(matrix, total, gathered), WORK, "devices")

    mesh = jax.make_mesh(
        (count,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )
    replicated, split = PartitionSpec(), PartitionSpec("devices")
    shared = jax.shard_map(
        local, mesh=mesh, in_specs=(replicated, split), out_specs=replicated, check_vma=check_vma
    )
    expected = [task() for task in tasks(MATRIX, ROWS.T @ ROWS, ROWS)]
    found = jax.jit(shared)(MATRIX, ROWS)
    same_type = lambda a, b: a.shape == b.shape and a.dtype == b.dtype
    assert all(jax.tree.leaves(jax.tree.map(same_type, found, expected)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, expected)


for number in (1, 2, 3):
    check(number, check_vma=True)
    check(number, check_vma=False)
print("programs agree")  # noqa: T201
