"""Training on a mesh and on one device, for the tests that compare them."""

import functools

import jax

import curvax
from helpers import assert_same, key
from optimizer.models import MODELS
from optimizer.problems import ADAPTIVE

# Both sample: the default estimation mode is "fisher_gradients".
RULES = {
    "fixed": {"norm_constraint": 0.01, "num_burnin_steps": 2},
    "adaptive": ADAPTIVE | {"num_burnin_steps": 1},
}
GIVEN = {"learning_rate": 0.1, "momentum": 0.5, "damping": 0.1}
same = functools.partial(assert_same, rtol=1e-9, atol=1e-11)


def optimizer_of(model, **options):
    return curvax.Optimizer(jax.value_and_grad(MODELS[model][0]), l2_reg=1e-3, **options)


def trained(optimizer, model, num_steps, batches=lambda batch: batch, params=None):
    """Parameters, state and statistics after some steps on four batches of eight examples."""
    _, make_model, make_batch = MODELS[model]
    params = make_model() if params is None else params
    batch = lambda number: batches(make_batch(number % 4, 8))
    values = {} if optimizer.use_adaptive_damping else GIVEN
    state = optimizer.init(params, key(0), batch(0))
    history = []
    for number in range(num_steps):
        params, state, stats = optimizer.step(
            params, state, key(number), batch=batch(number), **values
        )
        history.append(stats)
    return params, state, history
