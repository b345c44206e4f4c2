"""Functions that can be differentiated in one mode only: it is found, or said what to do.

A `while_loop` has no reverse mode, a `jax.custom_vjp` function no forward mode. The oracle is JAX
in the mode that the function has.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import curvax
from helpers import assert_same


def by_while(x):
    """No derivative in reverse mode."""
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c * 1.5 + 1, jnp.abs(x))


@jax.custom_vjp
def by_rule(x):
    """No derivative in forward mode."""
    return jnp.sin(x)


by_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (c * jnp.cos(x),))

FORWARD, REVERSE = (by_while, jax.jacfwd), (by_rule, jax.jacrev)
SHAPES = {
    "as many": lambda y: y,
    "one": jnp.sum,
    "more": lambda y: jnp.concatenate([y, y**2, y**3]),
    "matrix": lambda y: jnp.outer(y, y),
}
OPTIONS = {
    "plain": {},
    "blocks": {"batch_size": 2},
    "budget": {"memory_budget": "1MB"},
    "checkpoint": {"checkpoint": True},
    "no jit": {"jit": False},
}
X = jnp.linspace(-1.0, 1.0, 5)


@given(
    st.sampled_from([FORWARD, REVERSE]),
    st.sampled_from(list(SHAPES)),
    st.sampled_from(list(OPTIONS)),
    st.booleans(),
)
@example(FORWARD, "one", "plain", False)
@example(REVERSE, "as many", "plain", False)
@example(FORWARD, "one", "budget", True)
@example(FORWARD, "one", "no jit", False)
def test_auto_takes_the_mode_that_there_is(function, shape, options, under_jit):
    only, derivative = function
    f = lambda x: SHAPES[shape](only(x))
    compute = lambda x: curvax.jacobian(f, x, **OPTIONS[options])[0]
    if under_jit and options != "no jit":
        compute = jax.jit(compute)
    assert_same(compute(X), derivative(f)(X), 1e-12, 1e-12)


@pytest.mark.parametrize(("only", "derivative"), [FORWARD, REVERSE], ids=["forward", "reverse"])
def test_auto_takes_the_mode_that_there_is_with_aux_on_disk_and_on_a_mesh(
    only, derivative, tmp_path
):
    f = lambda x: (jnp.sum(only(x), keepdims=True), jnp.sum(x))
    expected = derivative(lambda x: f(x)[0])(X)
    J, _, aux = curvax.jacobian(f, X, has_aux=True, out=tmp_path / "J.zarr")
    assert_same((np.asarray(J), aux), (expected, jnp.sum(X)), 1e-12, 1e-12)
    mesh = jax.make_mesh((1,), ("devices",))
    on_mesh, _, aux = curvax.jacobian(f, X, has_aux=True, mesh=mesh)
    assert_same((np.asarray(on_mesh), aux), (expected, jnp.sum(X)), 1e-12, 1e-12)


def test_auto_chooses_again_when_the_function_changes():
    held = [jnp.sin]
    f = lambda x: jnp.sum(held[0](x))
    for only, derivative in [(jnp.sin, jax.jacrev), FORWARD, REVERSE, FORWARD]:
        held[0] = only
        assert_same(curvax.jacobian(f, X)[0], derivative(lambda x: f(x))(X), 1e-12, 1e-12)


def test_the_mode_is_tried_once_for_a_function():
    """Where all that counts is in its jaxpr."""
    traced = []

    @jax.jit  # Its derivative is traced, its body only once.
    def inner(x):
        traced.append(1)
        return jnp.sin(x)

    f = lambda x: jnp.sum(by_while(inner(x)))
    curvax.jacobian(f, X)
    before = len(traced)
    curvax.jacobian(f, X)
    assert len(traced) == before == 1


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1MB"}, {"jit": False}], ids=str)
@pytest.mark.parametrize(
    ("only", "asked", "works"), [(by_while, "reverse", "forward"), (by_rule, "forward", "reverse")]
)
def test_a_mode_that_there_is_not_is_an_error_that_names_the_other(only, asked, works, options):
    f = lambda x: jnp.sum(only(x))
    said = f"no derivative in {asked} mode.* use mode='{works}', or mode='auto'.* JAX says: "
    with pytest.raises(ValueError, match=f"^curvax.jacobian: .*{said}") as raised:
        curvax.jacobian(f, X, mode=asked, **options)
    assert raised.value.__cause__ is not None
    expected = (jax.jacfwd if works == "forward" else jax.jacrev)(f)(X)
    for mode in (works, "auto"):
        assert_same(curvax.jacobian(f, X, mode=mode, **options)[0], expected, 1e-12, 1e-12)


def test_rows_that_cannot_be_written_to_disk_are_an_error(tmp_path):
    f = lambda x: jnp.sum(by_rule(x))
    with pytest.raises(ValueError, match=r"one array with one axis\. Let it return such an array"):
        curvax.jacobian(f, X, out=tmp_path / "J.zarr")
    vector = lambda x: f(x)[None]
    J, _ = curvax.jacobian(vector, X, out=tmp_path / "rows.zarr")
    assert_same(np.asarray(J), jax.jacrev(vector)(X), 1e-12, 1e-12)
    assert_same(curvax.jacobian(f, X)[0], jax.jacrev(f)(X), 1e-12, 1e-12)


@pytest.mark.parametrize("asked", ["forward", "reverse", "auto"])
def test_advice_for_a_matrix_of_outputs_on_disk_works(asked, tmp_path):
    f = lambda x: jnp.outer(by_rule(x), jnp.arange(1.0, 4.0))
    with pytest.raises(ValueError, match=r"such an array, or do not pass out\.") as raised:
        curvax.jacobian(f, X, mode=asked, out=tmp_path / "J.zarr")
    said = str(raised.value)
    assert "mode='forward'" not in said
    assert ("use mode='reverse' or 'auto'" in said) == (asked == "forward")
    expected = jax.jacrev(f)(X)
    for mode in {"forward": ("reverse", "auto")}.get(asked, (asked,)):
        assert_same(curvax.jacobian(f, X, mode=mode)[0], expected, 1e-12, 1e-12)
        vector = lambda x: f(x).reshape(-1)
        rows, _ = curvax.jacobian(vector, X, mode=mode, out=tmp_path / f"{mode}.zarr")
        assert_same(np.asarray(rows).reshape(expected.shape), expected, 1e-12, 1e-12)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("compute", ["hessian", "hessian_diagonal", "hessian_blocks"])
def test_second_derivatives_without_a_gradient_are_an_error_that_says_what_works(compute, jit):
    f = lambda x: jnp.sum(by_while(x) ** 3)
    with pytest.raises(ValueError, match=f"^curvax.{compute}: .*forward mode alone: .*JAX says: "):
        getattr(curvax, compute)(f, X, jit=jit)
    H = curvax.jacobian(lambda x: curvax.jacobian(f, x, mode="forward")[0], X, mode="forward")[0]
    assert_same(H, jax.jacfwd(jax.jacfwd(f))(X), 1e-12, 1e-12)


@pytest.mark.parametrize(("only", "derivative"), [FORWARD, REVERSE], ids=["forward", "reverse"])
def test_gauss_newton_says_how_to_do_without_the_other_mode(only, derivative):
    with pytest.raises(ValueError, match=r"^curvax.gauss_newton: .*J.T @ J .*JAX says: "):
        curvax.gauss_newton(only, X)
    J, _ = curvax.jacobian(only, X)
    assert_same(J.T @ J, derivative(only)(X).T @ derivative(only)(X), 1e-12, 1e-12)


def test_fisher_information_says_how_to_do_without_reverse_mode():
    data = jnp.ones((2, 5))
    loglike = lambda x, example: jnp.sum(by_while(x) * example)
    with pytest.raises(ValueError, match=r"^curvax.fisher_information: .*S.T @ S. JAX says: "):
        curvax.fisher_information(loglike, X, data)
    of_all = lambda x: jax.vmap(loglike, (None, 0))(x, data)
    S, _ = curvax.jacobian(of_all, X, mode="forward")
    assert_same(S, jax.jacfwd(of_all)(X), 1e-12, 1e-12)


class OwnError(Exception):
    pass


@jax.custom_vjp
def with_a_broken_rule(x):
    return jnp.sin(x)


def broken(x, c):
    raise OwnError("my own")


with_a_broken_rule.defvjp(lambda x: (jnp.sin(x), x), broken)
BROKEN = {
    "jacobian": lambda f, mode: curvax.jacobian(f, X, mode=mode),
    "hessian": lambda f, mode: curvax.hessian(f, X),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("mode", ["auto", "reverse"])
def test_errors_of_the_user_are_not_wrapped(name, mode):
    with pytest.raises(OwnError, match=r"^my own"):
        BROKEN[name](lambda x: jnp.sum(with_a_broken_rule(x)), mode)


def test_errors_of_the_function_are_not_wrapped():
    def f(x):
        raise OwnError("my own")

    for compute in (curvax.jacobian, curvax.hessian, curvax.gauss_newton):
        with pytest.raises(OwnError, match=r"^my own"):
            compute(f, X)


def test_other_errors_are_not_taken_for_a_lack_of_derivatives(tmp_path):
    f = lambda x: jnp.sum(x**3)
    with pytest.raises(curvax.MemoryBudgetError):
        curvax.jacobian(f, X, mode="forward", memory_budget=1)
    curvax.jacobian(f, X, mode="forward", out=tmp_path / "J.zarr")
    with pytest.raises(ValueError, match=r"J\.zarr") as raised:
        curvax.jacobian(lambda x: f(x) + x[0], X, mode="forward", out=tmp_path / "J.zarr")
    assert "JAX says" not in str(raised.value)


def test_a_function_without_any_derivative_says_why():
    f = lambda x: jnp.sum(jax.pure_callback(np.sin, x, x))
    for mode in ("auto", "forward", "reverse"):
        with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
            curvax.jacobian(f, X, mode=mode)
