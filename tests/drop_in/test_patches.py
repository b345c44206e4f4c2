"""`curvax.kfac_jax.patches_second_moment` returns what kfac_jax 0.0.8 returned."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from curvax.kfac_jax import patches_second_moment as psm
from drop_in import patches_cases
from drop_in.test_utils import assert_close

VALUES = json.loads(Path(__file__).with_name("patches_values.json").read_text())


@pytest.mark.parametrize("name", VALUES)
def test_equal_to_kfac_jax(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_close(patches_cases.CASES[name](psm), VALUES[name])


def test_every_case_was_recorded():
    assert set(patches_cases.CASES) == set(VALUES)


@pytest.mark.parametrize("options", [{"feature_group_count": 2}, {"batch_group_count": 2}])
def test_other_groups_are_rejected(options):
    with pytest.raises(ValueError, match=r"curvax\.patches_moments averages over any groups"):
        psm.patches_moments(jnp.ones((2, 5, 5, 4)), 2, **options)


def test_the_choice_of_a_loop_is_kept():
    assert psm.get_use_4d_convolution_in_psm_loop()
    psm.set_use_4d_convolution_in_psm_loop(False)
    assert not psm.get_use_4d_convolution_in_psm_loop()
    psm.set_use_4d_convolution_in_psm_loop(True)
