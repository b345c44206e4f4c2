"""Functions that run on all devices along an axis of a mesh. Run by `test_mesh.py` on eight."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from curvax.devices.mesh_axis import MeshAxis

jax.config.update("jax_enable_x64", True)

X = jnp.sin(jnp.arange(16.0)).reshape(8, 2)
W = jnp.array([0.5, -2.0])
KINDS = list(itertools.product((AxisType.Auto, AxisType.Explicit), repeat=2))


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)


def rows(x, w):
    return jnp.tanh(x * w)


def check_derivatives(axis):
    """Of what is split, what is whole, and what is closed over: the sum over all devices."""
    split, whole = axis.spec(0), axis.spec(None)
    total = lambda x, w: axis.psum(jnp.sum(rows(x, w), axis=0))
    given = axis.shard_map(rows, (split, whole), split)
    summed = axis.shard_map(total, (split, whole), whole)
    closed = lambda x, w: axis.shard_map(lambda x: total(x, w), (split,), whole)(x)
    joined = axis.shard_map(lambda x, w: axis.all_gather(rows(x, w), 0), (split, whole), whole)
    loss = lambda fun: lambda x, w: jnp.sum(jnp.sin(fun(x, w)))
    naive = {given: rows, joined: rows, summed: lambda x, w: jnp.sum(rows(x, w), axis=0)}
    naive[closed] = naive[summed]
    for fun, expected in naive.items():
        same(fun(X, W), expected(X, W))
        for number in (0, 1):
            gradient = jax.jit(jax.grad(loss(fun), number))(X, W)
            same(gradient, jax.grad(loss(expected), number)(X, W))
    stacked = jax.vmap(given, in_axes=(None, 0))(X, jnp.stack([W, 2 * W]))
    same(stacked, jnp.stack([rows(X, W), rows(X, 2 * W)]))


def check_other_axes(mesh):
    """What is split along other axes stays so. JAX still gathers it if they are explicit."""
    axis = MeshAxis(mesh, ("data",))
    x = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
    w = jax.device_put(W, NamedSharding(mesh, P("model")))
    on_all = jax.jit(axis.shard_map(rows, (axis.spec(0), axis.spec(None)), axis.spec(0)))
    same(on_all(x, w), rows(X, W))
    if mesh.axis_types[1] is AxisType.Auto:
        assert not re.search(r"all-\w+\(", on_all.lower(x, w).compile().as_text())
    if AxisType.Auto not in mesh.axis_types:
        assert jax.typeof(on_all(x, w)).sharding.spec == P("data", "model")
    # Split along the same axis of the array by both, and the other way round.
    both = jax.device_put(X, NamedSharding(mesh, P(("model", "data"))))
    turned = jax.device_put(X, NamedSharding(mesh, P("model", None)))
    same(on_all(both, W), rows(X, W))
    same(on_all(turned, W), rows(X, W))


def check_inside_of_another(mesh):
    """A function on all devices along one axis may be called by one along the other."""
    axis = MeshAxis(mesh, ("data",))

    def inner(x):
        axis.check_outside()
        return axis.shard_map(lambda x: 2 * x + axis.axis_index(), (axis.spec(0),), axis.spec(0))(x)

    def over(name, mesh):
        spec = P(None, name)
        outer = jax.jit(
            jax.shard_map(
                inner,
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                axis_names={name},
                check_vma=False,
            )
        )
        return lambda x: outer(jax.device_put(x, NamedSharding(mesh, spec)))

    same(over("model", mesh)(X), 2 * X + jnp.repeat(jnp.arange(4), 2)[:, None])
    with pytest.raises(
        ValueError, match=r"curvax: mesh= .* inside of a jax.shard_map over \('data',\)"
    ):
        over("data", mesh)(X.reshape(2, 8))
    other = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
    with pytest.raises(
        ValueError, match=r"curvax: the mesh has .* of another mesh, which has .*rows"
    ):
        over("columns", other)(X)


def check_several_names():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    axis = MeshAxis.of(mesh, ("c", "a"))
    assert axis.count == 4
    numbers = axis.shard_map(
        lambda x: x[:1, 0] * 0 + axis.axis_index(), (axis.spec(0),), axis.spec(0)
    )
    same(numbers(X), jnp.arange(4))
    stacked = axis.shard_map(
        lambda x: axis.all_gather(axis.axis_index()[None], 0), (axis.spec(0),), axis.spec(None)
    )
    same(stacked(X), jnp.arange(4))
    check_derivatives(axis)


def check_errors():
    mesh = Mesh(np.array(jax.devices()[:3]), ("data",))
    axis = MeshAxis(mesh, ("data",))
    axis.check_divides(6, "the batch")
    with pytest.raises(
        ValueError, match=r"curvax: the batch .* 3 devices .* 7 examples.* Use 6 or 9"
    ):
        axis.check_divides(7, "the batch")
    with pytest.raises(ValueError, match=r"has 2 examples.* Use 3\."):
        axis.check_divides(2, "the batch")
    elsewhere = jax.device_put(X, jax.devices()[1])
    with pytest.raises(ValueError, match=r"curvax: x\['a'\] is committed to .*1.* \(3 devices\)"):
        axis.check_placement("x", {"a": elsewhere})
    everywhere = jax.device_put(X, NamedSharding(Mesh(np.array(jax.devices()), ("all",)), P("all")))
    with pytest.raises(ValueError, match=r"curvax: x is committed to .*, …, which is not where"):
        axis.check_placement("x", everywhere)

    def traced(x):
        axis.check_placement("x", x)
        return x

    jax.jit(traced)(elsewhere)


def check_closed_over(mesh):
    """JAX has no way for it, if axes are explicit, so the error says what to do."""
    axis = MeshAxis(mesh, ("data",))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    on_all = axis.shard_map(lambda x: rows(x, w), (axis.spec(0),), axis.spec(0))
    if AxisType.Explicit not in mesh.axis_types:
        same(on_all(X), rows(X, W))
        return
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        on_all(X)
    assert "pass it as an argument instead" in "".join(raised.value.__notes__)


if __name__ == "__main__":
    for kinds in KINDS:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
        check_derivatives(MeshAxis(mesh, ("data",)))
        check_other_axes(mesh)
        check_inside_of_another(mesh)
        check_closed_over(mesh)
    check_several_names()
    check_errors()
    print("programs agree")  # noqa: T201
