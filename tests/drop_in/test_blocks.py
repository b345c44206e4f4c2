"""Blocks and estimators return what kfac_jax 0.0.8 returns, as `blocks_cases.py` recorded it."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import curvax
from curvax.kfac_jax import curvature_blocks, curvature_estimator, utils
from curvax.kfac_jax.layers_and_loss_tags import LayerData
from curvax.kfac_jax.tracer import LayerVjpData
from drop_in import blocks_cases
from drop_in.test_utils import assert_close

VALUES = json.loads(Path(__file__).with_name("blocks_values.json").read_text())
KFAC_JAX = SimpleNamespace(
    **{
        **vars(curvature_blocks),
        **vars(curvature_estimator),
        "utils": utils,
        "LayerData": LayerData,
        "LayerVjpData": LayerVjpData,
        "register_squared_error_loss": curvax.register_squared_error_loss,
    }
)


@pytest.mark.parametrize("name", blocks_cases.CASES)
def test_equal_to_kfac_jax(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ours = blocks_cases.plain(blocks_cases.CASES[name](KFAC_JAX))
    assert_close(ours, VALUES[name], 2e-4)
