"""A plan fits its budget, hardly anything larger does, and few programs are compiled for it."""

import io
import math
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax import (
    AccumulationType,
    MemoryBudgetError,
    MemoryPlan,
    MemoryUsage,
    chunked_vmap,
    memory_usage,
    micro_vmap,
    parse_memory,
    plan_batch_size,
)
from curvax.memory.plan import Trial
from helpers import CountTraces, assert_same, random_like

pytestmark = pytest.mark.optimised

ROWS, WIDTH, HIDDEN = 1000, 16, 64
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float64)
PARAMS = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float64),
    "down": jax.ShapeDtypeStruct((HIDDEN, HIDDEN), jnp.float64),
}


def network(params, x):
    return jnp.tanh(jnp.tanh(x @ params["up"]) @ params["down"])


def loss(params, x):
    return jnp.sum(network(params, x) ** 2)


def forward(size):
    return lambda params, xs: chunked_vmap(lambda x: network(params, x), size)(xs)


def gradients(size):
    """The sum of the squares of per-example gradients: each as large as the parameters."""
    squares = lambda params, x: jax.tree.map(jnp.square, jax.grad(loss)(params, x))
    return micro_vmap(
        squares, in_axes=(None, 0), microbatch_size=size, accumulator=AccumulationType.SUM
    )


def spectra(size):
    power = lambda x: jnp.sum(jnp.abs(jnp.fft.fft(jnp.outer(x, x))) ** 2)
    return chunked_vmap(power, size)


def some_rows(size):
    """What is needed is affine: temporaries for `size` rows, and a result for all of them."""

    def fun(params, xs):
        return jnp.sort(jnp.tanh(xs[:size] @ params["up"]), axis=1)[:, :WIDTH].sum(), 2 * xs

    return fun


PROGRAMS = {
    "MLP": (forward, (PARAMS, BATCH)),
    "per-example gradients": (gradients, (PARAMS, BATCH)),
    "FFT": (spectra, (BATCH,)),
    "some rows": (some_rows, (PARAMS, BATCH)),
}


def least(build, args):
    return memory_usage(build(1), *args).added_bytes


