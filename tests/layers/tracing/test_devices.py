"""Statistics of layers under `shard_map`, summed over devices, are those of one device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import curvax
from curvax import layer_statistics
from helpers import assert_same, mesh_of

X = jnp.sin(jnp.arange(8 * 5 * 3, dtype=jnp.float64)).reshape(8, 5, 3)
PARAMS = {
    "w": jnp.cos(jnp.arange(12.0)).reshape(3, 4) / 2,
    "v": jnp.sin(jnp.arange(16.0)).reshape(4, 4),
}
FACTORS = {"inputs": lambda x, _: x[0].T @ x[0], "outputs": lambda _, g: g[0].T @ g[0]}
same = functools.partial(assert_same, rtol=1e-10, atol=1e-12)


def deep(p, x):
    curvax.register_squared_error_loss(jnp.tanh(x[:, 0] @ p["w"]) @ p["v"])


def recurrent(p, x):
    first = jnp.zeros((x.shape[0], 4)) + 0 * x[:, 0, :1]
    step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["v"]), None)
    curvax.register_squared_error_loss(lax.scan(step, first, jnp.moveaxis(x, 1, 0))[0])


def unrolled(p, x):
    """Its first state is the same on all devices."""
    h = jnp.zeros((x.shape[0], 4))
    for k in range(2):
        h = jnp.tanh(x[:, k] @ p["w"] + h @ p["v"])
    curvax.register_squared_error_loss(h)


def by_statistics(f, p, x):
    losses, pull_back = layer_statistics(f, lambda layer, use: FACTORS)((p, x))
    return pull_back([losses[0].parameter_dependants])


def by_layer_data(f, p, x):
    losses, vjp = curvax.layer_tags_vjp(f)((p, x))
    layers = vjp([losses[0].parameter_dependants])
    flat = lambda x: x.reshape(-1, x.shape[-1])
    factor = lambda arrays: flat(arrays[0]).T @ flat(arrays[0])
    found = [
        {"inputs": factor(layer["inputs"]), "outputs": factor(layer["outputs_tangents"])}
        for layer in layers
    ]
    gradient = [layer["params_tangents"][0] for layer in layers]
    return found, jax.tree.unflatten(jax.tree.structure(p), gradient)


def by_jax(f, p, x):
    """The gradient only."""
    losses, vjp = curvax.loss_tags_vjp(f)((p, x))
    return (), vjp([losses[0].parameter_dependants])


def on_two_devices(compute, f, check_vma):
    def local(p, x):
        found, gradient = compute(f, p, x)
        # With check_vma, JAX sums the cotangents of what all devices share.
        return lax.psum(found, "data"), gradient if check_vma else lax.psum(gradient, "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(local, mesh=mesh_of(2), check_vma=check_vma, **specs))


@functools.cache
def on_one_device(f):
    return jax.jit(functools.partial(by_statistics, f))(PARAMS, X)


each_check = pytest.mark.parametrize("check_vma", [True, False], ids="check_vma={}".format)
each_model = pytest.mark.parametrize("f", [deep, recurrent])


@each_check
@each_model
@pytest.mark.parametrize("compute", [by_statistics, by_layer_data])
def test_factors_and_gradients_are_those_of_one_device(compute, f, check_vma):
    found, gradient = on_two_devices(compute, f, check_vma)(PARAMS, X)
    factors, expected = on_one_device(f)
    assert len(found) == len(factors) == 2
    for got, want in zip(found, factors, strict=True):
        same(got, want)
    same(gradient, expected)


@each_check
@each_model
def test_gradients_by_jax_are_those_of_one_device(f, check_vma):
    same(on_two_devices(by_jax, f, check_vma)(PARAMS, X)[1], on_one_device(f)[1])


def test_layers_are_found_under_shard_map():
    """Also with the types that arrays have there."""
    seen = []

    def local(p, x):
        f = lambda q, w0, x: curvax.register_squared_error_loss(x[:, 0] @ (w0 + q))
        report = curvax.explain_registration(f, (p["w"], p["w"], x[:3]))
        seen.append([row.tag for row in report.rows])
        return x

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    jax.shard_map(local, mesh=mesh_of(2), **specs)(PARAMS, X)
    assert seen == [["dense_tag"]]


@pytest.mark.parametrize("compute", [by_statistics, by_layer_data])
def test_a_replicated_first_state_is_rejected_with_a_remedy(compute):
    """Its cotangents, which JAX sums over devices, are of different examples."""
    with pytest.raises(ValueError, match=r"jax.lax.pcast\(x, \('data',\), to='varying'\)"):
        on_two_devices(compute, unrolled, check_vma=True)(PARAMS, X)
    gradient = on_two_devices(compute, unrolled, check_vma=False)(PARAMS, X)[1]
    same(gradient, by_jax(unrolled, PARAMS, X)[1])


def test_gradients_by_jax_may_have_a_replicated_first_state():
    found = on_two_devices(by_jax, unrolled, check_vma=True)(PARAMS, X)[1]
    same(found, by_jax(unrolled, PARAMS, X)[1])
