"""Powers, inverses and eigenvalues of blocks are those of the dense matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import curvax
from curvature.blocks.states import BLOCKS, DAMPING, filled, power_of
from curvature.cases import KEY, case, like
from helpers import assert_same

POWERS = [-1, -0.5, 2.3]
BY_NAME = {each.name: each for each in BLOCKS}


def close(actual, expected) -> None:
    assert_same(jnp.asarray(actual), jnp.asarray(expected), 1e-8, 1e-9)


@functools.cache
def measured(name: str):
    """All products with one vector, the matrix, its eigenvalues, and all of that from the cache."""
    blocks = BY_NAME[name]
    estimator = blocks.estimator()
    state = blocks.state(estimator, POWERS, POWERS, True)
    vector = like(case(blocks.model, "squared").model.params, 3)

    def compute(state):
        cached = estimator.update_cache(state, DAMPING, POWERS, POWERS, True, None)
        multiply = lambda power, exact, use_cached: ravel_pytree(
            estimator.multiply_matpower(cached, vector, DAMPING, power, exact, use_cached, None)
        )[0]
        products = {
            (power, exact, use_cached): multiply(power, exact, use_cached)
            for power in POWERS
            for exact in (True, False)
            for use_cached in (True, False)
            if exact or not use_cached or power == -1
        }
        values = [estimator.eigenvalues(cached, use_cached) for use_cached in (True, False)]
        return cached, products, values, estimator.to_dense_matrix(cached)

    cached, *found = jax.jit(compute)(state)
    assert jax.tree.structure(cached) == jax.tree.structure(state)
    return ravel_pytree(vector)[0], found


SLOW = ("parts", "table", "wide")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in BY_NAME]
)
class TestPowers:
    @pytest.mark.parametrize("power", POWERS)
    def test_exact_powers(self, name, power):
        vector, (products, _, matrix) = measured(name)
        damped = matrix + DAMPING * jnp.eye(len(matrix))
        for use_cached in (True, False):
            close(products[power, True, use_cached], power_of(damped, power) @ vector)

    def test_cached_is_as_computed(self, name):
        _, (products, _, _) = measured(name)
        close(products[-1, False, True], products[-1, False, False])

    def test_eigenvalues(self, name):
        _, (_, values, matrix) = measured(name)
        expected = np.linalg.eigvalsh(matrix)
        assert np.linalg.norm(expected) > 0.1
        for each in values:
            close(jnp.sort(each), expected)

    def test_matrices_are_symmetric(self, name):
        _, (_, _, matrix) = measured(name)
        close(matrix, matrix.T)


@pytest.mark.parametrize("name", ["full", "diagonal", "identity", "eigenvalue-corrected"])
def test_approximate_powers_that_are_exact(name):
    _, (products, _, _) = measured(name)
    for power in POWERS:
        close(products[power, False, False], products[power, True, False])


def test_approximate_powers_of_factors_by_the_book():
    """The damping is split between both, by the ratio of their mean eigenvalues."""
    blocks = BY_NAME["Kronecker"]
    state = blocks.state(blocks.estimator(), None, None)
    _, (products, _, _) = measured("Kronecker")
    tree = like(case("mlp", "squared").model.params, 3)
    for power in POWERS:
        expected = {}
        for own, (bias, weight) in zip(state.blocks_states, ("cv", "bw"), strict=True):
            inputs, outputs = (np.asarray(x.value) for x in (own.inputs_factor, own.outputs_factor))
            pi = np.sqrt(np.mean(np.diag(inputs)) / np.mean(np.diag(outputs)))
            left = power_of(inputs + pi * DAMPING**0.5 * np.eye(len(inputs)), power)
            right = power_of(outputs + DAMPING**0.5 / pi * np.eye(len(outputs)), power)
            x = np.concatenate([tree[weight], tree[bias][None]])
            product = left @ x @ right
            expected[weight], expected[bias] = product[:-1], product[-1]
        close(products[power, False, False], ravel_pytree(expected)[0])


class TestCache:
    blocks = BY_NAME["full"]

    @pytest.mark.parametrize(
        ("threshold", "keys"), [(2, {"eigenvectors", "eigenvalues"}), (3, {"-1", "-0.5", "2"})]
    )
    def test_many_powers_are_cached_as_eigenvectors(self, threshold, keys):
        with curvax.set_default_eigen_decomposition_threshold(threshold):
            estimator = self.blocks.estimator()
        init = lambda: estimator.init(
            KEY, case(self.blocks.model, "squared").args, (-0.5, -1, 2), -1
        )
        assert set(jax.eval_shape(init).blocks_states[0].cache) == keys

    @pytest.mark.parametrize(
        "name",
        [
            "Kronecker",
            pytest.param("full", marks=pytest.mark.slow),
            pytest.param("diagonal", marks=pytest.mark.slow),
        ],
    )
    def test_it_is_of_when_it_was_updated(self, name):
        blocks = BY_NAME[name]
        estimator = blocks.estimator()
        state = blocks.state(estimator, -0.5, -1, True)
        vector = like(case(blocks.model, "squared").model.params, 3)

        def products(state, use_cached):
            multiply = lambda power, exact: estimator.multiply_matpower(
                state, vector, DAMPING, power, exact, use_cached, None
            )
            return (
                multiply(-1, False),
                multiply(-0.5, True),
                estimator.eigenvalues(state, use_cached),
            )

        def compute(state, later):
            state = estimator.update_cache(state, DAMPING, -0.5, -1, True, None)
            kept = lambda path, new, old: old if "cache" in jax.tree_util.keystr(path) else new
            later = jax.tree_util.tree_map_with_path(kept, later, state)
            return products(state, False), products(later, True)

        later = filled(state, np.random.default_rng(5))
        now, cached = jax.jit(compute)(state, later)
        assert_same(cached, now, 1e-8, 1e-9)

    @pytest.mark.parametrize("name", list(BY_NAME))
    def test_what_is_not_cached_is_an_error(self, name):
        blocks = BY_NAME[name]
        estimator = blocks.estimator()
        state = jax.eval_shape(
            lambda: estimator.init(KEY, case(blocks.model, "squared").args, None, None)
        )
        vector = case(blocks.model, "squared").model.params
        multiply = lambda state: estimator.multiply_inverse(state, vector, 0.1, False, True, None)
        if name in ("identity", "eigenvalue-corrected"):  # They need no powers.
            jax.eval_shape(multiply, state)
            return
        for wrong in (multiply, lambda state: estimator.eigenvalues(state, True)):
            with pytest.raises(
                ValueError, match=r"is not in the cache.* Call update_cache with it"
            ):
                jax.eval_shape(wrong, state)


@functools.cache
def inverses(name: str):
    """A function of a state: inverses with damping and without, and the matrix."""
    blocks = BY_NAME[name]
    estimator = blocks.estimator()
    vector = like(case(blocks.model, "squared").model.params, 3)

    def compute(state):
        cached = estimator.update_cache(state, DAMPING, -1, -1, False, None)
        inverse = lambda weight, exact, use_cached: ravel_pytree(
            estimator.multiply_inverse(cached, vector, weight, exact, use_cached, None)
        )[0]
        damped = [inverse(DAMPING, *each) for each in ((True, True), (True, False), (False, True))]
        without = [inverse(0.0, exact, False) for exact in (True, False)]
        return damped, without, estimator.to_dense_matrix(cached)

    return blocks.state(estimator, -1, -1), ravel_pytree(vector)[0], jax.jit(compute)


@pytest.mark.parametrize(
    "name",
    [
        "Kronecker",
        "full",
        pytest.param("diagonal", marks=pytest.mark.slow),
        pytest.param("eigenvalue-corrected", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_inverses_of_singular_factors_are_finite(name, rank):
    state, vector, compute = inverses(name)
    if rank:
        state = filled(state, np.random.default_rng(1), rank)
    else:
        zero = lambda path, x: 0 * x if "raw_value" in jax.tree_util.keystr(path) else x
        state = jax.tree_util.tree_map_with_path(zero, state)
    damped, without, matrix = compute(state)
    for each in (*damped, *without):
        assert jnp.isfinite(each).all()
    expected = np.linalg.solve(np.asarray(matrix) + DAMPING * np.eye(len(matrix)), vector)
    close(damped[0], expected)
    close(damped[1], expected)
