"""`Static` carries a hashable value through JAX as part of the structure of a pytree."""

import copy
import enum
import math
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

from curvax import Static
from helpers import CountTraces, assert_same

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
pairs = st.tuples(plain, plain)
hashable = plain | pairs | st.tuples(pairs, plain) | st.frozensets(plain, max_size=3)


class Colour(enum.Enum):
    RED = 1


VALUES = [1, 1.0, True, "1", None, (1, "a"), frozenset({1}), Colour.RED, jnp.sin, jnp.float32]


@given(value=hashable)
def test_it_has_no_leaves_and_comes_back_from_its_structure(value):
    leaves, structure = jax.tree.flatten({"a": Static(value), "b": 1.0})
    assert leaves == [1.0]
    assert structure.unflatten(leaves)["a"].value == value


@given(value=hashable)
def test_equal_values_are_equal_and_hash_alike(value):
    assert Static(value) == Static(value)
    assert Static(value) == Static(copy.deepcopy(value))
    assert hash(Static(value)) == hash(Static(copy.deepcopy(value)))
    assert jax.tree.structure(Static(value)) == jax.tree.structure(Static(copy.deepcopy(value)))


@given(one=plain, other=plain)
def test_other_values_or_values_of_another_type_are_not_equal(one, other):
    same = type(one) is type(other) and one == other
    assert (Static(one) == Static(other)) == same
    assert (jax.tree.structure(Static(one)) == jax.tree.structure(Static(other))) == same


def test_it_equals_nothing_but_a_static():
    assert Static(1) != 1
    assert Static("a") != "a"
    assert Static(None) != None  # noqa: E711
    assert Static(Static(1)) != Static(1)
    assert Static(Static(1)) == Static(Static(1))


def test_a_value_that_does_not_equal_itself_is_still_the_same_value():
    nan = Static(math.nan)
    assert nan == Static(math.nan)
    assert len({nan, Static(math.nan)}) == 1


def test_jit_traces_again_for_other_values_only():
    fun = CountTraces(lambda x, power: x**power.value)
    jitted = jax.jit(fun)
    for power, traces in [(2, 1), (2, 1), (3, 2), (2, 2), (3, 2)]:
        assert jitted(3.0, Static(power)) == 3.0**power
        assert fun.count == traces


def test_jit_never_takes_one_type_for_another():
    seen = []

    @jax.jit
    def fun(x, static):
        seen.append(static.value)
        return x * (
            2 if isinstance(static.value, bool) else 3 if isinstance(static.value, int) else 5
        )

    for _ in range(2):
        assert [int(fun(1, Static(value))) for value in (1, 1.0, True)] == [3, 5, 2]
        assert [int(fun(1, Static(value))) for value in (0, 0.0, False)] == [3, 5, 2]
    assert [(type(value), value) for value in seen] == [
        *((int, 1), (float, 1.0), (bool, True)),
        *((int, 0), (float, 0.0), (bool, False)),
    ]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_it_goes_through_jit_and_comes_out(value):
    out = jax.jit(lambda tree: {"static": tree["static"], "y": 2 * tree["x"]})(
        {"static": Static(value), "x": jnp.arange(3)}
    )
    assert out["static"] == Static(value)
    assert type(out["static"].value) is type(value)
    assert_same(out["y"], jnp.array([0, 2, 4]))


def test_a_static_made_under_jit_comes_out():
    out = jax.jit(lambda x: (x, Static(x.shape)))(jnp.zeros((2, 3)))
    assert out[1] == Static((2, 3))


def test_vmap_and_its_axes_pass_it_by():
    fun = lambda x, power: (x**power.value, power)
    x = jnp.arange(3.0)
    for axes in (0, (0, None), (0, 0)):
        assert_same(jax.vmap(fun, axes)(x, Static(2)), (x**2, Static(2)))


def test_a_gradient_has_it_where_the_argument_has_it():
    loss = lambda tree: jnp.sum(tree["x"] ** tree["power"].value)
    x = jnp.arange(3.0)
    assert_same(jax.grad(loss)({"x": x, "power": Static(3)}), {"x": 3 * x**2, "power": Static(3)})


def test_a_scan_carries_it_and_closes_over_it():
    outer = Static(3)

    def body(carry, x):
        total, power = carry
        return (total + x**power.value, power), (x * outer.value, outer)

    (total, power), (ys, kept) = jax.lax.scan(body, (0.0, Static(2)), jnp.arange(4.0))
    assert total == 14.0
    assert (power, kept) == (Static(2), outer)
    assert_same(ys, 3 * jnp.arange(4.0))


def test_tree_map_needs_equal_statics():
    one, other = {"x": 1.0, "s": Static(1)}, {"x": 2.0, "s": Static(2)}
    assert jax.tree.map(jnp.add, one, one) == {"x": 2.0, "s": Static(1)}
    with pytest.raises(ValueError, match="Static"):
        jax.tree.map(jnp.add, one, other)


@pytest.mark.parametrize(
    "value",
    [1, True, "a", (1, (2.0, None)), Colour.RED, math.sin],
    ids=lambda value: type(value).__name__,
)
def test_copies_and_pickles_are_equal(value):
    static = Static(value)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(static, protocol)) == static
    assert copy.copy(static) == static
    assert copy.deepcopy({"a": [static]}) == {"a": [static]}


def test_it_cannot_be_changed():
    static = Static(1)
    with pytest.raises(AttributeError, match=r"Static cannot be changed.*'value'"):
        static.value = 2
    with pytest.raises(AttributeError, match=r"Static cannot be changed.*'other'"):
        static.other = 2
    with pytest.raises(AttributeError, match=r"Static cannot be changed.*'value'"):
        del static.value
    assert static.value == 1


def test_it_prints_its_value():
    assert repr(Static((1, "a"))) == "Static((1, 'a'))"
    assert repr({"a": Static(Static(None))}) == "{'a': Static(Static(None))}"


def test_it_can_be_annotated():
    assert Static[int](3) == Static(3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, {1}, (1, [2]), bytearray(b"a"), jnp.ones(2), slice([])],
    ids=lambda value: type(value).__name__,
)
def test_an_unhashable_value_is_rejected(value):
    words = rf"curvax\.Static: the value must be hashable.*; got {type(value).__name__} .*tuple"
    with pytest.raises(TypeError, match=rf"(?s){words}"):
        Static(value)


@pytest.mark.usefixtures("unchecked")
def test_an_array_that_is_being_traced_is_rejected():
    with pytest.raises(TypeError, match=r"must be hashable.*pass arrays as ordinary leaves"):
        jax.jit(lambda x: Static(x))(1.0)
