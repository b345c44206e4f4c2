"""`shard_state=True`: the same steps as on one device, with less on each.

JAX fixes its number of devices when it starts, so `split_programs.py` runs in processes of its own,
which have eight.
"""

from pathlib import Path

import jax
import pytest

import curvax
from helpers import run_on_devices

PROGRAMS = Path(__file__).with_name("split_programs.py")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        "training transformer fixed 2 Auto 0 0",
        pytest.param("training mlp adaptive 8 Explicit 0 1", marks=SLOW),
        pytest.param("training cnn fixed 8 Auto 1 0", marks=SLOW),
        pytest.param("training cnn adaptive 2 Auto 0 1", marks=SLOW),
        pytest.param("training transformer adaptive 8 Auto 1 0", marks=SLOW),
        "memory",
        "inside Auto",
        "refused",
        "moved transformer 0",
        pytest.param("moved cnn 1", marks=SLOW),
        pytest.param("inside Explicit", marks=SLOW),
    ],
)
def test_a_split_state(case):
    assert "programs agree" in run_on_devices(PROGRAMS, 8, *case.split())


def test_a_state_is_split_among_several_devices():
    function = jax.value_and_grad(lambda params, batch: (params * batch).sum())
    with pytest.raises(ValueError, match=r"shard_state=True .* multi_device=False and mesh=None"):
        curvax.Optimizer(function, l2_reg=0.0, shard_state=True)
