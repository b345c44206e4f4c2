"""Hessians at points that are sharded over two devices; run by `test_sharded_hessians.py`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvax
from curvax.derivatives import hessian as hessian_module

jax.config.update("jax_enable_x64", True)
hessian_module.LEAST_COLUMNS = 1

A, B = jnp.arange(4.0) / 3, jnp.arange(2.0) - 0.7


def f(p):
    return jnp.sum(p["a"] ** 3) * jnp.sum(jnp.sin(p["b"]))


def flat(v):
    return f({"a": v[:4], "b": v[4:]})


EXPECTED = jax.hessian(flat)(jnp.concatenate([A, B]))


def check_mesh(kind):
    mesh = jax.make_mesh((2,), ("i",), (kind,))
    split = NamedSharding(mesh, PartitionSpec("i"))
    x = {"a": jax.device_put(A, split), "b": jax.device_put(B, split)}
    run = lambda x: curvax.hessian(f, x, batch_size=2)[0]
    np.testing.assert_allclose(run(x), EXPECTED, 1e-12)
    np.testing.assert_allclose(jax.jit(run)(x), EXPECTED, 1e-12)


def check_shard_map():
    """A loss that differs between devices, at one point: JAX adds up its derivatives."""
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,))
    split = PartitionSpec("i")

    def on_mesh(hessian):
        run = lambda scale, x: hessian(lambda p: scale[0] * f(p), x)[None]
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split)
        )

    def naive(loss, x):
        flat, unflatten = ravel_pytree(x)
        return jax.hessian(lambda v: loss(unflatten(v)))(flat)

    args = jnp.array([1.0, 2.0]), {"a": A, "b": B}
    ours = on_mesh(lambda loss, x: curvax.hessian(loss, x, batch_size=2)[0])
    np.testing.assert_allclose(ours(*args), on_mesh(naive)(*args), 1e-12)


if __name__ == "__main__":
    check_mesh(AxisType.Auto)
    check_mesh(AxisType.Explicit)
    check_shard_map()
    sys.stdout.write("Hessians agree\n")
