"""Training on all devices with kfac_jax's pmap convention, compared with curvax on one device.

Run by `test_clients.py` in a process with two devices.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import curvax
import curvax.kfac_jax as kfac_jax

AXIS = "devices"
OPTIONS = {
    "l2_reg": 1e-3,
    "value_func_has_aux": True,
    "value_func_has_rng": True,
    "learning_rate_schedule": lambda step: 0.1 / (1 + step / 10),
    "inverse_update_period": 2,
    "num_burnin_steps": 0,
    "estimation_mode": "fisher_exact",
}
STEPS = 6

pmean = functools.partial(kfac_jax.utils.wrap_if_pmap(jax.lax.pmean), axis_name=AXIS)


def loss(params, rng, batch):
    """Return the loss over all devices, and the prediction for each example of this one."""
    del rng
    prediction = jnp.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"]
    curvax.register_squared_error_loss(prediction, batch["y"])
    value = jnp.mean(jnp.sum((prediction - batch["y"]) ** 2, axis=-1))
    squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    return pmean(value) + 0.5e-3 * squares, {"prediction": prediction}


def start():
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 5), "b": (5,), "v": (5, 2)}
    params = {name: jnp.array(rng.normal(size=shape) / 2) for name, shape in shapes.items()}
    return params, {
        "x": jnp.array(rng.normal(size=(12, 4))),
        "y": jnp.array(rng.normal(size=(12, 2))),
    }


def on_all_devices():
    params, batch = start()
    count = jax.local_device_count()
    batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    batch = kfac_jax.utils.broadcast_all_local_devices(batch)
    params = kfac_jax.utils.replicate_all_local_devices(params)
    rng = kfac_jax.utils.make_different_rng_key_on_all_devices(jax.random.PRNGKey(0))
    momentum = kfac_jax.utils.replicate_all_local_devices(jnp.asarray(0.9))
    damping = kfac_jax.utils.replicate_all_local_devices(jnp.asarray(1e-2))
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(loss, has_aux=True), multi_device=True, pmap_axis_name=AXIS, **OPTIONS
    )
    rng, key = kfac_jax.utils.p_split(rng)
    state = optimizer.init(params, key, batch)
    found = []
    for _ in range(STEPS):
        rng, key = kfac_jax.utils.p_split(rng)
        params, state, stats = optimizer.step(
            params=params, state=state, rng=key, batch=batch, momentum=momentum, damping=damping
        )
        assert stats["loss"].shape == (count,)
        assert stats["aux"]["prediction"].shape == (count, 12 // count, 2)
        found.append(kfac_jax.utils.get_first(stats["loss"]))
    assert params["w"].shape == (count, 4, 5)
    np.testing.assert_array_equal(params["w"][0], params["w"][-1])
    return found, kfac_jax.utils.get_first(params)


def on_one_device():
    params, batch = start()
    optimizer = curvax.Optimizer(jax.value_and_grad(loss, has_aux=True), **OPTIONS)
    key = jax.random.PRNGKey(0)
    state, found = optimizer.init(params, key, batch), []
    for _ in range(STEPS):
        params, state, stats = optimizer.step(
            params, state, key, batch=batch, momentum=0.9, damping=1e-2
        )
        found.append(stats["loss"])
    return found, params


if __name__ == "__main__":
    losses, params = on_all_devices()
    expected, expected_params = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-8)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-7), params, expected_params)
    assert losses[-1] < losses[0]
    sys.stdout.write(f"{jax.local_device_count()} devices, equal to one: {np.array(losses)}")
