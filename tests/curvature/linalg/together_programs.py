"""Matrices shared out among devices, compared with one device. Run by `test_together.py`."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from curvax.curvature.linalg.tasks import Eigenvectors, Power, run_matrix_tasks

jax.config.update("jax_enable_x64", True)
DRAWN = np.random.default_rng(0)


def positive(*shape):
    x = DRAWN.standard_normal(shape)
    return jnp.asarray(x @ np.swapaxes(x, -1, -2) / shape[-1])


MATRICES = [positive(5, 5), positive(3, 2, 5, 5), positive(7, 7), jnp.zeros((4, 4)), positive(5, 5)]
WEIGHTS = jnp.asarray([0.1, 0.2, 0.3])[:, None] * jnp.ones((3, 2))


def tasks(matrices):
    first, stack, other, zero, last = matrices
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
    """Eigenvectors are what they are up to their signs, of which products have none."""
    values = {2: found[2], 7: found[7]}
    squares = {
        k: (x, (v * x[..., None, :]) @ jnp.matrix_transpose(v)) for k, (x, v) in values.items()
    }
    return [squares.get(k, x) for k, x in enumerate(found)]


def on_devices(count, check_vma):
    mesh = Mesh(np.array(jax.devices()[:count]), ("d",))
    run = lambda matrices: without_signs(run_matrix_tasks(tasks(matrices), "d"))
    shared = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
    return jax.jit(shared).lower(MATRICES).compile()


expected = without_signs(run_matrix_tasks(tasks(MATRICES)))
reduced = set()
for count, check_vma in itertools.product((1, 2, 3, 8), (True, False)):
    program = on_devices(count, check_vma)
    for a, b in zip(jax.tree.leaves(program(MATRICES)), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, 1e-5 if a.dtype == jnp.float32 else 1e-9, 1e-12)
    if count > 1:
        text = program.as_text()
        reduced.add((len(re.findall(r" all-reduce(-start)?\(", text)), len(text.splitlines())))
        assert "all-gather" not in text
# The same program for any number of devices, but for how matrices are shared out.
numbers, lengths = zip(*reduced, strict=True)
assert len(set(numbers)) == 1, reduced
assert max(lengths) <= 1.05 * min(lengths), reduced
print("programs agree")  # noqa: T201
