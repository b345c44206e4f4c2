"""`curvax.kfac_jax.optimizer` takes the steps of kfac_jax 0.0.8, as `optimizer_cases.py` recorded.

A leading axis of devices is compared with the plain spelling: one device, and the global batch.
"""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.kfac_jax import optimizer, utils
from drop_in import optimizer_cases as cases

VALUES = json.loads(Path(__file__).with_name("optimizer_values.json").read_text())
LIBRARY = SimpleNamespace(
    Optimizer=optimizer.Optimizer,
    register_squared_error_loss=curvax.register_squared_error_loss,
    register_dense=curvax.register_dense,
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


@pytest.mark.parametrize("name", cases.CASES)
def test_seven_steps_are_those_of_kfac_jax(name):
    ours, theirs = cases.plain(cases.run(LIBRARY, name)), VALUES[name]
    for one, other in zip(
        jax.tree.leaves(ours["params"], is_leaf=is_array),
        jax.tree.leaves(theirs["params"], is_leaf=is_array),
        strict=True,
    ):
        assert difference(one, other) < 1e-3
    for key, values in theirs["stats"].items():
        np.testing.assert_allclose(ours["stats"][key], values, rtol=1e-3, atol=1e-5, err_msg=key)


def is_array(x):
    return isinstance(x, list)


def difference(a, b):
    return np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)
