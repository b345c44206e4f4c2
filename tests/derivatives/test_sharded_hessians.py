"""The Hessian at a sharded point is that of one device, without `mesh=` too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
from curvax.derivatives import hessian as hessian_module
from helpers import mesh_of

A, B = jnp.arange(4.0) / 3, jnp.arange(2.0) - 0.7


@pytest.fixture(autouse=True)
def _triangle_for_few_columns(monkeypatch):
    """Half of the symmetric matrix is computed, as is done where there are many columns."""
    monkeypatch.setattr(hessian_module, "LEAST_COLUMNS", 1)


def f(p):
    return jnp.sum(p["a"] ** 3) * jnp.sum(jnp.sin(p["b"]))


def naive(loss, x):
    flat, unflatten = ravel_pytree(x)
    return jax.hessian(lambda v: loss(unflatten(v)))(flat)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_the_hessian_at_a_sharded_point_is_that_of_one_device(kind, transform):
    put = lambda leaf: jax.device_put(leaf, NamedSharding(mesh_of(2, kind), P("data")))
    run = lambda x: curvax.hessian(f, x, batch_size=2)[0]
    found = transform(run)({"a": put(A), "b": put(B)})
    np.testing.assert_allclose(found, naive(f, {"a": A, "b": B}), 1e-12)


def test_the_hessian_under_shard_map_is_that_of_jax():
    """A loss that differs between devices, at one point: JAX sums its derivatives."""

    def on_mesh(hessian):
        run = lambda scale, x: hessian(lambda p: scale[0] * f(p), x)[None]
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        return jax.jit(jax.shard_map(run, mesh=mesh_of(2), **specs))

    args = jnp.array([1.0, 2.0]), {"a": A, "b": B}
    ours = on_mesh(lambda loss, x: curvax.hessian(loss, x, batch_size=2)[0])
    np.testing.assert_allclose(ours(*args), on_mesh(naive)(*args), 1e-12)
