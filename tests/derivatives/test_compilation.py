"""A function is compiled once for its shapes, and traced and evaluated once a call.

Compilations are counted as JAX reports them.
"""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.memory import compiled
from derivatives.functions import normal
from helpers import CountTraces

pytestmark = pytest.mark.optimised

WAYS = [{"batch_size": 2}, {"memory_budget": "1MB"}]
each_way = pytest.mark.parametrize("way", WAYS, ids=str)


def scalar(x):
    return jnp.sum(jnp.sin(x) ** 3) * x[0]


def vector(x):
    return jnp.sin(x) * x[0]


def loglike(x, example):
    return jnp.sum(jnp.sin(x * example)) ** 2


DATA = normal(9, 6, 5)
COMPUTED = {
    "jacobian by columns": (curvax.jacobian, vector, {"mode": "forward"}),
    "jacobian by rows": (curvax.jacobian, vector, {"mode": "reverse"}),
    "hessian": (curvax.hessian, scalar, {}),
    "hessian_diagonal": (curvax.hessian_diagonal, scalar, {}),
    "hessian_blocks": (curvax.hessian_blocks, scalar, {}),
    "gauss_newton": (curvax.gauss_newton, vector, {"weight": jnp.arange(5.0)}),
    "fisher_information": (curvax.fisher_information, loglike, {"data": DATA}),
}
each_function = pytest.mark.parametrize("name", COMPUTED)


def setting(name):
    compute, f, options = COMPUTED[name]
    f = CountTraces(f)
    return f, lambda x, **way: jax.block_until_ready(
        jax.tree.leaves(compute(f, x, **options, **way))[0]
    )


@each_function
@each_way
def test_the_second_call_traces_the_function_alone_and_compiles_nothing(name, way, compilations):
    f, run = setting(name)
    first, second = normal(0, 5), normal(1, 5)
    run(first, **way)
    jax.block_until_ready((first, second))
    traced, compiled = f.count, len(compilations)
    assert compiled > 0
    run(second, **way)
    assert f.count == traced + 1
    assert len(compilations) == compiled


@pytest.mark.parametrize("name", ["jacobian by columns", "gauss_newton", "fisher_information"])
@each_way
def test_a_call_under_jit_does_not_keep_later_ones_from_being_compiled(name, way, compilations):
    compute, f, options = COMPUTED[name]
    f, x = CountTraces(f), normal(0, 5)
    run = lambda x: jax.tree.leaves(compute(f, x, **options, **way))[0]
    inside = jax.jit(run)(x)
    np.testing.assert_allclose(run(x), inside, rtol=1e-12, atol=1e-12)
    traced, compiled = f.count, len(compilations)
    run(x)
    assert (f.count, len(compilations)) == (traced + 1, compiled)


@each_function
def test_it_is_traced_once_at_first(name):
    """Derivatives are taken of what was traced; whatever the blocks."""
    f, run = setting(name)
    run(normal(0, 5), batch_size=2)
    assert f.count == 1


@pytest.mark.parametrize("name", ["jacobian by columns", "hessian"])
def test_other_shapes_and_dtypes_are_compiled_again(name, compilations):
    compute, f, options = COMPUTED[name]
    points = normal(0, 5), normal(0, 7), normal(0, 7, dtype=jnp.float32)
    for x in points:
        before = len(compilations)
        compute(f, x, **options, batch_size=3)
        assert len(compilations) > before


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 2}, {"checkpoint": True}, {"mode": "reverse"}, {"memory_budget": "1MB"}],
    ids=str,
)
def test_other_options_are_another_program(change, compilations):
    f = lambda x: jnp.sin(x) * x[0]
    x = normal(0, 5)
    curvax.jacobian(f, x, mode="forward")
    before = len(compilations)
    curvax.jacobian(f, x, **{"mode": "forward"} | change)
    assert len(compilations) > before


