"""`OptaxPreconditioner` returns what kfac_jax 0.0.8 returns, as `optax_cases.py` recorded it."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.kfac_jax import utils
from curvax.kfac_jax.optax_preconditioner import OptaxPreconditioner
from drop_in import optax_cases, optimizer_cases

VALUES = json.loads(Path(__file__).with_name("optax_values.json").read_text())
LIBRARY = SimpleNamespace(
    OptaxPreconditioner=OptaxPreconditioner,
    register_squared_error_loss=curvax.register_squared_error_loss,
)


@pytest.fixture(autouse=True)
def usual_jax():
    """JAX as users of kfac_jax run it."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        yield


@pytest.mark.parametrize("name", optax_cases.CASES)
def test_equal_to_kfac_jax(name):
    ours = jax.tree.leaves(optax_cases.run(LIBRARY, name))
    theirs = jax.tree.leaves(VALUES[name])
    np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-4)


def test_devices_average():
    """Under `pmap` the preconditioner is that of the global batch."""
    loss = optimizer_cases.loss_of(LIBRARY)
    params, batch = jax.tree.map(jnp.asarray, (optimizer_cases.PARAMS, optimizer_cases.BATCH))
    gradient = jax.grad(loss)(params, batch)
    key = jax.random.PRNGKey(0)

    def preconditioned(params, batch):
        made = OptaxPreconditioner(
            loss, damping=0.05, estimation_mode="fisher_exact", pmap_axis_name="i"
        )
        state = made.maybe_update(made.init((params, batch), key), (params, batch), key)
        return made.apply(gradient, state)

    rows = jax.tree.map(lambda x: x.reshape(8, 2, -1), batch)
    repeated = utils.replicate_all_local_devices(params)
    found = jax.pmap(preconditioned, axis_name="i")(repeated, rows)
    expected = preconditioned(params, batch)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[3], y, rtol=1e-4, atol=1e-5), found, expected
    )


def test_damping_is_given_once():
    for options in ({}, {"damping": 0.1, "damping_schedule": lambda step: 0.1}):
        with pytest.raises(ValueError, match="either damping or damping_schedule"):
            OptaxPreconditioner(lambda params, batch: 0.0, **options)
