"""Real models on real data train: those of `examples/training.py` and `examples/digits.py`."""

import jax
import numpy as np
import pytest
from examples import digits, training

FALLS_TO = {"convolutional": 0.4, "diabetes": 0.7, "transformer": 0.8, "LSTM": 0.9, "Poisson": 0.3}


@pytest.fixture(autouse=True)
def _as_users_have_it():
    """Single precision, and types and ranks that are promoted."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.mark.parametrize("name", training.PROBLEMS)
def test_the_loss_falls(name):
    losses = training.with_kfac(training.PROBLEMS[name](), 30)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < FALLS_TO[name] * losses[0]


def test_an_autoencoder_is_where_adam_is_after_600_steps_in_less_than_90():
    x = digits.images()
    target = min(digits.with_adam(x, rate).losses[-1] for rate in digits.RATES)
    _, run = digits.with_kfac(x, 90, progress=False)
    steps = run.steps_to(target)
    assert steps is not None
    assert steps < 90


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diabetes", "Poisson"])
def test_on_full_batches_it_is_far_ahead_of_adam(name):
    problem = training.PROBLEMS[name]()
    kfac = training.with_kfac(problem, 200)[-1]
    adam = min(training.with_adam(problem, 200, rate)[-1] for rate in training.RATES)
    assert kfac < 0.7 * adam
