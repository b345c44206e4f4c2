"""A small network with real parameters, whose training most tests are about."""

import jax
import jax.numpy as jnp

import curvax
from helpers import key

VALUES = {"learning_rate": 0.2, "momentum": 0.5, "damping": 0.05}
ADAPTIVE = {
    "use_adaptive_learning_rate": True,
    "use_adaptive_momentum": True,
    "use_adaptive_damping": True,
    "initial_damping": 0.5,
}


def network(params, x):
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"][None])
    return hidden @ params["out"]["w"] + params["out"]["b"][None]


def loss(params, batch):
    x, y = batch
    prediction = curvax.register_squared_error_loss(network(params, x), y, weight=0.5)
    return jnp.mean(jnp.sum((prediction - y) ** 2, axis=1)) / 2


def make_params(dtype=jnp.float64):
    keys = jax.random.split(key(5), 2)
    return {
        "in": {"w": jax.random.normal(keys[0], (3, 6), dtype), "b": jnp.zeros(6, dtype)},
        "out": {"w": jax.random.normal(keys[1], (6, 2), dtype) / 2, "b": jnp.zeros(2, dtype)},
    }


def make_batch(seed=0, size=12, dtype=jnp.float64):
    x = jax.random.normal(key(seed), (size, 3), dtype)
    return x, jnp.stack([jnp.sin(x[:, 0]), x[:, 1] * x[:, 2]], axis=1)


def make(value_and_grad=None, **options):
    """An optimizer of this problem; by default in an exact mode, without burn-in."""
    options = {"l2_reg": 0.0, "num_burnin_steps": 0, "estimation_mode": "ggn_exact", **options}
    return curvax.Optimizer(value_and_grad or jax.value_and_grad(loss), **options)


def train(optimizer, num_steps, params=None, state=None, batches=None, first=0, **values):
    """Parameters, state and all statistics after some steps."""
    params = make_params() if params is None else params
    state = optimizer.init(params, key(0), make_batch()) if state is None else state
    history = []
    for number in range(first, first + num_steps):
        batch = make_batch(number % 4) if batches is None else batches(number)
        params, state, stats = optimizer.step(params, state, key(number), batch=batch, **values)
        history.append(stats)
    return params, state, history
