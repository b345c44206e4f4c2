"""Error messages begin with the public name that the user called."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax._errors import check_size, where

pytestmark = pytest.mark.usefixtures("unchecked")


def named(name):
    return pytest.raises((TypeError, ValueError), match=rf"^curvax\.{name}: ")


def test_a_function_is_named():
    with named("hessian"):
        curvax.hessian(jnp.sum, jnp.ones(2), nbatches=0)


def test_what_a_function_returned_is_named_after_it():
    mapped = curvax.chunked_vmap(jnp.sin, 2, in_axes=5)
    with named("chunked_vmap"):
        mapped(jnp.ones(4))


def test_jax_may_be_between_the_user_and_curvax():
    mapped = curvax.chunked_vmap(jnp.sin, 2, in_axes=5)
    with named("chunked_vmap"):
        jax.jit(jax.vmap(mapped))(jnp.ones((3, 4)))


def test_the_inner_call_is_named_where_a_user_s_function_calls_curvax():
    def f(x):
        return jnp.sum(curvax.chunked_vmap(jnp.sin, 0)(x))

    with named("chunked_vmap"):
        curvax.hessian(f, jnp.ones(2))


def test_the_outer_call_is_named_where_curvax_calls_its_own_functions():
    with named("hessian"):
        curvax.hessian(jnp.sum, jnp.ones(2), memory_budget="much")
    with named("parse_memory"):
        curvax.parse_memory("much")


def test_the_class_of_a_method_is_named():
    with named("Optimizer"):
        curvax.Optimizer(None, l2_reg=0.0)


def test_the_public_class_of_a_subclass_is_named():
    class Own(curvax.Optimizer):
        pass

    with named("Optimizer"):
        Own(None, l2_reg=0.0)


def test_replacing_a_configuration_names_the_optimizer():
    optimizer = curvax.Optimizer(jax.value_and_grad(jnp.sum), l2_reg=0.0)
    with named("Optimizer"):
        optimizer.l2_reg = -1.0


@pytest.mark.parametrize(
    ("function", "helps"),
    [(curvax.hessian, "disk with out="), (curvax.hessian_diagonal, "checkpoint=True.$")],
)
def test_only_what_a_function_takes_is_recommended(function, helps):
    with pytest.raises(curvax.MemoryBudgetError, match=helps):
        function(lambda x: jnp.sum(jnp.sin(x) ** 2), jnp.ones(100), memory_budget=1)


def test_without_a_public_caller_it_is_the_package():
    assert where() == "curvax"
    with pytest.raises(ValueError, match=r"^curvax: size must be at least 1"):
        functools.partial(check_size, "size")(0)


def test_reading_the_name_keeps_nothing_alive():
    """Not even until the next garbage collection: callers have large arrays."""

    class Large:
        pass

    def caller():
        large = Large()
        assert where() == "curvax"
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
