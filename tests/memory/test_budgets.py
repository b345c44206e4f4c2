"""Every function with a size takes a budget in its place: same values, within the bytes given."""

import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax import AccumulationType, MemoryBudgetError
from curvax.memory.plan import LARGEST
from helpers import CountTraces, assert_same

pytestmark = pytest.mark.optimised

LENGTH, WIDTH = 300, 64
W = jnp.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH) / 8
X = jnp.sin(jnp.arange(float(LENGTH * WIDTH))).reshape(LENGTH, WIDTH)
MEAN, CONCAT = AccumulationType.MEAN, AccumulationType.CONCAT


def layer(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w).sum()


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def step(w, carry, x):
    return jnp.tanh(carry @ w + x), jnp.sum(carry)


class Budgeted:
    """A function `(w, x)` that takes a size or a budget, and a range of budgets to try."""

    def __init__(self, size_name, make, low, high):
        self.size_name, self.make, self.low, self.high = size_name, make, low, high

    def sized(self, size):
        return self.make(**{self.size_name: size})

    def within(self, budget, **options):
        return self.make(memory_budget=budget, **options)


def scan_by(loop):
    def make(**options):
        return lambda w, x: loop(functools.partial(step, w), x[0], x, **options)

    return make


FUNCTIONS = {
    "chunked_vmap": Budgeted(
        "chunk_size",
        lambda **o: curvax.chunked_vmap(layer, in_axes=(None, 0), **o),
        20_000,
        500_000,
    ),
    "micro_vmap": Budgeted(
        "microbatch_size",
        lambda **o: curvax.micro_vmap(layer, (None, 0), accumulator=MEAN, **o),
        20_000,
        500_000,
    ),
    "microbatch": Budgeted(
        "microbatch_size",
        lambda **o: curvax.microbatch(jax.grad(loss), 1, **o),
        150_000,
        500_000,
    ),
    "micro_grad": Budgeted(
        "microbatch_size", lambda **o: curvax.micro_grad(loss, **o), 250_000, 8_000_000
    ),
}
SCANS = {
    "checkpoint_chunked_scan": Budgeted(
        "chunk_size", scan_by(curvax.checkpoint_chunked_scan), 350_000, 800_000
    ),
    "checkpointed_scan": Budgeted("levels", scan_by(curvax.checkpointed_scan), 600_000, 1_500_000),
}
ALL = FUNCTIONS | SCANS
each = pytest.mark.parametrize("case", ALL.values(), ids=ALL)


def but_one(cases):
    """All of them, the one that takes longest only if slow tests are wanted."""
    marks = lambda name: [pytest.mark.slow] if name == "checkpointed_scan" else []
    return [pytest.param(case, id=name, marks=marks(name)) for name, case in cases.items()]


each_but_one_scan = pytest.mark.parametrize("case", but_one(ALL))
each_scan_but_one = pytest.mark.parametrize("case", but_one(SCANS))
each_map = pytest.mark.parametrize("case", FUNCTIONS.values(), ids=FUNCTIONS)


@each_map
def test_values_are_those_of_any_size(case):
    expected = jax.jit(case.sized(1))(W, X)
    for budget in (case.low, case.high):
        assert_same(case.within(budget)(W, X), expected, 1e-10, 1e-10)


