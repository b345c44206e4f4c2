"""A memory budget is for a whole step: what its compiled program adds, asked of that program."""

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import MemoryBudgetError
from curvax.memory.usage import MemoryUsage
from curvax.optimizer.programs import sizes_within
from helpers import assert_same, key
from optimizer.problems import ADAPTIVE, make

pytestmark = pytest.mark.optimised

FIXED = {"learning_rate": 0.1, "momentum": 0.5, "damping": 0.1}
RULES = {"fixed": ({}, FIXED), "adaptive": (ADAPTIVE, {})}


def mean_squares(output, y):
    output = curvax.register_squared_error_loss(output, y, weight=0.5)
    return jnp.mean(jnp.sum((output - y) ** 2, axis=1)) / 2


def dense(params, batch):
    x, y = batch
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return mean_squares(x @ params[-1], y)


def convolutional(params, batch):
    x, y = batch
    kernel, w = params
    x = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jnp.tanh(x).reshape(x.shape[0], -1, x.shape[-1]).mean(1)
    return mean_squares(x @ w, y)


def normal(number, shape):
    return jax.random.normal(key(number), shape, jnp.float32) / shape[-2] ** 0.5


MODELS = {
    "dense": (
        dense,
        lambda: [normal(k, (64, 64)) for k in range(4)],
        lambda: (normal(8, (8192, 64)), normal(9, (8192, 64))),
    ),
    "convolutional": (
        convolutional,
        lambda: [normal(0, (3, 3, 4, 8)), normal(1, (8, 5))],
        lambda: (normal(8, (512, 8, 8, 4)), normal(9, (512, 5))),
    ),
}
BUDGETS = {"dense": 5_000_000, "convolutional": 8_000_000}


def used_by(monkeypatch, optimizer, params, batch, **values):
    """What the programs that were compiled to find one that fits need, and the result of a step."""
    seen = []
    whole = MemoryUsage.of.__func__

    def record(cls, compiled):
        usage = whole(cls, compiled)
        seen.append((compiled, usage))
        return usage

    state = optimizer.init(params, key(0), batch)
    with monkeypatch.context() as patch:
        patch.setattr("curvax.optimizer.programs.MemoryUsage.of", classmethod(record))
        result = optimizer.step(params, state, key(1), batch=batch, **values)
    return seen, result


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ("dense", "fixed"),
        ("convolutional", "adaptive"),
        pytest.param("dense", "adaptive", marks=pytest.mark.slow),
        pytest.param("convolutional", "fixed", marks=pytest.mark.slow),
    ],
)
def test_a_step_stays_within_its_budget(monkeypatch, model, rule):
    loss, make_params, make_batch = MODELS[model]
    options, values = RULES[rule]
    budget, batch = BUDGETS[model], make_batch()

    def optimizer(**more):
        return make(jax.value_and_grad(loss), estimation_mode="fisher_gradients", **options, **more)

    found = optimizer(memory_budget=budget)
    seen, (params, _, stats) = used_by(monkeypatch, found, make_params(), batch, **values)
    compiled, usage = seen[-1]
    account = compiled.memory_analysis()
    added = account.temp_size_in_bytes + account.output_size_in_bytes
    added -= account.alias_size_in_bytes
    assert added <= usage.added_bytes <= budget
    whole = optimizer()
    state = whole.init(make_params(), key(0), batch)
    expected, _, at_once = whole.step(make_params(), state, key(1), batch=batch, **values)
    assert_same(stats["loss"], at_once["loss"], 1e-4)
    assert_same(params, expected, 2e-3, 2e-3)


@pytest.mark.slow
def test_the_step_is_compiled_once_where_that_is_enough(monkeypatch):
    loss, make_params, make_batch = MODELS["dense"]
    optimizer = make(jax.value_and_grad(loss), memory_budget="1GB")
    seen, _ = used_by(monkeypatch, optimizer, make_params(), make_batch(), **FIXED)
    steps = [x for x in seen if "step" in x[0].as_text()[:200] or "alone" in x[0].as_text()[:200]]
    assert len(steps) == 1


class Step:
    """A step with some bytes of its own besides parts that need some bytes for each example."""

    def __init__(self, own, each):
        self.own, self.each, self.asked = own, each, []

    def __call__(self, sizes):
        self.asked.append(dict(sizes))
        size = sizes["microbatch_size"] or sizes["memory_budget"] // self.each
        if size < 1:
            raise MemoryBudgetError(sizes["memory_budget"], self.each, "part", "")
        return self.own + size * self.each


def test_parts_are_given_less_until_the_step_fits():
    step = Step(own=300, each=10)
    sizes = sizes_within(1000, 900, step)
    assert step(sizes) <= 1000
    assert 600 <= sizes["memory_budget"] < 900
    assert len(step.asked) == 3
    step = Step(own=50, each=10)
    assert sizes_within(1000, 900, step)["memory_budget"] == 900
    assert len(step.asked) == 1


@pytest.mark.parametrize("own", [900, 950, 990])
def test_small_microbatches_are_tried_where_nothing_is_left_for_parts(own):
    step = Step(own, each=10)
    assert step(sizes_within(1000, 20, step)) <= 1000


def test_the_error_names_the_least_that_a_step_needs():
    with pytest.raises(MemoryBudgetError, match="microbatches of one example") as caught:
        sizes_within(1000, 900, Step(own=995, each=10))
    assert caught.value.smallest_budget == 1005


@pytest.mark.slow
def test_where_no_step_fits_the_error_says_what_would():
    loss, make_params, make_batch = MODELS["dense"]
    params, batch = make_params(), make_batch()
    optimizer = make(jax.value_and_grad(loss), memory_budget=20_000)
    state = optimizer.init(params, key(0), batch)
    with pytest.raises(MemoryBudgetError, match="microbatches of one example") as caught:
        optimizer.step(params, state, key(1), batch=batch, **FIXED)
    enough = caught.value.smallest_budget
    assert caught.value.budget_bytes == 20_000
    optimizer = make(jax.value_and_grad(loss), memory_budget=enough)
    optimizer.step(params, state, key(1), batch=batch, **FIXED)
