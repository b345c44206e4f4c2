"""`gauss_newton` equals the product of dense matrices, for every kind of weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import curvax
from curvax import gauss_newton
from derivatives.functions import MIXED, NETWORK, mixed, naive_jacobian, network, normal
from helpers import assert_same

pytestmark = pytest.mark.optimised

X = normal(0, 4)
VECTOR, MATRIX = normal(1, 6), normal(2, 6, 6)


def residuals(x):
    """Six, in a matrix."""
    return jnp.outer(jnp.sin(x[:2]), x[1:]) * x[0]


def dense(f, x, W=None):
    flat = lambda x: jnp.concatenate([r.ravel() for r in jax.tree.leaves(f(x))])
    J = np.asarray(naive_jacobian(flat, x))
    return J.T @ (J if W is None else np.asarray(W) @ J)


WEIGHTS = {
    "none": (None, jnp.eye(6)),
    "vector": (VECTOR, jnp.diag(VECTOR)),
    "shape of the residuals": (VECTOR.reshape(2, 3), jnp.diag(VECTOR)),
    "integers": (jnp.arange(6), jnp.diag(jnp.arange(6.0))),
    "matrix, not symmetric": (MATRIX, MATRIX),
    "function": (lambda r: (MATRIX @ r.ravel()).reshape(2, 3), MATRIX),
}
each_weight = pytest.mark.parametrize(("weight", "W"), WEIGHTS.values(), ids=WEIGHTS)


@each_weight
def test_any_weight(weight, W):
    assert_same(gauss_newton(residuals, X, weight, 3)[0], dense(residuals, X, W))


@pytest.mark.parametrize(
    "way",
    [
        {"memory_budget": "1MB"},
        {"memory_budget": "1MB", "objective": "time"},
        {"checkpoint": True, "nbatches": 4},
        {"jit": False},
    ],
    ids=str,
)
def test_any_option(way):
    G, unflatten = gauss_newton(residuals, X, MATRIX, **way)
    assert_same(G, dense(residuals, X, MATRIX))
    assert_same(unflatten(X), X)


@settings(max_examples=5)
@given(n=st.integers(1, 6), m=st.integers(1, 6), size=st.integers(1, 7))
def test_any_sizes(n, m, size):
    mix, W = normal(3, m, n), normal(4, m, m)
    f = lambda x: jnp.sin(mix @ x)
    x = normal(5, n)
    assert_same(gauss_newton(f, x, W, batch_size=size)[0], dense(f, x, W))


def test_a_network():
    assert_same(gauss_newton(network, NETWORK, batch_size=5)[0], dense(network, NETWORK))


@pytest.mark.parametrize("kind", ["none", "vector", "matrix", "function"])
def test_residuals_in_a_pytree_of_several_dtypes(kind):
    """The order is that of the leaves: two and one in double precision, then four in single."""
    W = normal(6, 7, 7) if kind == "matrix" else jnp.diag(jnp.arange(1.0, 8.0))
    weight = {
        "none": None,
        "vector": jnp.arange(1.0, 8.0),
        "matrix": W,
        "function": lambda tree: jax.tree.map(lambda r: 2 * r, tree),
    }[kind]
    W = {"none": jnp.eye(7), "function": 2 * jnp.eye(7)}.get(kind, W)
    G, _ = gauss_newton(mixed, MIXED, weight, batch_size=3)
    wide = lambda p: jax.tree.map(lambda r: r.astype(jnp.float64), mixed(p))
    assert_same(G, dense(wide, MIXED, W), 1e-5, 1e-5)


def test_under_jit_and_vmap():
    xs, weights = normal(7, 3, 4), normal(8, 3, 6)
    run = jax.jit(jax.vmap(lambda x, w: gauss_newton(residuals, x, w, batch_size=3)[0]))
    expected = [dense(residuals, x, jnp.diag(w)) for x, w in zip(xs, weights, strict=True)]
    assert_same(run(xs, weights), np.stack(expected))


def test_another_weight_of_the_same_shape_is_not_mistaken_for_the_first():
    for weight in (VECTOR, 2 * VECTOR):
        assert_same(gauss_newton(residuals, X, weight)[0], dense(residuals, X, jnp.diag(weight)))
    for factor in (2.0, 3.0):
        G, _ = gauss_newton(residuals, X, lambda r, factor=factor: factor * r)
        assert_same(G, factor * dense(residuals, X))


def test_nothing_to_do():
    assert_same(gauss_newton(lambda x: x[:0], X)[0], jnp.zeros((4, 4)))
    assert_same(gauss_newton(lambda x: jnp.ones(2), jnp.zeros(0))[0], jnp.zeros((0, 0)))


def test_the_jacobian_is_never_held():
    """Ten times as many residuals as parameters; what is needed is a block of columns."""
    n, m, size = 256, 2560, 8
    index = np.arange(m) % n
    f = lambda x: jnp.sin(x[index]) * jnp.sum(x)
    x = jax.ShapeDtypeStruct((n,), jnp.float64)
    need = curvax.memory_usage(lambda x: gauss_newton(f, x, batch_size=size)[0], x).added_bytes
    assert need < 0.5 * 8 * n * m
    assert need < 8 * n * n + 4 * 8 * m * size


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    @staticmethod
    def refuses(error, words):
        return pytest.raises(error, match=rf"^curvax\.gauss_newton: .*{words}")

    @pytest.mark.parametrize("shape", [(), (5,), (7,), (5, 5), (6, 5), (3, 2), (6, 1)], ids=str)
    def test_a_weight_of_another_shape(self, shape):
        words = (
            r"6 residuals is a vector \(6,\), a matrix \(6, 6\) or a function, or has the shape of "
            r"a single residual array; got .* "
        )
        with self.refuses(ValueError, words + str(shape).replace("(", r"\(").replace(")", r"\)")):
            gauss_newton(residuals, X, jnp.ones(shape))

    def test_a_complex_weight(self):
        with self.refuses(TypeError, "weight .* complex128"):
            gauss_newton(residuals, X, VECTOR.astype(complex))

    @pytest.mark.parametrize(
        "weight",
        [lambda r: r[:1], lambda r: (r, r), lambda r: r.astype(jnp.float32)],
        ids=["shape", "structure", "dtype"],
    )
    def test_a_function_that_returns_something_else_than_residuals(self, weight):
        with self.refuses(TypeError, "weight must return what it is given"):
            gauss_newton(residuals, X, weight)

    def test_residuals_that_are_not_real(self):
        with self.refuses(TypeError, r"f\(x\)\[1\] is of type complex128"):
            gauss_newton(lambda x: (x, x.astype(complex)), X)
        with self.refuses(TypeError, r"f\(x\) is of type int64"):
            gauss_newton(jnp.argmax, X)

    def test_points_that_are_not_real(self):
        with self.refuses(TypeError, "x is of type int64"):
            gauss_newton(lambda x: x, jnp.arange(3))

    def test_sizes(self):
        with self.refuses(ValueError, "nbatches=5 is more than there are parameters .* 4"):
            gauss_newton(residuals, X, None, 5)
        with self.refuses(ValueError, "nbatches=2 and batch_size=3"):
            gauss_newton(residuals, X, None, 2, batch_size=3)
        with self.refuses(ValueError, "jit=False"):
            gauss_newton(residuals, X, jit=False, memory_budget="1MB")