@each_map
def test_the_largest_size_that_fits_is_taken(case):
    for budget in np.geomspace(case.low, case.high, 4)[1:3].astype(int):
        with curvax.recorded_plans() as plans:
            case.within(int(budget))(W, X)
        (plan,) = plans
        assert plan.usage.added_bytes <= plan.budget_bytes == budget
        larger = math.ceil(1.1 * plan.batch_size)
        if larger <= LENGTH:
            needs = curvax.memory_usage(case.sized(larger), W, X).added_bytes
            # Microbatches are even: their number says how large they are.
            same_program = -(-LENGTH // larger) == plan.num_batches
            assert needs > budget or (same_program and case.size_name == "microbatch_size")


@each_scan_but_one
def test_the_budget_of_a_scan_is_for_its_gradient(case):
    gradient = lambda run: jax.grad(lambda w, x: jnp.sum(run(w, x)[0]), (0, 1))
    expected = jax.jit(gradient(case.sized(1)))(W, X)
    assert_same(case.within(case.high)(W, X), jax.jit(case.sized(1))(W, X), 1e-10, 1e-10)
    sizes = []
    for budget in (case.low, case.high):
        with curvax.recorded_plans() as plans:
            run = case.within(budget)
            program = gradient(run)
            assert_same(jax.jit(program)(W, X), expected, 1e-9, 1e-9)
        assert plans[0].usage.added_bytes <= budget
        assert curvax.memory_usage(program, W, X).added_bytes <= 1.1 * budget
        sizes.append(plans[0].batch_size)
    assert sizes[0] < sizes[1]


def test_a_map_can_be_planned_for_its_gradient():
    run = functools.partial(curvax.chunked_vmap, layer, in_axes=(None, 0), checkpoint=True)
    gradient = jax.grad(lambda w, x: run(memory_budget=600_000, plan_for="gradient")(w, x).sum())
    with curvax.recorded_plans() as plans:
        needs = curvax.memory_usage(gradient, W, X).added_bytes
    assert plans[0].batch_size < LENGTH
    assert needs <= 600_000
    expected = jax.grad(lambda w, x: jax.vmap(layer, (None, 0))(w, x).sum())(W, X)
    assert_same(jax.jit(gradient)(W, X), expected, 1e-10, 1e-10)


def scan_step(carry, x):
    return step(W, carry, x)


REPEATED = {name: case.within(case.low) for name, case in FUNCTIONS.items()} | {
    loop.__name__: lambda w, x, loop=loop: loop(scan_step, x[0], x, memory_budget=700_000)
    for loop in (curvax.checkpoint_chunked_scan, curvax.checkpointed_scan)
}


@pytest.mark.parametrize("run", REPEATED.values(), ids=REPEATED)
def test_nothing_is_planned_or_compiled_twice(run, compilations):
    other = 2 * X
    run(W, X)
    compilations.clear()
    with curvax.recorded_plans() as plans:
        run(W, other)
    assert not compilations
    assert len(plans) == 1


def test_the_function_is_traced_once_a_call():
    """To see whether it still is what it was; `test_changing` holds that nothing is compiled."""
    counted = CountTraces(lambda x: jnp.tanh(x @ W).sum())
    run = curvax.chunked_vmap(counted, memory_budget=60_000)
    run(X)
    before = counted.count
    assert before <= 4 * 2
    assert_same(run(2 * X), jax.vmap(counted.fun)(2 * X), 1e-10, 1e-10)
    curvax.chunked_vmap(counted, memory_budget=60_000)(X)
    assert counted.count == before + 2
    run(X[:-1])
    assert counted.count > before


def test_other_options_make_another_plan():
    total = lambda w, x: curvax.micro_vmap(
        loss, (None, 0), accumulator=AccumulationType.SUM, memory_budget=100_000
    )(w, x)
    mean = lambda w, x: curvax.micro_vmap(loss, (None, 0), accumulator=MEAN, memory_budget=100_000)(
        w, x
    )
    assert_same(total(W, X), LENGTH * mean(W, X), 1e-10, 1e-10)
    first = lambda limit: curvax.micro_vmap(
        lambda x: x[0],
        accumulator=AccumulationType.SUM,
        order="contiguous",
        num_real_microbatches=limit,
        memory_budget=1_000,
    )
    by_number = [first(jnp.array(k))(X) for k in (0, 1)]
    assert by_number[0] == 0
    assert by_number[1] != 0


def test_plans_are_let_go_with_their_function():
    def f(x):
        return jnp.sin(x)

    curvax.chunked_vmap(f, memory_budget=10_000)(jnp.ones(10))
    alive = weakref.ref(f)
    del f
    gc.collect()
    assert alive() is None


TRANSFORMS = {
    "jit": lambda f: jax.jit(f),
    "grad": lambda f: jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x])),
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: (
        lambda w, x: jax.lax.scan(lambda c, x: (c, f(w, x)), jnp.zeros(()), jnp.stack([x, 2 * x]))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_budget_works_inside(transform):
    planned = curvax.chunked_vmap(layer, in_axes=(None, 0), memory_budget=100_000)
    with curvax.recorded_plans() as plans:
        got = transform(planned)(W, X)
    assert 1 < plans[0].batch_size < LENGTH
    assert_same(got, transform(jax.vmap(layer, (None, 0)))(W, X), 1e-10, 1e-10)


def test_a_function_may_close_over_tracers_and_be_called_by_itself_later():
    def run(w):
        return curvax.chunked_vmap(lambda x: layer(w, x), memory_budget=100_000)(X)

    expected = jax.vmap(layer, (None, 0))(W, X)
    assert_same(jax.jit(run)(W), expected, 1e-10, 1e-10)
    assert_same(run(W), expected, 1e-10, 1e-10)
    assert_same(jax.jit(run)(2 * W), jax.vmap(layer, (None, 0))(2 * W, X), 1e-10, 1e-10)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SCANS else [])
        for name, case in ALL.items()
    ],
)
def test_the_fastest_may_be_asked_for(case):
    with curvax.recorded_plans() as plans:
        got = case.within(case.high, objective="time")(W, X)
    assert plans[0].usage.added_bytes <= case.high
    assert_same(got, jax.jit(case.sized(2))(W, X), 1e-10, 1e-10)


