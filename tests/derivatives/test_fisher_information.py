"""`fisher_information` equals the product of all scores, whatever the microbatches."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.flatten_util import ravel_pytree

import curvax
from curvax import fisher_information
from derivatives.functions import normal
from helpers import assert_same

pytestmark = pytest.mark.optimised

X = {"w": normal(0, 3), "b": normal(1)}


def loglike(x, example):
    logit = jnp.dot(x["w"], example["input"]) + x["b"]
    return example["label"] * jax.nn.log_sigmoid(logit) - 0.5 * logit**2


def examples(length):
    return {"input": normal(2, length, 3), "label": jnp.arange(1.0, length + 1)}


def dense(loglike, x, data):
    score = lambda example: ravel_pytree(jax.grad(loglike)(x, example))[0]
    scores = jax.vmap(score)(data)
    return scores.T @ scores


def dense_in_one_program(*args):
    return jax.jit(dense, static_argnums=0)(*args)


@pytest.mark.parametrize(
    "way",
    [
        {"nbatches": 7},
        {"nbatches": 3},
        {"memory_budget": "1MB"},
        {"memory_budget": "1MB", "objective": "time"},
        {"checkpoint": True, "batch_size": 2},
        {"jit": False, "batch_size": 4},
    ],
    ids=str,
)
def test_any_option(way):
    """Also batches that do not divide seven examples."""
    data = examples(7)
    F, unflatten = fisher_information(loglike, X, data, **way)
    assert_same(F, dense_in_one_program(loglike, X, data))
    assert_same(unflatten(ravel_pytree(X)[0]), X)


@settings(max_examples=4)
@given(length=st.integers(1, 9), size=st.integers(1, 10))
def test_any_sizes(length, size):
    data = examples(length)
    assert_same(
        fisher_information(loglike, X, data, batch_size=size)[0],
        dense_in_one_program(loglike, X, data),
    )


def test_no_data_no_information():
    data = jax.tree.map(lambda d: d[:0], examples(3))
    assert_same(fisher_information(loglike, X, data)[0], jnp.zeros((4, 4)))


def test_no_parameters():
    F, _ = fisher_information(lambda x, d: jnp.sum(d) + jnp.sum(x), jnp.zeros(0), jnp.ones((2, 3)))
    assert_same(F, jnp.zeros((0, 0)))


def test_several_dtypes_and_numbers():
    x = {"a": normal(3, 2, dtype=jnp.float32), "b": 0.5}
    f = lambda x, d: jnp.sum(x["a"] * d.astype(jnp.float32)).astype(jnp.float64) * x["b"]
    wide = {"a": x["a"].astype(jnp.float64), "b": jnp.array(0.5)}
    data = normal(4, 5, 2)
    F, _ = fisher_information(f, x, data, batch_size=2)
    exact = dense_in_one_program(lambda x, d: jnp.sum(x["a"] * d) * x["b"], wide, data)
    assert_same(F, exact, 1e-5, 1e-5)


def test_under_jit_vmap_and_grad():
    data = examples(5)
    run = lambda x: fisher_information(loglike, x, data, batch_size=2)[0]
    xs = jax.tree.map(lambda a, b: jnp.stack([a, b]), X, jax.tree.map(jnp.cos, X))
    naive = lambda x: dense(loglike, x, data)
    assert_same(jax.jit(jax.vmap(run))(xs), jax.jit(jax.vmap(naive))(xs))
    gradient = lambda of: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(of(x)))))(X)
    assert_same(gradient(run), gradient(naive))


def test_data_may_be_traced():
    data = examples(5)
    run = jax.jit(lambda data: fisher_information(loglike, X, data, batch_size=2)[0])
    assert_same(run(data), dense_in_one_program(loglike, X, data))


def test_only_some_scores_exist_at_a_time():
    n, length = 64, 4096
    f = lambda x, d: jnp.sum(jnp.sin(x * d)) ** 2
    args = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape in ((n,), (length, n))]
    run = lambda x, data: fisher_information(f, x, data, batch_size=64)[0]
    assert curvax.memory_usage(run, *args).added_bytes < 0.2 * 8 * n * length


class TestErrors:
    @staticmethod
    def refuses(error, words):
        return pytest.raises(error, match=rf"^curvax\.fisher_information: .*{words}")

    def test_data_of_several_lengths(self):
        data = {"input": jnp.ones((4, 3)), "label": jnp.ones(5)}
        with self.refuses(ValueError, r"data\['input'\] has 4, data\['label'\] has 5"):
            fisher_information(loglike, X, data)

    def test_data_without_an_axis(self):
        with self.refuses(ValueError, r"data\['label'\] has no axis"):
            fisher_information(loglike, X, {"input": jnp.ones((4, 3)), "label": jnp.ones(())})

    def test_no_arrays(self):
        with self.refuses(ValueError, "there are none"):
            fisher_information(loglike, X, {})

    def test_more_batches_than_examples(self):
        with self.refuses(ValueError, "nbatches=8 is more than there are examples .* 7"):
            fisher_information(loglike, X, examples(7), 8)

    def test_two_sizes(self):
        with self.refuses(ValueError, "nbatches=2 and batch_size=3"):
            fisher_information(loglike, X, examples(7), 2, batch_size=3)
        with self.refuses(ValueError, "batch_size=3 and memory_budget='1MB'"):
            fisher_information(loglike, X, examples(7), batch_size=3, memory_budget="1MB")
        with self.refuses(ValueError, "jit=False"):
            fisher_information(loglike, X, examples(7), jit=False, memory_budget="1MB")

    def test_points_that_are_not_real(self):
        with self.refuses(TypeError, r"x\['w'\] is of type int64"):
            fisher_information(loglike, {"w": jnp.arange(3), "b": 1.0}, examples(7))

    @pytest.mark.parametrize(
        "f",
        [lambda x, d: x["w"], lambda x, d: 1j * x["b"].astype(complex)],
        ids=["vector", "complex"],
    )
    def test_a_log_likelihood_that_is_no_real_scalar(self, f):
        with self.refuses(TypeError, "loglike must return a real floating-point scalar"):
            fisher_information(f, X, examples(7))
