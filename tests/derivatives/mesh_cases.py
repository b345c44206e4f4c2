"""Functions, points and oracles of the tests of derivatives on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import curvax
import helpers

KINDS = AxisType.Auto, AxisType.Explicit
POINTS = {
    "even": {"a": np.cos(np.arange(16.0)).reshape(8, 2), "b": np.sin(np.arange(8.0))},
    "odd": {"a": np.cos(np.arange(15.0)).reshape(5, 3), "b": np.arange(3.0), "c": np.float64(0.3)},
}
X = POINTS["even"]
WAVES = np.sin(np.arange(8.0))[:, None]
WEIGHT = np.linspace(1.0, 2.0, 14)


def residuals(p):
    """A vector and a matrix, on which each coordinate has an influence of its own."""
    flat = ravel_pytree(p)[0]
    vector = jnp.sin(WAVES * flat[None]) @ jnp.cos(jnp.arange(1.0 * flat.size) * flat)
    return {"matrix": jnp.outer(vector[:2], flat[:3]), "vector": vector}


def stacked(p):
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(residuals(p))])


def loss(p):
    return jnp.sum(stacked(p) ** 2)


mesh_of = functools.partial(helpers.mesh_of, name="i")


def two_axes(*kinds):
    """A mesh of four by two devices."""
    return jax.make_mesh((4, 2), ("i", "model"), kinds)


@functools.cache
def naive(name, point):
    """What one device computes at once."""
    flat, unflatten = ravel_pytree(POINTS[point])
    jacobian = lambda f: jax.jit(jax.jacfwd(lambda v: f(unflatten(v))))(flat)
    if name == "hessian":
        return jax.jit(jax.hessian(lambda v: loss(unflatten(v))))(flat)
    if name == "jacobian":
        return jacobian(residuals)
    if name == "gauss_newton":
        J = jacobian(stacked)
        return J.T @ (WEIGHT[:, None] * J)
    if name == "hessian_diagonal":
        return unflatten(jnp.diagonal(naive("hessian", point)))
    blocks = curvax.hessian_to_pytree(naive("hessian", point), POINTS[point])
    return {key: blocks[key][key] for key in blocks}


def compute(name, x, **options):
    """The matrix or pytree that a function returns first."""
    if name == "jacobian":
        return curvax.jacobian(residuals, x, **options)[0]
    if name == "gauss_newton":
        return curvax.gauss_newton(stacked, x, WEIGHT, **options)[0]
    result = getattr(curvax, name)(loss, x, **options)
    return result[0] if name == "hessian" else result


same = functools.partial(helpers.assert_same, rtol=1e-10, atol=1e-11)

# A function of curvax, with options.
WAYS = {
    "hessian": ("hessian", {}),
    "forward jacobian": ("jacobian", {"mode": "forward"}),
    "reverse jacobian": ("jacobian", {"mode": "reverse"}),
    "gauss_newton": ("gauss_newton", {}),
    "hessian_diagonal": ("hessian_diagonal", {}),
    "hessian_blocks": ("hessian_blocks", {}),
}


def assert_sharded_as_documented(result, way, mesh, replicated=False):
    """Columns are sharded along the last axis and rows along the first, where that divides."""
    arrays = jax.tree.leaves(result)
    assert arrays
    for array in arrays:
        axis = array.ndim - 1 if way in ("gauss_newton", "forward jacobian") else 0
        divides = array.ndim and array.shape[axis] % mesh.shape["i"] == 0
        spec = P(*[None] * axis, "i") if divides and not replicated else P()
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


def assert_agrees(way, devices, kind, point, size, replicated=False):
    name, options = WAYS[way]
    mesh = mesh_of(devices, kind)
    options = options | {"mesh": mesh, "batch_size": size, "replicated": replicated}
    result = compute(name, POINTS[point], **options)
    same(result, naive(name, point))
    assert_sharded_as_documented(result, way, mesh, replicated)