class TestFast:
    """`objective="time"` takes a size by a rule, and times nothing."""

    def plan(self, budget, objective="time"):
        x = jnp.tile(X, (10, 1))
        with curvax.recorded_plans() as plans:
            curvax.chunked_vmap(lambda x: layer(W, x), memory_budget=budget, objective=objective)(x)
        (plan,) = plans
        assert plan.usage.added_bytes <= curvax.parse_memory(budget)
        return plan

    def test_sizes_that_stay_in_the_cache_are_preferred_on_a_cpu(self, compilations):
        plan = self.plan("1GB")
        assert plan.batch_size == LARGEST
        assert (plan.max_size, plan.num_batches) == (3000, 24)
        assert len(plan.trials) == 3
        assert len(compilations) <= len(self.plan("1GB", "memory").trials) + 3

    def test_the_largest_is_preferred_elsewhere(self, monkeypatch):
        monkeypatch.setattr("curvax.memory.plan.jax.default_backend", lambda: "gpu")
        assert self.plan("1GB").batch_size == 3000

    def test_a_smaller_size_is_taken_where_the_fast_one_does_not_fit(self):
        budget = self.plan("1GB").usage.added_bytes - 1
        plan = self.plan(budget)
        assert LARGEST / 2 < plan.batch_size < LARGEST

    def test_where_nothing_fits_the_error_says_what_would(self):
        with pytest.raises(MemoryBudgetError) as caught:
            self.plan(10)
        self.plan(caught.value.smallest_budget)


@pytest.mark.slow
def test_the_fastest_may_be_asked_for_under_jit():
    planned = curvax.chunked_vmap(
        lambda k, x: layer(W, x) + jax.random.normal(k), memory_budget=100_000, objective="time"
    )
    keys = jax.random.split(jax.random.key(0), LENGTH)
    expected = jax.vmap(lambda k, x: layer(W, x) + jax.random.normal(k))(keys, X)
    assert_same(jax.jit(planned)(keys, X), expected, 1e-10, 1e-10)


@each_but_one_scan
def test_where_nothing_fits_the_error_says_what_would(case):
    with pytest.raises(MemoryBudgetError, match="smallest budget that would do") as caught:
        case.within(10)(W, X)
    assert caught.value.budget_bytes == 10
    case.within(caught.value.smallest_budget)(W, X)


@each
def test_a_size_and_a_budget_are_too_much(case):
    with pytest.raises(ValueError, match=f"give {case.size_name} or memory_budget, not both"):
        case.make(memory_budget="1MB", **{case.size_name: 3})(W, X)


@each
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_budget": "lots"}, ValueError, "not an amount of memory"),
        ({"memory_budget": [1]}, TypeError, "got list"),
        ({"memory_budget": 0}, ValueError, "at least one byte"),
        ({"memory_budget": "1MB", "plan_for": "both"}, ValueError, "plan_for must be one of"),
        ({"memory_budget": "1MB", "objective": "speed"}, ValueError, "objective must be one of"),
        ({"objective": "time"}, ValueError, "give memory_budget as well"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_options_that_make_no_sense(case, options, error, message):
    with pytest.raises(error, match=message):
        case.make(**options)(W, X)


def test_a_fraction_of_the_available_memory_is_planned_once():
    counted = CountTraces(jnp.sin)
    run = curvax.chunked_vmap(counted, memory_budget=0.5)
    run(X)
    before = counted.count
    with curvax.recorded_plans() as plans:
        run(X)
    assert counted.count == before + 1  # To know that it still computes the same.
    assert len(plans) == 1


def test_plans_are_recorded_in_every_block_around():
    with curvax.recorded_plans() as outer:
        with curvax.recorded_plans() as inner:
            curvax.chunked_vmap(jnp.sin, memory_budget="1MB")(X)
        curvax.chunked_vmap(jnp.sin, memory_budget="1MB")(X)
    assert len(inner) == 1
    assert len(outer) == 2