@pytest.mark.parametrize("share", [0.009, 0.9])
@pytest.mark.parametrize(("build", "args"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_plan_fits_and_a_tenth_more_does_not(build, args, share):
    """Budgets over two decades, between the needs of one row at a time and of all at once."""
    alone, all_at_once = least(build, args), memory_usage(build(ROWS), *args).added_bytes
    budget = int(alone + (all_at_once - alone) * share)
    plan = plan_batch_size(build, args, max_size=ROWS, memory_budget=budget)
    assert plan.budget_bytes == budget
    assert plan.usage.added_bytes <= budget
    assert plan.usage == memory_usage(build(plan.batch_size), *args)
    above = math.ceil(1.1 * plan.batch_size)
    assert above > ROWS or memory_usage(build(above), *args).added_bytes > budget
    assert plan.num_batches == math.ceil(ROWS / plan.batch_size)
    assert plan.max_size == ROWS
    assert len({trial.size for trial in plan.trials}) == len(plan.trials)


@pytest.mark.parametrize("factor", [0.2, 1.1, 5, 20, 95, 200])
def test_affine_programs_take_four_compilations_at_most(factor):
    args = PARAMS, BATCH
    two, three = (memory_usage(some_rows(size), *args).added_bytes for size in (2, 3))
    counted = CountTraces(some_rows)
    budget = int(two + (10 * factor - 2) * (three - two))
    plan = plan_batch_size(counted, args, max_size=ROWS, memory_budget=budget)
    assert len(plan.trials) == counted.count <= 4
    assert plan.usage.added_bytes <= budget
    assert min(ROWS, 10 * factor) / 1.05 - 1 <= plan.batch_size <= 10 * factor


def test_everything_at_once_is_taken_if_it_fits():
    plan = plan_batch_size(some_rows, (PARAMS, BATCH), max_size=ROWS, memory_budget="1GB")
    assert (plan.batch_size, plan.num_batches) == (ROWS, 1)
    assert len(plan.trials) <= 3


def test_one_is_a_size():
    plan = plan_batch_size(some_rows, (PARAMS, BATCH), max_size=1, memory_budget="1GB")
    assert (plan.batch_size, plan.num_batches, len(plan.trials)) == (1, 1, 1)


class TestNothingFits:
    def test_the_smallest_budget_is_the_least_of_small_sizes(self):
        x = jnp.ones((30, 20))
        program = lambda rows: jnp.sum(jnp.exp(jnp.outer(rows, rows)))
        build = lambda size: lambda x: jax.lax.map(program, x, batch_size=size)
        with pytest.raises(MemoryBudgetError) as caught:
            plan_batch_size(build, (x,), max_size=30, memory_budget=100)
        least = min(memory_usage(build(size), x).added_bytes for size in (1, 2, 3))
        assert caught.value.smallest_budget == least

    @pytest.mark.parametrize(("build", "args"), PROGRAMS.values(), ids=PROGRAMS)
    def test_the_error_says_what_would(self, build, args):
        with pytest.raises(MemoryBudgetError) as caught:
            plan_batch_size(build, args, max_size=ROWS, memory_budget=500)
        error = caught.value
        assert isinstance(error, MemoryError)
        assert error.budget_bytes == 500
        assert 500 < error.smallest_budget <= least(build, args)
        enough = error.smallest_budget
        plan = plan_batch_size(build, args, max_size=ROWS, memory_budget=enough)
        assert plan.usage.added_bytes <= enough
        with pytest.raises(MemoryBudgetError):
            plan_batch_size(build, args, max_size=ROWS, memory_budget=enough - 1)

    def test_its_words(self):
        error = MemoryBudgetError(1000, 3 * 2**20, "curvax.hessian", "Try this.")
        assert str(error) == (
            "curvax.hessian: nothing fits into 1000 B (1000 bytes). The smallest budget that would "
            "do is 3.00 MiB (3145728 bytes). Try this."
        )
        words = (
            r"^curvax\.plan_batch_size: nothing fits .* What else helps: checkpoint=True .* disk"
        )
        with pytest.raises(MemoryBudgetError, match=words):
            plan_batch_size(some_rows, (PARAMS, BATCH), max_size=4, memory_budget=1)

    def test_it_pickles(self):
        error = MemoryBudgetError(1000, 2000, "here", "Try this.")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is MemoryBudgetError
        assert str(again) == str(error)
        assert (again.budget_bytes, again.smallest_budget) == (1000, 2000)


class TestRunning:
    def test_the_plan_runs_the_program_that_was_compiled(self):
        params, xs = random_like((PARAMS, BATCH))
        counted = CountTraces(network)
        build = lambda size: lambda params, xs: chunked_vmap(lambda x: counted(params, x), size)(xs)
        plan = plan_batch_size(build, (params, xs), max_size=ROWS, memory_budget="700kB")
        assert 1 < plan.batch_size < ROWS
        traces = counted.count
        assert_same(plan(params, xs), jax.vmap(lambda x: network(params, x))(xs))
        params, xs = random_like((PARAMS, BATCH), seed=5)
        assert_same(plan(params, xs), jax.vmap(lambda x: network(params, x))(xs))
        assert counted.count == traces

    def test_arrays_that_are_closed_over_are_used_and_not_counted(self):
        params, xs = random_like((PARAMS, BATCH))
        build = lambda size: lambda xs: forward(size)(params, xs)
        plan = plan_batch_size(build, (xs,), max_size=ROWS, memory_budget="700kB")
        naive = jax.vmap(lambda x: network(params, x))
        assert_same(plan(xs), naive(xs))
        given = plan_batch_size(forward, (params, xs), max_size=ROWS, memory_budget="700kB")
        assert given == plan

    def test_keywords_in_any_order(self):
        xs = random_like(BATCH)
        fun = lambda x, *, scale, shift: {"y": (scale["s"] * jnp.sin(x) + shift,)}

        def build(size):
            def call(xs, scale, shift):
                return chunked_vmap(lambda x: fun(x, scale=scale, shift=shift), size)(xs)

            return call

        kwargs = {"shift": jnp.asarray(3.0), "scale": {"s": jnp.asarray(2.0)}}
        options = {"max_size": ROWS, "memory_budget": "1MB", "kwargs": kwargs}
        plan = plan_batch_size(build, [xs], **options)
        assert_same(plan(xs, scale=kwargs["scale"], shift=kwargs["shift"]), fun(xs, **kwargs))

    def test_shapes_are_enough_to_plan(self):
        plan = plan_batch_size(forward, (PARAMS, BATCH), max_size=ROWS, memory_budget="1MB")
        params, xs = random_like((PARAMS, BATCH))
        assert_same(plan(params, xs), jax.vmap(lambda x: network(params, x))(xs))

    def test_other_shapes_are_rejected(self):
        plan = plan_batch_size(spectra, (BATCH,), max_size=ROWS, memory_budget="1MB")
        with pytest.raises(TypeError):
            plan(jnp.zeros((ROWS - 1, WIDTH)))

    @pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.checkpoint])
    def test_inside_a_transformation_it_chooses_but_does_not_run(self, transform):
        params, xs = random_like((PARAMS, BATCH))
        plans = []

        def fun(scale):
            scaled = jax.tree.map(lambda w: scale * w, params)
            build = lambda size: lambda xs: some_rows(size)(scaled, xs)
            plan = plan_batch_size(build, (xs,), max_size=ROWS, memory_budget="300kB")
            plans.append(plan)
            with pytest.raises(TypeError, match=r"inside a transformation.* cannot be run"):
                plan(xs)
            return build(plan.batch_size)(xs)[0]

        transform(fun)(1.0)
        outside = plan_batch_size(some_rows, (params, xs), max_size=ROWS, memory_budget="300kB")
        assert 1 < outside.batch_size < ROWS
        [plan] = plans
        assert plan.batch_size == outside.batch_size
        assert plan.usage.added_bytes == outside.usage.added_bytes


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def plan(self, args=(PARAMS, BATCH), max_size=10, memory_budget="1MB"):
        return plan_batch_size(some_rows, args, max_size=max_size, memory_budget=memory_budget)

    @pytest.mark.parametrize("size", [None, 1.5, "3", True, np.ones(2)], ids=repr)
    def test_the_largest_size_is_an_integer(self, size):
        words = r"^curvax\.plan_batch_size: max_size must be a Python integer, got "
        with pytest.raises(TypeError, match=words):
            self.plan(max_size=size)

    @pytest.mark.parametrize("size", [0, -4, np.int32(0)])
    def test_the_largest_size_is_positive(self, size):
        words = rf"^curvax\.plan_batch_size: max_size must be at least 1, got {size}"
        with pytest.raises(ValueError, match=words):
            self.plan(max_size=size)

    @pytest.mark.parametrize(
        ("budget", "error"),
        [
            *[(budget, ValueError) for budget in (0, -1, 1.5, "much", "12")],
            *[(budget, TypeError) for budget in (None, True, b"1MB")],
        ],
    )
    def test_the_budget_is_an_amount_of_memory(self, budget, error):
        with pytest.raises(error) as expected:
            parse_memory(budget)
        with pytest.raises(error) as caught:
            self.plan(memory_budget=budget)
        words = str(expected.value).replace("curvax.parse_memory", "curvax.plan_batch_size")
        assert str(caught.value) == words

    @pytest.mark.parametrize("args", [BATCH, jnp.ones((3, 4)), PARAMS], ids=type)
    def test_the_arguments_are_a_tuple(self, args):
        words = r"^curvax\.plan_batch_size: args must be a tuple .* write \(x,\)"
        with pytest.raises(TypeError, match=words):
            self.plan(args=args)

    def test_nothing_is_compiled_for_a_mistake(self):
        counted = CountTraces(some_rows)
        for options in ({"max_size": 0}, {"memory_budget": 0}):
            wrong = {"max_size": 4, "memory_budget": 10**6} | options
            with pytest.raises(ValueError, match="at least"):
                plan_batch_size(counted, (PARAMS, BATCH), **wrong)
        assert counted.count == 0

    def test_errors_of_build_are_raised(self):
        def build(size):
            raise RuntimeError(f"no such size: {size}")

        with pytest.raises(RuntimeError, match="no such size"):
            plan_batch_size(build, (), max_size=4, memory_budget=10**6)


