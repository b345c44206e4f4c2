"""What is computed at layers on two devices, compared with one. Run by `test_devices.py`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import curvax
from curvax import layer_statistics

jax.config.update("jax_enable_x64", True)

X = jnp.sin(jnp.arange(8 * 5 * 3, dtype=jnp.float64)).reshape(8, 5, 3)
P = {"w": jnp.cos(jnp.arange(12.0)).reshape(3, 4) / 2, "v": jnp.sin(jnp.arange(16.0)).reshape(4, 4)}
FACTORS = {"inputs": lambda x, _: x[0].T @ x[0], "outputs": lambda _, g: g[0].T @ g[0]}


def deep(p, x):
    curvax.register_squared_error_loss(jnp.tanh(x[:, 0] @ p["w"]) @ p["v"])


def recurrent(p, x):
    first = jnp.zeros_like(x, shape=(x.shape[0], 4)) + 0 * x[:, 0, :1]
    step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["v"]), None)
    curvax.register_squared_error_loss(lax.scan(step, first, jnp.moveaxis(x, 1, 0))[0])


def by_statistics(f, p, x):
    losses, pull_back = layer_statistics(f, lambda layer, place: FACTORS)((p, x))
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


def on_two_devices(compute, f, check):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    replicated, split = PartitionSpec(), PartitionSpec("data")

    def local(p, x):
        found, gradient = compute(f, p, x)
        # With check_vma, JAX sums the cotangents of what all devices share.
        return lax.psum(found, "data"), gradient if check else lax.psum(gradient, "data")

    specs = {"in_specs": (replicated, split), "out_specs": replicated}
    return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=check, **specs))


def agree(actual, expected):
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    jax.tree.map(compare, actual, expected)


def check_sums():
    count = 0
    for f in (deep, recurrent):
        expected = by_statistics(f, P, X)
        for compute in (by_statistics, by_layer_data, by_jax):
            for check in (True, False):
                found, gradient = on_two_devices(compute, f, check)(P, X)
                agree(gradient, expected[1])
                agree(found, expected[0] if found else ())
                count += 1
    return count


def check_layers_are_found():
    """With the types that arrays have there, too."""

    def local(p, x):
        f = lambda q, w0, x: curvax.register_squared_error_loss(x[:, 0] @ (w0 + q))
        report = curvax.explain_registration(f, (p["w"], p["w"], x[:3]))
        assert [row.tag for row in report.rows] == ["dense_tag"], str(report)
        return x

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)(P, X)
    return 1


def check_errors():
    """A first state that is the same on all devices: its cotangents are of different examples."""

    def unrolled(p, x):
        h = jnp.zeros((x.shape[0], 4))
        for k in range(2):
            h = jnp.tanh(x[:, k] @ p["w"] + h @ p["v"])
        curvax.register_squared_error_loss(h)

    for compute in (by_statistics, by_layer_data):
        with pytest.raises(ValueError, match=r"jax.lax.pcast\(x, \('data',\), to='varying'\)"):
            on_two_devices(compute, unrolled, check=True)(P, X)
        on_two_devices(compute, unrolled, check=False)(P, X)
    agree(on_two_devices(by_jax, unrolled, check=True)(P, X)[1], by_jax(unrolled, P, X)[1])
    return 2


if __name__ == "__main__":
    assert len(jax.devices()) == 2
    checked = check_sums() + check_layers_are_found() + check_errors()
    sys.stdout.write(f"{checked} programs agree\n")
