"""Profiles of a step can be read: operations are named by phase, layer and block."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from helpers import key, mesh_of

PARAMS = {"w": 0.1 * np.ones((3, 4)), "layer/~/b": np.zeros(4)}
BATCH = np.linspace(-1.0, 1.0, 24).reshape(8, 3)


def loss(params, x):
    prediction = jnp.tanh(x @ params["w"] + params["layer/~/b"][None])
    curvax.register_squared_error_loss(prediction, jnp.ones_like(prediction))
    return jnp.mean(jnp.sum((prediction - 1.0) ** 2, axis=-1))


@pytest.fixture(scope="module", params=[None, 2])
def names(request):
    """The names of all operations of a compiled step."""
    optimizer = curvax.Optimizer(
        jax.value_and_grad(loss),
        l2_reg=0,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=1.0,
        num_burnin_steps=0,
        donate_buffers=False,
        mesh=None if request.param is None else mesh_of(request.param),
    )
    params = jax.tree.map(jnp.asarray, PARAMS)
    batch = jnp.asarray(BATCH)
    state = optimizer.init(params, key(0), batch)
    step = jax.jit(lambda params, state, rng: optimizer.step(params, state, rng, batch=batch))
    text = step.lower(params, state, key(1)).compile().as_text()
    return set(re.findall(r'op_name="((?:[^"\\]|\\.)*)"', text))


PHASES = {
    "value_and_grad": "tanh",
    "update_curvature": "dot_general",
    "update_inverses": "",
    "precondition": "dot_general",
    "quadratic_model": "",
}


@pytest.mark.parametrize("phase", PHASES)
def test_operations_are_named_by_phase(names, phase):
    assert any(re.search(rf"/{phase}/.*{PHASES[phase]}", name) for name in names)


@pytest.mark.parametrize("phase", ["update_curvature", "update_inverses", "precondition"])
def test_operations_of_a_phase_are_named_by_the_parameters_of_the_block(names, phase, request):
    if phase == "update_inverses" and request.node.callspec.params["names"]:
        return  # On several devices, matrices of all blocks are inverted together.
    assert any(re.search(rf"/{phase}/.*w,layer\.~\.b\b", name) for name in names)


def test_statistics_of_a_layer_are_named(names):
    found = [name for name in names if re.search(r"/update_curvature/.*w,layer\.~\.b", name)]
    assert any("transpose" in name and name.endswith("dot_general") for name in found)
