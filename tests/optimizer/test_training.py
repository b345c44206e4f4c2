"""Real models on real data train: those of `examples/training.py` and `examples/digits.py`."""

import numpy as np
import pytest
from examples import digits, training

# Upper bounds on what is left of the first loss after 30 steps, with room for rounding only.
FALLS_TO = {
    "convolutional": 0.06,
    "diabetes": 0.29,
    "transformer": 0.48,
    "LSTM": 0.23,
    "Poisson": 0.01,
}


pytestmark = pytest.mark.usefixtures("jax_defaults")


@pytest.mark.parametrize("name", training.PROBLEMS)
def test_the_loss_falls(name):
    losses = training.with_kfac(training.PROBLEMS[name](), 30)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < FALLS_TO[name] * losses[0]


@pytest.mark.slow
def test_an_autoencoder_reaches_in_60_steps_what_adam_reaches_in_600():
    x = digits.images()
    target = min(digits.with_adam(x, rate).losses[-1] for rate in digits.RATES)
    _, run = digits.with_kfac(x, 60, progress=False)
    assert run.steps_to(target) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diabetes", "Poisson"])
def test_on_full_batches_its_loss_is_far_below_that_of_adam(name):
    problem = training.PROBLEMS[name]()
    kfac = training.with_kfac(problem, 200)[-1]
    adam = min(training.with_adam(problem, 200, rate)[-1] for rate in training.RATES)
    assert kfac < 0.7 * adam