def test_functions_are_not_mistaken_for_each_other():
    x = normal(0, 5)
    f = lambda x: jnp.sum(x**3)
    H, _ = curvax.hessian(f, x)
    np.testing.assert_allclose(curvax.hessian_diagonal(f, x), jnp.diagonal(H))
    np.testing.assert_allclose(curvax.hessian_blocks(f, x), H)
    assert curvax.jacobian(f, x)[0].shape == (5,)
    assert curvax.gauss_newton(f, x)[0].shape == (5, 5)


def test_plans_are_not_mistaken_for_each_other_inside_another_function():
    x, budget = normal(3, 100), "1MB"
    usage = lambda compute: curvax.memory_usage(
        functools.partial(compute, scalar, memory_budget=budget), x
    )
    with curvax.recorded_plans() as plans:
        usage(curvax.hessian_diagonal)
        usage(curvax.hessian_blocks)
    diagonal, blocks = plans
    assert diagonal.usage.output_bytes < x.size**2 * 8 <= blocks.usage.output_bytes


@pytest.mark.parametrize("new", [float, np.float64], ids=["Python", "NumPy"])
def test_other_numbers_are_not_another_program(new, compilations):
    f = CountTraces(lambda p: jnp.asarray(p["a"]) ** 2 * p["b"])
    point = lambda a: {"a": new(a), "b": jnp.array(2.0)}
    first, _ = curvax.hessian(f, point(1.0))
    traced, compiled = f.count, len(compilations)
    second, _ = curvax.hessian(f, point(3.0))
    assert (f.count, len(compilations)) == (traced + 1, compiled)
    np.testing.assert_allclose(first, [[4, 2], [2, 0]])
    np.testing.assert_allclose(second, [[4, 6], [6, 0]])


class Model:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, x):
        return self.scale * jnp.sum(x**3)


@pytest.mark.parametrize("way", [{}, {"memory_budget": "1MB"}], ids=str)
def test_methods_are_compiled_once_for_their_object(way, compilations):
    x, model, other = normal(0, 5), Model(1.0), Model(2.0)
    first, _ = curvax.hessian(model.loss, x, **way)
    before = len(compilations)
    curvax.hessian(model.loss, x, **way)
    assert len(compilations) == before
    np.testing.assert_allclose(curvax.hessian(other.loss, x, **way)[0], 2 * first)


@each_function
def test_cache_entries_die_with_the_function(name):
    compute, f, options = COMPUTED[name]
    way = {"memory_budget": "1MB"} if name.startswith("jacobian") else {"batch_size": 2}
    f = functools.partial(f)
    before = len(compiled._executables._entries)
    compute(f, normal(0, 5), **options, **way)
    assert len(compiled._executables._entries) == before + 1
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None
    assert len(compiled._executables._entries) == before


EVALUATED = [
    ("jacobian by columns", {"nbatches": 5}),
    ("jacobian by columns", {"nbatches": 5, "jit": False}),
    ("jacobian by rows", {"nbatches": 5}),
    ("hessian", {"nbatches": 5}),
    ("hessian_diagonal", {"nbatches": 5}),
    ("hessian_blocks", {"nbatches": 5}),
    ("gauss_newton", {"nbatches": 5}),
]


@pytest.mark.parametrize(("name", "way"), EVALUATED, ids=str)
def test_the_function_is_evaluated_once_not_for_each_block(name, way):
    compute, f, options = COMPUTED[name]
    calls = []

    def noted(x):
        jax.debug.callback(lambda: calls.append(1))
        return f(x)

    for number in (1, 2):
        jax.block_until_ready(jax.tree.leaves(compute(noted, normal(0, 5), **options, **way))[0])
        jax.effects_barrier()
        assert len(calls) == number


def test_streaming_evaluates_the_function_once(tmp_path):
    calls = []

    def noted(x):
        jax.debug.callback(lambda: calls.append(1))
        return scalar(x)

    curvax.hessian(noted, normal(0, 5), batch_size=1, out=tmp_path / "H.zarr")
    jax.effects_barrier()
    assert len(calls) == 1