def example_plan(needs=(40, 200, 990, 1100), budget=1000):
    usages = [MemoryUsage(0, 24, need - 24) for need in needs]
    trials = tuple(map(Trial, (2, 12, 60, 70), usages))
    return MemoryPlan(60, 2, usages[2], budget, trials, 100)


def test_it_prints_what_was_compiled():
    plan = example_plan()
    assert str(plan).splitlines() == [
        "batch size 60 of 100 (2 batches)",
        "needs 990 B of 1000 B",
        "compiled:",
        "       2         40 B",
        "      12        200 B",
        "      60        990 B <- chosen",
        "      70     1.07 KiB too large",
    ]


def test_it_is_a_value():
    assert example_plan() == example_plan()
    assert hash(example_plan()) == hash(example_plan())
    assert example_plan() != example_plan(budget=995)
    assert "batch_size=60" in repr(example_plan())


class TestPlots:
    @pytest.fixture(autouse=True)
    def plt(self):
        matplotlib = pytest.importorskip("matplotlib")
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        yield plt
        plt.close("all")

    def test_it_shows_what_was_compiled_the_budget_and_the_choice(self, tmp_path):
        plan = plan_batch_size(some_rows, (PARAMS, BATCH), max_size=ROWS, memory_budget="500kB")
        ax = plan.plot()
        needed, budget, chosen = ax.lines
        sizes, needs = needed.get_data()
        assert list(sizes) == sorted(trial.size for trial in plan.trials)
        assert max(needs) * 1024 == max(trial.usage.added_bytes for trial in plan.trials)
        assert set(budget.get_ydata()) == {500_000 / 1024}
        assert list(chosen.get_xdata()) == [plan.batch_size]
        assert ax.get_xlabel() == "batch size"
        assert ax.get_ylabel() == "memory added by a call [KiB]"
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels == ["needed", "budget", f"chosen: {plan.batch_size} of {ROWS}"]
        ax.figure.savefig(tmp_path / "plan.png")
        assert (tmp_path / "plan.png").stat().st_size > 1000

    def test_into_given_axes(self, plt):
        _, axes = plt.subplots(1, 2)
        assert example_plan().plot(axes[1]) is axes[1]
        assert example_plan().plot(ax=axes[0]) is axes[0]
        assert len(plt.get_fignums()) == 1

    @pytest.mark.parametrize(
        ("scale", "unit"), [(1, "B"), (10**3, "KiB"), (10**6, "MiB"), (10**9, "GiB")]
    )
    def test_in_units_that_fit(self, scale, unit):
        needs = [scale * need for need in (40, 200, 900, 1000)]
        ax = example_plan(needs, budget=950 * scale).plot()
        assert ax.get_ylabel().endswith(f"[{unit}]")

    @pytest.mark.parametrize("budget", [1, 10])
    def test_of_a_program_that_needs_nothing(self, budget):
        plan = plan_batch_size(lambda size: lambda: None, (), max_size=5, memory_budget=budget)
        plan.plot().figure.savefig(io.BytesIO())

    def test_without_matplotlib(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r"^curvax: plots need matplotlib.*'curvax\[plot\]'"):
            example_plan().plot()
