"""A Hessian by its triangle equals `jax.hessian`, whatever the groups of leaves and their order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import curvax
from curvax.derivatives import hessian as hessian_module
from curvax.derivatives.hessian import dependents, group_leaves
from derivatives.functions import naive_hessian, normal
from helpers import CountTraces, assert_same, total

pytestmark = pytest.mark.optimised

DATA = normal(0, 6, 3)


def network(p):
    """Layers whose names are not in the order in which they are applied."""
    hidden = jnp.tanh(DATA @ p["z"] + p["b"][None])
    hidden = jnp.tanh(hidden @ p["a"]) * p["scale"]
    return jnp.mean((hidden @ p["m"]) ** 2) + jnp.sum(p["b"] ** 4)


POINT = {
    "z": normal(1, 3, 4),
    "b": normal(2, 4),
    "a": normal(3, 4, 3),
    "scale": jnp.asarray(1.5),
    "m": normal(4, 3),
    "unused": normal(5, 2),
    "empty": jnp.zeros((0, 3)),
}


@functools.cache
def expected():
    return naive_hessian(network, POINT)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups also where there are few columns."""
    monkeypatch.setattr(hessian_module, "LEAST_COLUMNS", 1)


def hessian(f=network, x=POINT, **options):
    # Kept programs are told apart by the function.
    return curvax.hessian(lambda p: f(p), x, **options)


@pytest.mark.parametrize(("most", "size"), [(1, 3), (2, 1), (3, 100), (8, 3)])
def test_any_number_of_groups(most, size, monkeypatch):
    monkeypatch.setattr(hessian_module, "MOST_GROUPS", most)
    assert_same(hessian(batch_size=size)[0], expected(), 1e-12, 1e-12)


@settings(max_examples=3)
@given(data=st.data())
def test_any_order(data):
    """Whatever is computed first, the rest is its mirror image."""
    weights = data.draw(st.lists(st.integers(0, 9), min_size=7, max_size=7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hessian_module, "dependents", lambda program: weights)
        assert_same(hessian(batch_size=data.draw(st.integers(1, 13)))[0], expected(), 1e-12, 1e-12)


@pytest.mark.parametrize(
    "way",
    [
        {"nbatches": 5},
        {"batch_size": 3, "checkpoint": True},
        {"memory_budget": "1MB"},
    ],
    ids=str,
)
def test_whatever_the_options(way):
    assert_same(hessian(**way)[0], expected(), 1e-12, 1e-12)


def test_the_auxiliary_value():
    f = lambda p: (network(p), {"sum": jnp.sum(p["a"]), "names": [p["b"], jnp.arange(3)]})
    H, _, aux = hessian(f, batch_size=4, has_aux=True)
    assert_same(H, expected(), 1e-12, 1e-12)
    assert_same(aux, f(POINT)[1])


def test_leaves_of_several_dtypes():
    x = {**POINT, "a": POINT["a"].astype(jnp.float32), "m": POINT["m"].astype(jnp.float16)}
    with jax.numpy_dtype_promotion("standard"):
        H = hessian(x=x, batch_size=5)[0]
        assert_same(H, naive_hessian(network, x), 2e-2, 2e-2)


class TestUnderTransformations:
    def test_vmap(self):
        points = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), POINT)
        run = jax.jit(jax.vmap(lambda p: curvax.hessian(network, p, batch_size=4)[0]))
        half = jax.tree.map(lambda leaf: leaf / 2, POINT)
        assert_same(run(points), jnp.stack([expected(), naive_hessian(network, half)]))

    def test_grad(self):
        ours = jax.jit(jax.grad(lambda p: total(curvax.hessian(network, p, batch_size=3)[0])))
        naive = jax.jit(jax.grad(lambda p: total(naive_hessian(network, p))))
        assert_same(ours(POINT), naive(POINT), 1e-11, 1e-11)

    def test_jvp(self):
        tangent = jax.tree.map(jnp.cos, POINT)
        ours = lambda p: curvax.hessian(network, p, batch_size=3)[0]
        push = lambda f: jax.jit(lambda p, t: jax.jvp(f, (p,), (t,)))(POINT, tangent)
        naive = lambda p: naive_hessian(network, p)
        assert_same(push(ours), push(naive), 1e-11, 1e-11)

    def test_a_function_of_traced_constants(self):
        scaled = lambda scale: lambda p: scale * network(p)
        run = jax.jit(lambda scale: curvax.hessian(scaled(scale), POINT, batch_size=4)[0])
        assert_same(run(3.0), 3 * expected(), 1e-12, 1e-12)


def test_it_is_symmetric_between_groups():
    H = np.asarray(hessian(batch_size=100)[0])
    sizes = [leaf.size for leaf in jax.tree.leaves(POINT)]
    ends = np.cumsum(sizes)
    for start, end in zip(ends - sizes, ends, strict=True):
        np.testing.assert_array_equal(H[start:end, end:], H[end:, start:end].T)


