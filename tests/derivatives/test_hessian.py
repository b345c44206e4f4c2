"""`hessian` equals `jax.hessian` of the function of a flat vector; and so do its parts.

What they need is asserted from the compiled programs.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import curvax
from curvax import hessian, hessian_blocks, hessian_diagonal
from derivatives.functions import (
    LOSS_BY_NAME,
    LOSSES,
    MIXED,
    flattened,
    mixed_loss,
    naive_hessian,
    name_of,
    normal,
    tolerance,
)
from helpers import assert_same, total

pytestmark = pytest.mark.optimised

X = normal(0, 5)


def cube(x):
    return jnp.sum(x**3) * x[0] + jnp.sum(jnp.sin(x)) ** 2


hessian_of_cube = jax.jit(jax.hessian(cube))


@functools.cache
def expected(name):
    return naive_hessian(LOSS_BY_NAME[name].f, LOSS_BY_NAME[name].x)


def expected_diagonal(case):
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, case.x))
    diagonal = np.diagonal(expected(case.name))
    parts = np.split(diagonal, np.cumsum([leaf.size for leaf in leaves])[:-1])
    like = lambda part, leaf: part.reshape(leaf.shape).astype(leaf.dtype)
    return structure.unflatten(map(like, parts, leaves))


def expected_blocks(case):
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, case.x))
    blocks, start = [], 0
    for leaf in leaves:
        rows = slice(start, start + leaf.size)
        block = np.asarray(expected(case.name))[rows, rows].astype(leaf.dtype)
        blocks.append(block.reshape(leaf.shape + leaf.shape))
        start += leaf.size
    return structure.unflatten(blocks)


KINDS = {
    "matrix": (lambda *args, **kwargs: hessian(*args, **kwargs)[0], lambda c: expected(c.name)),
    "diagonal": (hessian_diagonal, expected_diagonal),
    "blocks": (hessian_blocks, expected_blocks),
}
WAYS = {
    "batches": {"nbatches": 4},
    "budget": {"memory_budget": "1MB"},
    "checkpoint": {"checkpoint": True, "batch_size": 4},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def assert_is_right(kind, case, **way):
    compute, oracle = KINDS[kind]
    accuracy = tolerance(case.x)
    assert_same(compute(case.f, case.x, **way), oracle(case), accuracy, accuracy)


@each_kind
@pytest.mark.parametrize("case", LOSSES, ids=name_of)
def test_it_equals_jax_hessian(case, kind):
    assert_is_right(kind, case, batch_size=2)


@each_kind
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_whatever_the_options(way, kind):
    assert_is_right(kind, LOSS_BY_NAME["mixed dtypes"], **way)


@each_kind
def test_without_compiling(kind):
    assert_is_right(kind, LOSS_BY_NAME["log-likelihood"], jit=False)


def test_the_fastest_size_gives_the_same():
    H, _ = hessian(cube, X, memory_budget="1MB", objective="time")
    assert_same(H, hessian_of_cube(X))


@settings(max_examples=5)
@given(n=st.integers(1, 9), size=st.integers(1, 10), by_number=st.booleans())
def test_any_sizes(n, size, by_number):
    mix = normal(3, n, n)
    f = lambda x: jnp.sum(jnp.sin(mix @ x)) * x[0]
    x = normal(4, n)
    way = {"nbatches": min(size, n)} if by_number else {"batch_size": size}
    assert_same(hessian(f, x, **way)[0], jax.jit(jax.hessian(f))(x), 1e-11, 1e-11)


class TestUnderTransformations:
    @pytest.mark.parametrize("way", [{"batch_size": 2}, {"memory_budget": "1MB"}], ids=str)
    def test_jit(self, way):
        H = jax.jit(lambda x: hessian(cube, x, **way)[0])(X)
        assert_same(H, hessian_of_cube(X))

    @pytest.mark.parametrize("way", [{"batch_size": 2}, {"memory_budget": "1MB"}], ids=str)
    def test_vmap(self, way):
        xs = normal(5, 3, 5)
        run = lambda x: (hessian(cube, x, **way)[0], hessian_diagonal(cube, x, **way))
        H, diagonal = jax.vmap(run)(xs)
        expected = np.stack([hessian_of_cube(x) for x in xs])
        assert_same((H, diagonal), (expected, np.diagonal(expected, axis1=1, axis2=2)))

    @pytest.mark.parametrize("kind", ["matrix", "diagonal"])
    def test_grad(self, kind):
        compute, _ = KINDS[kind]
        part = (lambda H: H) if kind != "diagonal" else jnp.diagonal
        gradient = jax.jit(jax.grad(lambda x: total(compute(cube, x, batch_size=2))))(X)
        naive = jax.jit(jax.grad(lambda x: total(part(jax.hessian(cube)(x)))))
        assert_same(gradient, naive(X), 1e-11, 1e-11)

    def test_a_function_of_traced_constants(self):
        run = jax.jit(lambda scale: hessian(lambda x: scale * cube(x), X, batch_size=2)[0])
        for scale in (2.0, 3.0):
            assert_same(run(scale), scale * hessian_of_cube(X))


class TestAux:
    @pytest.mark.parametrize(
        "way",
        [{"nbatches": 3, "checkpoint": True}, {"jit": False}, {"memory_budget": "1MB"}],
        ids=str,
    )
    def test_aux_is_the_second_output_of_f(self, way):
        f = lambda x: (cube(x), {"sum": jnp.sum(x), "number": jnp.array([3])})
        H, unflatten, aux = hessian(f, X, **way, has_aux=True)
        assert_same(H, hessian_of_cube(X))
        assert_same(aux, f(X)[1])
        assert_same(unflatten(X), X)

    def test_without_a_pair_has_aux_is_rejected(self):
        with pytest.raises(TypeError, match=r"^curvax\.hessian: with has_aux=True, f must return"):
            hessian(cube, X, has_aux=True)


def test_unflatten_restores_the_point():
    _, unflatten = hessian(mixed_loss, MIXED)
    _, flat = flattened(mixed_loss, MIXED)
    assert_same(unflatten(flat), MIXED)


@pytest.mark.parametrize("way", [{}, {"batch_size": 2}, {"memory_budget": "1MB"}], ids=str)
def test_no_parameters(way):
    f = lambda x: jnp.sum(x) + 1
    assert_same(hessian(f, jnp.zeros(0), **way)[0], jnp.zeros((0, 0)))
    assert_same(hessian_diagonal(f, jnp.zeros((2, 0)), **way), jnp.zeros((2, 0)))
    assert_same(hessian_blocks(f, jnp.zeros((2, 0)), **way), jnp.zeros((2, 0, 2, 0)))


def test_the_diagonal_is_right_next_to_an_infinite_derivative():
    f = lambda x: x[0] ** 2 + 2 * jnp.abs(x[1]) ** 1.5
    diagonal = hessian_diagonal(f, jnp.array([1.0, 0.0]))
    assert diagonal[0] == 2


@pytest.mark.parametrize(
    ("function", "blocks"), [(hessian, 3), (hessian_diagonal, 3), (hessian_blocks, 3 + 1)]
)
def test_the_bar_counts_blocks(function, blocks, capsys):
    f = lambda x: cube(x["a"]) * x["b"]
    for _ in range(2):
        a = X if function is hessian_blocks else X[:4]
        function(f, {"a": a, "b": jnp.array(1.0)}, batch_size=2, progress=True)
        jax.effects_barrier()
        error = capsys.readouterr().err
        assert error.startswith(f"\r{function.__name__}: ")
        assert re.findall(r"(\d+)/(\d+) ", error)[-1] == (str(blocks), str(blocks))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("function", [hessian, hessian_diagonal, hessian_blocks])
class TestErrors:
    @staticmethod
    def refuses(error, function, words):
        return pytest.raises(error, match=rf"^curvax\.{function.__name__}: .*{words}")

    def test_more_batches_than_parameters(self, function):
        with self.refuses(ValueError, function, "nbatches=6 is more than .* parameters .* 5"):
            function(cube, X, 6)

    def test_two_sizes(self, function):
        with self.refuses(ValueError, function, "nbatches=2 and batch_size=3"):
            function(cube, X, 2, batch_size=3)
        with self.refuses(ValueError, function, "batch_size=3 and memory_budget='1MB'"):
            function(cube, X, batch_size=3, memory_budget="1MB")

    def test_a_budget_without_jit(self, function):
        with self.refuses(ValueError, function, "jit=False"):
            function(cube, X, jit=False, memory_budget="1MB")

    @pytest.mark.parametrize("leaf", [jnp.arange(3), 1j, "a"], ids=str)
    def test_leaves_that_are_not_real_have_no_derivatives(self, function, leaf):
        with self.refuses(TypeError, function, r"x\['w'\] is of type (int|complex|str).* Convert"):
            function(lambda x: 1.0, {"w": leaf})

    @pytest.mark.parametrize(
        "f",
        [lambda x: x, lambda x: x[:1], lambda x: (x[0],), lambda x: 1j * x[0].astype(complex)],
        ids=["vector", "one", "tuple", "complex"],
    )
    def test_a_value_that_is_no_real_scalar_is_rejected(self, function, f):
        with self.refuses(TypeError, function, "real floating-point scalar, .* curvax.jacobian"):
            function(f, X)

    def test_integers_have_no_second_derivatives(self, function):
        with self.refuses(TypeError, function, "real floating-point scalar"):
            function(jnp.argmax, X)

    def test_nothing_fits(self, function):
        f = lambda x: jnp.sum(x**3)
        with pytest.raises(curvax.MemoryBudgetError, match=rf"^curvax\.{function.__name__}: "):
            function(f, X[:2], memory_budget=8)


class TestMemory:
    n, rows = 512, 16

    @staticmethod
    def loss(x):
        return jnp.sum(jnp.tanh(x) ** 2) * jnp.sum(jnp.cos(x))

    def needs(self, compute):
        x = jax.ShapeDtypeStruct((self.n,), jnp.float64)
        return curvax.memory_usage(compute, x).added_bytes

    @property
    def block(self):
        return 8 * self.n * self.rows

    def test_the_diagonal_never_needs_the_matrix(self):
        need = self.needs(lambda x: hessian_diagonal(self.loss, x, batch_size=self.rows))
        assert need < 5 * self.block
        assert need < 0.2 * 8 * self.n**2

    def test_a_hessian_in_blocks_needs_itself_and_some_blocks(self):
        need = self.needs(lambda x: hessian(self.loss, x, batch_size=self.rows)[0])
        assert need < 8 * self.n**2 + 5 * self.block

    def test_all_at_once_needs_more(self):
        together = self.needs(lambda x: hessian(self.loss, x)[0])
        in_blocks = self.needs(lambda x: hessian(self.loss, x, batch_size=self.rows)[0])
        assert in_blocks < 0.7 * together

    def test_blocks_of_leaves_need_no_matrix_of_all(self):
        parts = [jax.ShapeDtypeStruct((self.n // 8,), jnp.float64)] * 8
        compute = lambda *x: hessian_blocks(
            lambda x: self.loss(jnp.concatenate(x)), x, batch_size=self.rows
        )
        need = curvax.memory_usage(compute, *parts).added_bytes
        assert need < 8 * self.n**2 / 8 + 5 * self.block

    @pytest.mark.parametrize("rows", [64, 60], ids=["even", "uneven"])
    def test_jacobians_in_blocks_need_themselves_and_some_blocks(self, rows):
        f = lambda x: jnp.sin(x) * jnp.sum(jnp.tanh(x) ** 2)
        for mode in ("forward", "reverse"):
            compute = lambda x: curvax.jacobian(f, x, batch_size=rows, mode=mode)[0]  # noqa: B023
            assert self.needs(compute) < 8 * self.n**2 + 4 * 8 * self.n * rows
