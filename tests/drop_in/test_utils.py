"""`curvax.kfac_jax.utils` returns what kfac_jax 0.0.8 returns, as `utils_cases.py` recorded it."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from curvax.kfac_jax import utils
from drop_in import utils_cases

VALUES = json.loads(Path(__file__).with_name("utils_values.json").read_text())


@pytest.mark.parametrize("name", utils_cases.CASES)
def test_equal_to_kfac_jax(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ours = utils_cases.plain(utils_cases.CASES[name](utils))
    assert_close(ours, VALUES[name])


def assert_close(ours, theirs, rtol=1e-5):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key], rtol)
    elif isinstance(theirs, str):
        assert ours == theirs
    elif isinstance(theirs, list) and any(isinstance(x, list | dict | str) for x in theirs):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, rtol)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6)
