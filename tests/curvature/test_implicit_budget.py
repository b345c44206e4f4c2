"""A memory budget in place of the size of a microbatch gives the same products."""

import math

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax.curvature.implicit import ImplicitExactCurvature
from helpers import assert_same

pytestmark = pytest.mark.optimised


def func(w, batch):
    x, y = batch
    curvax.register_squared_error_loss(jnp.tanh(x @ w), y)


def arguments(length):
    numbers = lambda *shape: jnp.cos(jnp.arange(math.prod(shape), dtype=jnp.float64)).reshape(shape)
    return numbers(20, 3), (numbers(length, 20), numbers(length, 3))


def test_the_plan_is_made_once_and_kept_to():
    args, vector = arguments(1000), jnp.ones((20, 3))
    curvature = ImplicitExactCurvature(func, memory_budget="60kB")
    with curvax.recorded_plans() as plans:
        product = curvature.multiply_fisher(args, vector)
        curvature.multiply_fisher(args, vector)
    assert 1 < plans[0].batch_size < 1000
    assert plans[1] is plans[0]
    expected = jax.jit(ImplicitExactCurvature(func).multiply_fisher)(args, vector)
    assert_same(product, expected, 1e-9, 1e-9)


def test_a_budget_that_nothing_fits():
    curvature = ImplicitExactCurvature(func, memory_budget=1)
    with pytest.raises(curvax.MemoryBudgetError):
        curvature.multiply_ggn(arguments(5), jnp.ones((20, 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatch_size": 0}, "microbatch_size must be at least 1"),
        ({"microbatch_size": 2, "memory_budget": "1MB"}, "not both"),
        ({"memory_budget": "much"}, "much"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        ImplicitExactCurvature(func, **options)
