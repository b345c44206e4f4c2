"""What is kept for a function is found again by that function only, and goes when it goes."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from curvax.memory.compiled import MOST, FunctionCache
from helpers import CountTraces


@pytest.fixture
def cache():
    return FunctionCache()


@pytest.fixture
def make():
    """Counts how often it is called, and makes a new object each time."""
    return CountTraces(object)


class Model:
    def __init__(self, weight=1.0):
        self.weight = weight

    def __eq__(self, other):  # Equal, but not the same; and not hashable.
        return isinstance(other, Model)

    __hash__ = None

    def apply(self, x):
        return self.weight * x

    def loss(self, x):
        return self.weight * x**2

    @classmethod
    def kind(cls, x):
        return x


def new_function():
    return lambda x: x


FUNCTIONS = {
    "function": new_function,
    "partial": lambda: functools.partial(new_function(), 1),
    "jitted": lambda: jax.jit(new_function()),
    "bound method": lambda: Model().apply,
    "callable object": lambda: CountTraces(jnp.sin),
}
each_kind = pytest.mark.parametrize("new", FUNCTIONS.values(), ids=FUNCTIONS)


@each_kind
def test_the_same_function_and_key_give_the_same_value(cache, make, new):
    fun = new()
    first = cache.get(fun, (1, "a"), make)
    assert cache.get(fun, (1, "a"), make) is first
    assert make.count == 1


@each_kind
def test_another_key_gives_another_value(cache, make, new):
    fun = new()
    assert cache.get(fun, 1, make) is not cache.get(fun, 2, make)
    assert make.count == 2


@each_kind
def test_another_function_gives_another_value(cache, make, new):
    """Also one of the same code: what it closes over may differ."""
    first, second = new(), new()
    assert cache.get(first, 1, make) is not cache.get(second, 1, make)


def test_the_methods_of_an_object_are_found_again(cache, make):
    """Though each mention of one makes a new Python object."""
    model = Model()
    assert model.apply is not model.apply
    assert cache.get(model.apply, 1, make) is cache.get(model.apply, 1, make)
    assert cache.get(model.apply, 1, make) is not cache.get(model.loss, 1, make)
    assert cache.get(Model.kind, 1, make) is cache.get(Model.kind, 1, make)
    assert make.count == 3


def test_equal_objects_are_distinguished(cache, make):
    first, second = Model(1.0), Model(2.0)
    assert first == second
    assert cache.get(first.apply, 1, make) is not cache.get(second.apply, 1, make)


@each_kind
def test_cache_entries_die_with_the_function(cache, new):
    class Kept:
        pass

    fun = new()
    kept = weakref.ref(cache.get(fun, 1, Kept))
    gc.collect()
    assert (kept() is not None) == cache_holds(cache)
    del fun
    gc.collect()
    assert kept() is None
    assert not cache_holds(cache)


def cache_holds(cache):
    return bool(cache._entries)


def test_a_method_s_value_lives_as_long_as_the_object(cache, make):
    model = Model()
    first = cache.get(model.apply, 1, make)
    gc.collect()
    assert cache.get(model.apply, 1, make) is first
    del model
    gc.collect()
    assert not cache_holds(cache)


def test_a_function_at_the_address_of_a_dead_one_is_another_function(cache):
    for number in range(100):
        fun = new_function()
        assert cache.get(fun, "key", lambda number=number: number) == number


def test_values_of_functions_without_weak_references_are_not_kept(cache, make):
    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return x

    fun = Slotted()
    assert cache.get(fun, 1, make) is not cache.get(fun, 1, make)
    assert make.count == 2
    assert not cache_holds(cache)


def test_only_the_most_recent_entries_are_kept(cache, make):
    """A function that changes all the time would fill the memory."""
    fun = new_function()
    first = cache.get(fun, "first", make)
    for key in range(2 * MOST):
        cache.get(fun, key, make)
        assert cache.get(fun, "first", make) is first
    ((_, entries),) = cache._entries.values()
    assert len(entries) == MOST


def test_a_failure_is_not_kept(cache, make):
    def fail():
        raise ValueError("no")

    fun = new_function()
    with pytest.raises(ValueError, match="no"):
        cache.get(fun, 1, fail)
    cache.get(fun, 1, make)
    assert make.count == 1


def test_a_function_may_be_asked_for_while_another_is_made(cache):
    fun = new_function()
    outer = cache.get(fun, "outer", lambda: [cache.get(fun, "inner", list)])
    assert outer[0] is cache.get(fun, "inner", list)
