"""Twenty steps of the optimizer equal those of a program in plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from helpers import key
from optimizer.reference import Reference

SIZES = (3, 5, 2)


def weights_and_batch():
    keys = jax.random.split(key(3), 4)
    shapes = [(SIZES[0] + 1, SIZES[1]), (SIZES[1] + 1, SIZES[2])]
    weights = [jax.random.normal(k, s) / 2 for k, s in zip(keys, shapes, strict=False)]
    x = jax.random.normal(keys[2], (20, SIZES[0]))
    y = jnp.sin(2 * x[:, : SIZES[2]]) + 0.1 * jax.random.normal(keys[3], (20, SIZES[2]))
    return weights, (x, y)


def loss_function(l2):
    """The loss of `reference`, in the usual way of writing a network."""

    def loss(params, batch):
        x, y = batch
        hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"][None])
        output = hidden @ params[1]["w"] + params[1]["b"][None]
        curvax.register_squared_error_loss(output, y, weight=0.5)
        squares = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return jnp.mean(jnp.sum((output - y) ** 2, axis=1)) / 2 + l2 / 2 * squares

    return loss


def as_params(weights):
    return [{"w": jnp.asarray(w[:-1]), "b": jnp.asarray(w[-1])} for w in weights]


ADAPTIVE = {"use_adaptive_learning_rate": True, "use_adaptive_momentum": True}
FIXED = {"learning_rate": 0.3, "momentum": 0.8, "damping": 0.1}
CASES = {
    "fixed": ({}, FIXED),
    "exact inverses": ({"use_exact_inverses": True}, FIXED),
    "every step": ({"inverse_update_period": 1, "curvature_ema": 0.5}, FIXED),
    "no forgetting, burn-in": ({"curvature_ema": 1.0, "num_burnin_steps": 3}, FIXED),
    "l2": ({"l2_reg": 0.02}, FIXED),
    "norm constraint": ({"norm_constraint": 1e-3}, FIXED),
    "norm constraint, exact, l2": (
        {"norm_constraint": 1e-2, "use_exact_inverses": True, "l2_reg": 0.02},
        FIXED,
    ),
    "adaptive": ({**ADAPTIVE, "use_adaptive_damping": True, "initial_damping": 1.0}, {}),
    "adaptive, l2, exact inverses": (
        {
            **ADAPTIVE,
            "use_adaptive_damping": True,
            "initial_damping": 0.5,
            "l2_reg": 0.02,
            "use_exact_inverses": True,
            "include_damping_in_quad_change": True,
            "damping_adaptation_interval": 3,
        },
        {},
    ),
    "adaptive learning rate": (
        {"use_adaptive_learning_rate": True},
        {"momentum": 0.5, "damping": 0.1},
    ),
    "adaptive momentum": (
        {"use_adaptive_momentum": True, "norm_constraint": 1e-2},
        {"learning_rate": 0.3, "damping": 0.1},
    ),
    "adaptive damping, estimated model": (
        {"use_adaptive_damping": True, "initial_damping": 0.1, "l2_reg": 0.02},
        {"learning_rate": 0.3, "momentum": 0.5},
    ),
    "adaptive damping, exact model": (
        {
            "use_adaptive_damping": True,
            "initial_damping": 1e-3,
            "always_use_exact_qmodel_for_damping_adjustment": True,
            "damping_adaptation_interval": 2,
            "max_damping": 2e-3,
        },
        {"learning_rate": 0.9, "momentum": 0.5},
    ),
}
STATS = ("loss", "learning_rate", "momentum", "damping", "rho", "new_loss", "quad_model_change")


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_equal_the_reference(name):
    arguments, values = CASES[name]
    weights, batch = weights_and_batch()
    arguments = {"l2_reg": 0.0, "num_burnin_steps": 0, **arguments}
    named = {k: v for k, v in arguments.items() if not k.startswith("use_adaptive")}
    reference = Reference(**named, **values)
    optimizer = curvax.Optimizer(
        jax.value_and_grad(loss_function(arguments["l2_reg"])),
        estimation_mode="ggn_exact",
        **arguments,
    )
    params = as_params(weights)
    state = optimizer.init(params, key(0), batch)
    weights, numpy_batch = [np.asarray(w) for w in weights], jax.tree.map(np.asarray, batch)
    for number in range(20):
        weights = reference.step(weights, numpy_batch)
        params, state, stats = optimizer.step(params, state, key(number), batch=batch, **values)
        for quantity in STATS:
            if quantity in reference.stats:
                expected = reference.stats[quantity]
                np.testing.assert_allclose(stats[quantity], expected, 1e-7, 1e-9, err_msg=quantity)
    for found, expected in zip(params, as_params(weights), strict=True):
        for part in ("w", "b"):
            np.testing.assert_allclose(found[part], expected[part], 1e-7, 1e-8)