def test_a_function_is_traced_once_more_at_most():
    f = CountTraces(network)
    curvax.hessian(f, POINT, batch_size=4)
    assert f.count <= 2  # Once for the shape of its value.
    curvax.hessian(f, POINT, batch_size=4)
    assert f.count <= 2


def test_effects_happen_once(capfd):
    def printing(p):
        jax.debug.print("evaluated")
        return network(p)

    assert_same(hessian(printing, batch_size=4)[0], expected(), 1e-12, 1e-12)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("evaluated") == 1


def test_one_matrix_and_some_blocks_are_all_that_is_held():
    n, parts, rows = 512, 4, 16
    leaves = [jax.ShapeDtypeStruct((n // parts,), jnp.float64)] * parts

    def chain(x):
        value = jnp.ones(n // parts)
        for leaf in x:
            value = jnp.tanh(value * leaf) + jnp.mean(value)
        return jnp.sum(value**2)

    run = lambda *x: curvax.hessian(chain, x, batch_size=rows)[0]
    assert curvax.memory_usage(run, *leaves).added_bytes < 8 * n**2 + 6 * 8 * n * rows


class TestMemoryOfGroups:
    """Groups are computed one after the other, also where a block is a whole group."""

    n = 24

    def chain(self, x):
        value = jnp.ones((64, self.n))
        for leaf in x:
            value = jnp.tanh(value * leaf[None]) + jnp.mean(value)
        return jnp.sum(value**2)

    def needs(self, size):
        leaves = [jax.ShapeDtypeStruct((self.n,), jnp.float64)] * 4
        run = lambda *x: curvax.hessian(self.chain, x, batch_size=size)[0]
        return curvax.memory_usage(run, *leaves).temp_bytes

    @pytest.mark.slow
    def test_it_does_not_jump_where_blocks_stand_alone(self):
        half, more, whole = map(self.needs, (12, 13, 24))
        assert more < 1.7 * half
        assert whole < 2.5 * half

    @pytest.mark.slow
    def test_blocks_are_no_larger_than_the_largest_group(self):
        x = [normal(k, self.n) for k in range(4)]
        with curvax.recorded_plans() as plans:
            curvax.hessian(lambda x: self.chain(x), x, memory_budget="1GB")
        assert plans[0].max_size == self.n
        assert len(plans[0].trials) <= 4


@pytest.mark.parametrize(
    ("options", "by_triangle"),
    [
        ({}, True),
        ({"jit": False}, False),
        ({"memory_budget": "1MB"}, True),
        ({"mesh": "one device"}, False),
        ({"out": "x.zarr"}, False),
    ],
    ids=str,
)
def test_one_triangle_is_computed_by_one_compiled_program_on_one_device(
    options, by_triangle, tmp_path, monkeypatch
):
    computed = CountTraces(hessian_module.compute_triangle)
    monkeypatch.setattr(hessian_module, "compute_triangle", computed)
    if "mesh" in options:
        options = {"mesh": jax.make_mesh((1,), ("devices",))}
    elif "out" in options:
        options = {"out": tmp_path / "x.zarr"}
    f = lambda x: jnp.sum(x[0] ** 3) * jnp.sum(jnp.sin(x[1]))
    x = [normal(0, 3), normal(1, 2)]
    H, _ = curvax.hessian(f, x, **options)
    assert (computed.count > 0) == by_triangle
    assert_same(H[...], naive_hessian(f, x), 1e-10, 1e-10)


def test_planning_shows_no_bars(capsys):
    f = lambda p: jnp.sum(p["a"] ** 3) * jnp.sum(p["b"])
    x = {"a": normal(0, 3), "b": normal(1, 2)}
    curvax.hessian(f, x, memory_budget="1MB", objective="time", progress=True)
    jax.effects_barrier()
    assert capsys.readouterr().err.count(":   0%") == 1


class TestGroups:
    def test_layers_in_the_order_in_which_they_are_applied(self):
        names = sorted(POINT)
        groups = group_leaves([1] * 7, dependents(jax.make_jaxpr(network)(POINT)), 8)
        order = [names[leaf] for group in groups for leaf in group]
        assert order[0] == "z"
        used = [name for name in order if name in "zam"]
        assert used == ["z", "a", "m"]

    def test_dependencies_are_counted_inside_calls(self):
        inner = jax.jit(lambda a, b: jnp.sin(a * 2) + b)
        program = jax.make_jaxpr(lambda a, b, c: inner(a, b) * 3 + c)(*jnp.zeros((3, 5)))
        a, b, c = dependents(program)
        assert (a, b, c) == (25, 15, 5)

    def test_neighbours_that_cost_least_are_put_together(self):
        assert group_leaves([9, 1, 9, 9], [8, 7, 5, 1], 3) == [range(2), range(2, 3), range(3, 4)]

    @given(
        leaves=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12),
        most=st.integers(1, 5),
    )
    def test_each_leaf_is_in_one_group(self, leaves, most):
        groups = group_leaves([s for s, _ in leaves], [w for _, w in leaves], most)
        assert len(groups) <= max(most, 1)
        assert sorted(leaf for group in groups for leaf in group) == list(range(len(leaves)))
