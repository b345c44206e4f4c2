"""Random modes are right on average, with an error that falls as one over the root of samples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import curvax
from curvature.cases import (
    FULL,
    KEY,
    Case,
    N,
    case,
    dense_curvature,
    estimated_matrix,
    flat,
)
from helpers import assert_same

FEW, GROUPS = 64, 64


def averages(case: Case, mode: str, *args):
    """Matrices after few updates of equal weight, of groups of these, and the exact one."""
    estimator = curvax.BlockDiagonalCurvature(case.func, layer_tag_to_block_ctor=FULL)
    state = estimator.init(KEY, args, None, None)
    update = lambda state, key: (
        estimator.update_curvature_matrix_estimate(state, 1.0, 1.0, N, key, args, None, mode),
        None,
    )
    matrix = lambda keys: estimator.to_dense_matrix(lax.scan(update, state, keys)[0])
    groups = lax.map(matrix, jax.random.split(KEY, (GROUPS, FEW)))
    return groups, dense_curvature(case, *args)


def error_falls(given: Case, groups, exact) -> None:
    groups, exact = np.asarray(groups), np.where(given.same_block(), exact, 0)
    distance = lambda x: np.sum((x - exact) ** 2, (-2, -1)) ** 0.5 / np.linalg.norm(exact)
    few, many = np.mean(distance(groups) ** 2) ** 0.5, distance(np.mean(groups, 0))
    assert many < 0.08, (few, many)
    # It should fall by a factor of eight.
    assert 4 < few / many < 32, (few, many)


@pytest.mark.parametrize(
    ("model", "loss", "mode"),
    [
        ("mlp", "several", "fisher_gradients"),
        ("positions", "both", "fisher_gradients"),
        ("mlp", "softmax", "fisher_curvature_prop"),
        pytest.param("mlp", "own", "ggn_curvature_prop", marks=pytest.mark.slow),
        pytest.param("mlp", "bernoulli", "fisher_gradients", marks=pytest.mark.slow),
        pytest.param("heads", "variance", "fisher_gradients", marks=pytest.mark.slow),
        pytest.param("stack", "several", "fisher_curvature_prop", marks=pytest.mark.slow),
        pytest.param("recurrent", "both", "ggn_curvature_prop", marks=pytest.mark.slow),
        pytest.param("exponential", "squared", "fisher_gradients", marks=pytest.mark.slow),
    ],
)
def test_averages_of_random_modes(model, loss, mode):
    given = case(model, loss)
    found = jax.jit(lambda *args: averages(given, mode, *args))(*given.args)
    error_falls(given, *found)


def test_exact_modes_are_right_on_average_where_only_sums_over_examples_are_known():
    """Random signs see to that."""
    given = case("exponential", "variance")
    found = jax.jit(lambda *args: averages(given, "ggn_exact", *args))(*given.args)
    error_falls(given, *found)


class TestNaive:
    """Blocks of which nothing is known are `g gᵀ / N` of one sum of gradients."""

    @pytest.mark.parametrize("mode", ["fisher_empirical", "fisher_gradients"])
    def test_it_is_that_of_some_draw(self, mode):
        given = case("exponential", "softmax")

        def naive(params, batch):
            """For all signs or targets that can be sampled, the gradient of the whole batch."""
            choices = jnp.array(list(itertools.product((0, 1), repeat=N)))
            targets = lambda choice: choice if mode == "fisher_gradients" else batch["targets"][0]
            signs = lambda choice: 1 - 2 * choice if mode == "fisher_empirical" else choice**0

            def gradient(choice):
                given_batch = {**batch, "targets": [targets(choice)]}
                weights = signs(choice).astype(float)
                total = lambda params: (
                    N * given.mean_loss(params, {**given_batch, "weights": [weights]})
                )
                return flat(jax.grad(total)(params)["a"])

            gradients = jax.vmap(gradient)(choices)
            return jnp.einsum("kp,kq->kpq", gradients, gradients) / N

        compute = lambda *args: (
            estimated_matrix(
                curvax.BlockDiagonalCurvature(given.func, layer_tag_to_block_ctor=FULL), args, mode
            ),
            naive(*args),
        )
        ours, candidates = jax.jit(compute)(*given.args)
        size = given.model.params["a"].size
        distances = np.linalg.norm(candidates - ours[None, :size, :size], axis=(1, 2))
        assert distances.min() < 1e-12 < np.sort(distances)[4]

    def test_the_diagonal_is_that_of_the_full_matrix(self):
        given = case("exponential", "several")
        ctors = {"generic": curvax.NaiveDiagonal, "dense": curvax.NaiveDiagonal}
        full = dict.fromkeys(ctors, curvax.NaiveFull)
        compute = lambda *args: [
            estimated_matrix(
                curvax.BlockDiagonalCurvature(given.func, layer_tag_to_block_ctor=each),
                args,
                "fisher_gradients",
            )
            for each in (ctors, full)
        ]
        diagonal, full = jax.jit(compute)(*given.args)
        assert_same(diagonal, jnp.diag(jnp.diag(full)))
