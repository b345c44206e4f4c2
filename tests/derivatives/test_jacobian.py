"""`jacobian` equals `jax.jacfwd` of the function of a flat vector, in blocks of any size."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import curvax
from curvax import jacobian
from derivatives.functions import (
    BY_NAME,
    FUNCTIONS,
    NETWORK,
    REAL_FUNCTIONS,
    flattened,
    naive_jacobian,
    name_of,
    network,
    normal,
    tolerance,
)
from helpers import assert_same, total

X = normal(0, 5)


def square(x):
    return jnp.outer(x, jnp.sin(x))[:3]


jacfwd_of_square = jax.jit(jax.jacfwd(square))


@functools.cache
def expected(name):
    return naive_jacobian(BY_NAME[name].f, BY_NAME[name].x)


def assert_is_jacobian(J, case):
    accuracy = tolerance(case.x)
    assert_same(J, expected(case.name), accuracy, accuracy)


WAYS = {
    "batches": {"nbatches": 3},
    "budget": {"memory_budget": "1MB"},
    "checkpoint": {"checkpoint": True, "batch_size": 2},
}


@pytest.mark.parametrize("case", FUNCTIONS, ids=name_of)
def test_columns_equal_jacfwd(case):
    J, _ = jacobian(case.f, case.x, batch_size=2, mode="forward")
    assert_is_jacobian(J, case)


@pytest.mark.parametrize("case", REAL_FUNCTIONS, ids=name_of)
def test_rows_equal_jacfwd(case):
    J, _ = jacobian(case.f, case.x, batch_size=2, mode="reverse")
    assert_is_jacobian(J, case)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("name", ["network", "mixed dtypes"])
def test_whatever_the_options(name, mode, way):
    case = BY_NAME[name]
    J, _ = jacobian(case.f, case.x, **way, mode=mode)
    assert_is_jacobian(J, case)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_without_compiling(mode):
    case = BY_NAME["log-likelihood"]
    assert_is_jacobian(jacobian(case.f, case.x, jit=False, mode=mode)[0], case)


@pytest.mark.parametrize("name", ["few of many", "numbers", "complex outputs"])
def test_the_mode_can_be_left_open(name):
    case = BY_NAME[name]
    J, _ = jacobian(case.f, case.x)
    assert_is_jacobian(J, case)


def test_columns_also_equal_jacrev():
    of_vector, flat = flattened(network, NETWORK)
    J, _ = jacobian(network, NETWORK, mode="forward", batch_size=4)
    assert_same(J, jax.jit(jax.jacrev(of_vector))(flat))


@settings(max_examples=6)
@given(
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    size=st.integers(1, 10),
    mode=st.sampled_from(["forward", "reverse"]),
    by_number=st.booleans(),
    checkpoint=st.booleans(),
)
def test_any_sizes(n, m, size, mode, by_number, checkpoint):
    mix = normal(3, m, n)
    f = lambda x: jnp.sin(mix @ x) * x[0]
    x = normal(4, n)
    length = n if mode == "forward" else m
    way = {"nbatches": min(size, length)} if by_number else {"batch_size": size}
    J, _ = jacobian(f, x, **way, mode=mode, checkpoint=checkpoint)
    assert_same(J, jax.jit(jax.jacfwd(f))(x))


class TestAuto:
    """Few rows are computed as rows, few columns as columns; it shows in what is counted."""

    @staticmethod
    def blocks(f, x, capsys):
        jacobian(f, x, batch_size=1, progress=True)
        jax.effects_barrier()
        return int(re.findall(r"(\d+)/\1 ", capsys.readouterr().err)[-1])

    def test_few_outputs_are_rows(self, capsys):
        assert self.blocks(lambda x: jnp.stack([jnp.sum(x), jnp.sum(x**2)]), X, capsys) == 2

    def test_few_parameters_are_columns(self, capsys):
        assert self.blocks(lambda x: jnp.outer(x, x), normal(1, 3), capsys) == 3

    def test_a_square_is_columns(self, capsys):
        assert self.blocks(lambda x: jnp.concatenate([x[1:], x[:2]]), X, capsys) == 5

    @pytest.mark.parametrize("nbatches", [3, 5])
    def test_batches_are_counted_in_parameters(self, nbatches):
        f = lambda x: jnp.stack([jnp.sum(x), jnp.sum(x**2)])
        assert_same(jacobian(f, X, nbatches)[0], jax.jit(jax.jacfwd(f))(X))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
class TestUnderTransformations:
    @pytest.mark.parametrize("way", [{"batch_size": 2}, {"memory_budget": "1MB"}], ids=str)
    def test_jit(self, mode, way):
        J = jax.jit(lambda x: jacobian(square, x, **way, mode=mode)[0])(X)
        assert_same(J, jacfwd_of_square(X))

    @pytest.mark.parametrize("way", [{"batch_size": 2}, {"memory_budget": "1MB"}], ids=str)
    def test_vmap(self, mode, way):
        xs = normal(5, 3, 5)
        J = jax.vmap(lambda x: jacobian(square, x, **way, mode=mode)[0])(xs)
        assert_same(J, np.stack([jacfwd_of_square(x) for x in xs]))

    def test_grad(self, mode):
        of = lambda x: jacobian(square, x, 3, mode=mode, checkpoint=mode == "forward")[0]
        gradient = jax.jit(jax.grad(lambda x: total(of(x))))(X)
        assert_same(gradient, jax.jit(jax.grad(lambda x: total(jax.jacfwd(square)(x))))(X))

    def test_forward_mode(self, mode):
        of = lambda x: jacobian(square, x, 3, mode=mode)[0]
        tangent = jax.jit(lambda x: jax.jvp(of, (x,), (jnp.cos(x),))[1])(X)
        naive = jax.jit(lambda x: jax.jvp(jax.jacfwd(square), (x,), (jnp.cos(x),))[1])
        assert_same(tangent, naive(X))

    def test_a_function_of_traced_constants(self, mode):
        """Also twice, with other constants: nothing of the first is cached."""

        @jax.jit
        def run(scale, x):
            return jacobian(lambda x: scale * square(x), x, batch_size=2, mode=mode)[0]

        for scale in (2.0, 3.0):
            assert_same(run(scale, X), scale * jacfwd_of_square(X))

    def test_constants_that_are_mapped_over(self, mode):
        of = lambda scale: jacobian(lambda x: scale * square(x), X, batch_size=2, mode=mode)[0]
        scales = jnp.array([1.0, 2.0])
        assert_same(jax.vmap(of)(scales), scales[:, None, None, None] * jacfwd_of_square(X)[None])


class TestAux:
    @pytest.mark.parametrize("mode", ["forward", "reverse"])
    @pytest.mark.parametrize(
        "way",
        [{"nbatches": 3, "checkpoint": True}, {"jit": False}, {"memory_budget": "1MB"}],
        ids=str,
    )
    def test_aux_is_the_second_output_of_f(self, mode, way):
        f = lambda x: (square(x), {"sum": jnp.sum(x), "number": jnp.array([3])})
        J, unflatten, aux = jacobian(f, X, **way, mode=mode, has_aux=True)
        assert_same(J, jacfwd_of_square(X))
        assert_same(aux, f(X)[1])
        assert_same(unflatten(X), X)

    @pytest.mark.parametrize("returned", ["array", "list", "triple"])
    def test_without_a_pair_has_aux_is_rejected(self, returned):
        f = {"array": lambda x: x, "list": lambda x: [x, x], "triple": lambda x: (x, x, x)}
        words = r"^curvax\.jacobian: with has_aux=True, f must return a pair \(value, aux\)"
        with pytest.raises(TypeError, match=words):
            jacobian(f[returned], X, has_aux=True)


class TestUnflatten:
    @pytest.mark.parametrize("case", FUNCTIONS, ids=name_of)
    def test_it_restores_the_point(self, case):
        _, unflatten = jacobian(lambda x: jnp.ones(()), case.x)
        _, flat = flattened(case.f, case.x)
        assert_same(unflatten(flat), jax.tree.map(jnp.asarray, case.x))

    def test_a_vector_of_another_length_is_rejected(self):
        _, unflatten = jacobian(square, X)
        with pytest.raises(ValueError, match=r"5 coordinates has the shape \(5,\), got \(4,\)"):
            unflatten(X[:4])


@pytest.mark.parametrize("mode", ["forward", "reverse"])
class TestDtypes:
    def test_a_result_has_the_dtype_of_its_output(self, mode):
        x = {"a": normal(1, 2, dtype=jnp.float32), "b": normal(2, 2)}
        f = lambda x: (x["a"] * 2, x["a"].astype(jnp.float64) * x["b"], x["b"].astype(jnp.float16))
        J, _ = jacobian(f, x, mode=mode)
        assert [array.dtype for array in J] == [jnp.float32, jnp.float64, jnp.float16]

    def test_double_precision_is_kept_next_to_single(self, mode):
        x = {"a": jnp.ones(2, jnp.float32), "b": jnp.array([1.0])}
        J, _ = jacobian(lambda x: jnp.sin(x["b"]), x, mode=mode)
        np.testing.assert_allclose(J[0], [0, 0, np.cos(1.0)], rtol=1e-15)

    def test_leaves_of_half_precision(self, mode):
        x = jnp.array([1.0, 2.0], jnp.bfloat16)
        J, _ = jacobian(lambda x: x * x, x, mode=mode)
        assert_same(J, jnp.array([[2.0, 0.0], [0.0, 4.0]], jnp.bfloat16))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("way", [{"batch_size": 2}, {"memory_budget": "1MB"}], ids=str)
class TestNothing:
    def test_no_parameters(self, mode, way):
        J, _ = jacobian(lambda x: jnp.ones((2, 3)), jnp.zeros((0, 4)), mode=mode, **way)
        assert_same(J, jnp.zeros((2, 3, 0)))

    def test_no_outputs(self, mode, way):
        f = lambda x: {"none": x[:0], "empty": jnp.outer(x[:0], x)}
        J, _ = jacobian(f, X, mode=mode, **way)
        assert_same(J, {"none": jnp.zeros((0, 5)), "empty": jnp.zeros((0, 5, 5))})

    def test_no_leaves(self, mode, way):
        assert jacobian(lambda x: (), X, mode=mode, **way)[0] == ()
        assert_same(jacobian(lambda x: jnp.ones(2), {}, mode=mode, **way)[0], jnp.zeros((2, 0)))


class TestTime:
    @pytest.mark.parametrize("mode", ["forward", "reverse"])
    def test_the_fastest_size_gives_the_same(self, mode):
        J, _ = jacobian(square, X, memory_budget="1MB", objective="time", mode=mode)
        assert_same(J, jacfwd_of_square(X))

    def test_it_needs_a_budget(self):
        with pytest.raises(ValueError, match=r"^curvax\.jacobian: objective='time' .*budget"):
            jacobian(square, X, objective="time")


class TestProgress:
    """The last line of the bar has all blocks, and so has that of the next call."""

    @staticmethod
    def shown(capsys):
        jax.effects_barrier()
        return re.findall(r"(\d+)/(\d+) ", capsys.readouterr().err)

    @pytest.mark.parametrize(
        ("way", "blocks"),
        [
            ({}, 1),
            ({"nbatches": 5}, 5),
            ({"batch_size": 2}, 3),
            ({"batch_size": 2, "jit": False}, 3),
            ({"memory_budget": "1MB"}, 1),
        ],
        ids=str,
    )
    def test_the_bar_counts_blocks(self, way, blocks, capsys):
        f = lambda x: jnp.sin(x) * x[0]
        for _ in range(2):
            J, _ = jacobian(f, X, **way, mode="forward", progress=True)
            assert_same(J, jax.jit(jax.jacfwd(f))(X))
            shown = self.shown(capsys)
            assert shown[-1] == (str(blocks), str(blocks))
            assert {total for _, total in shown} == {str(blocks)}

    def test_rows_of_all_outputs_count(self, capsys):
        f = lambda x: {"a": x[:3], "b": jnp.sum(x)}
        jacobian(f, X, batch_size=2, mode="reverse", progress=True)
        assert self.shown(capsys)[-1] == ("3", "3")

    def test_under_jit(self, capsys):
        run = jax.jit(lambda x: jacobian(square, x, 5, mode="forward", progress=True)[0])
        for _ in range(2):
            run(X)
            assert self.shown(capsys)[-1] == ("5", "5")

    def test_there_is_none_unless_asked_for(self, capsys):
        jacobian(square, X, 5, mode="forward")
        assert self.shown(capsys) == []


def refuses(error, words):
    return pytest.raises(error, match=rf"^curvax\.jacobian: .*{words}")


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    @pytest.mark.parametrize("mode", ["auto", "forward"])
    def test_more_batches_than_parameters(self, mode):
        with refuses(ValueError, "nbatches=6 is more than there are parameters .* 5"):
            jacobian(lambda x: x[:2], X, 6, mode=mode)

    def test_more_batches_than_rows(self):
        with refuses(ValueError, "nbatches=4 is more than there are rows .* 3"):
            jacobian(lambda x: x[:3], X, 4, mode="reverse")

    def test_two_sizes(self):
        with refuses(ValueError, "nbatches=2 and batch_size=3"):
            jacobian(square, X, 2, batch_size=3)

    @pytest.mark.parametrize("size", [{"nbatches": 2}, {"batch_size": 2}], ids=str)
    def test_a_size_and_a_budget(self, size):
        [(name, value)] = size.items()
        with refuses(ValueError, f"{name}={value} and memory_budget='1MB'"):
            jacobian(square, X, **size, memory_budget="1MB")

    def test_a_budget_without_jit(self):
        with refuses(ValueError, "jit=False"):
            jacobian(square, X, jit=False, memory_budget="1MB")

    @pytest.mark.parametrize("name", ["nbatches", "batch_size"])
    def test_sizes_that_are_none(self, name):
        with refuses(ValueError, f"{name} must be at least 1, got 0"):
            jacobian(square, X, **{name: 0})
        with refuses(TypeError, f"{name} must be a Python integer, got float 2.5"):
            jacobian(square, X, **{name: 2.5})
        with refuses(TypeError, "nbatches must be a Python integer, got None"):
            jacobian(square, X, None)

    def test_another_mode(self):
        with refuses(ValueError, r"mode must be one of \('auto', .* got 'backward'"):
            jacobian(square, X, mode="backward")

    def test_another_objective(self):
        with refuses(ValueError, "objective must be one of .* got 'speed'"):
            jacobian(square, X, memory_budget="1MB", objective="speed")

    @pytest.mark.parametrize(
        ("leaf", "kind"),
        [(jnp.arange(3), "int64"), (3, "int64"), (1j, "complex128"), ("a", "str")],
        ids=str,
    )
    def test_leaves_that_are_not_real_have_no_derivatives(self, leaf, kind):
        with refuses(TypeError, rf"x\['w'\] is of type {kind}, .* Convert it"):
            jacobian(lambda x: x["w"], {"v": X, "w": leaf})

    @pytest.mark.parametrize("mode", ["forward", "reverse"])
    def test_integer_outputs(self, mode):
        with refuses(TypeError, r"f\(x\)\['n'\] is of type int64, .* has_aux=True"):
            jacobian(lambda x: {"n": jnp.argmax(x)}, X, mode=mode)

    def test_complex_outputs_by_rows(self):
        with refuses(TypeError, "f returns complex128, .* mode='forward'"):
            jacobian(lambda x: jnp.exp(1j * x.astype(jnp.complex128)), X, mode="reverse")

    def test_nothing_fits(self):
        with pytest.raises(curvax.MemoryBudgetError, match="checkpoint=True, or streaming") as info:
            jacobian(square, X, memory_budget=100)
        assert_same(
            jacobian(square, X, memory_budget=info.value.smallest_budget)[0], jacfwd_of_square(X)
        )
