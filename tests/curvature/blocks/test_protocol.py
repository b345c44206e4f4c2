"""What estimators ask of blocks: typed statistics, tasks for caches, states that are replaced."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import curvax
from curvature.blocks.states import BLOCKS, DAMPING, power_of
from curvature.cases import DIAGONAL, FULL, KEY, N, case, dense, estimated, flat, like, normal
from curvax.curvature.linalg.tasks import run_matrix_tasks
from helpers import assert_same

BY_NAME = {each.name: each for each in BLOCKS}


class Counting(curvax.DenseTwoKroneckerFactored):
    """Sums ones in place of moments, so that factors tell how often these are summed."""

    def statistics(self, site, sites, state):
        ones = lambda f: lambda x, g: jnp.ones_like(f(x, g))
        found = super().statistics(site, sites, state)
        return {key: replace(each, compute=ones(each.compute)) for key, each in found.items()}


def test_what_depends_on_inputs_alone_is_summed_in_one_pass():
    """Because it says so, whatever its key is."""
    given = case("mlp", "squared")
    estimator = curvax.BlockDiagonalCurvature(
        given.func, layer_tag_to_block_ctor={"dense": Counting}
    )
    state = jax.jit(lambda *args: estimated(estimator, args, "fisher_exact"))(*given.args)
    for own in state.blocks_states:
        inputs, outputs = own.inputs_factor.value, own.outputs_factor.value
        assert_same(inputs, jnp.ones_like(inputs) / N)
        assert_same(outputs, 2 * jnp.ones_like(outputs) / N)  # A pass for each prediction.


OPTIONS = (DAMPING, [-1, -0.5], [-1], True)


@functools.cache
def made(name):
    """An estimator, a state without a cache, and that with all that an update puts into it."""
    blocks = BY_NAME[name]
    estimator = blocks.estimator()
    bare = blocks.state(estimator, None, None)
    update = jax.jit(lambda state: estimator.update_cache(state, *OPTIONS, None))
    return estimator, bare, update


SLOW = ("parts", "table", "wide", "groups")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in BY_NAME]
)
class TestCache:
    def test_entries_that_were_not_announced_are_made(self, name):
        """They are those of a state that was told of them, bit for bit."""
        estimator, bare, update = made(name)
        told = BY_NAME[name].state(estimator, *OPTIONS[1:])
        assert_same(update(bare), update(told), 0, 0)

    def test_requests_and_results(self, name):
        estimator, bare, update = made(name)

        @jax.jit
        def by_hand(states):
            found = []
            for block, own in zip(estimator.blocks, states, strict=True):
                wanted = block.refresh(*OPTIONS)
                results = run_matrix_tasks(block.cache_requests(own, wanted))
                found.append(block.with_cache(own, results, wanted))
            return tuple(found)

        assert_same(by_hand(bare.blocks_states), update(bare).blocks_states, 1e-12, 1e-12)

    def test_states_are_replaced(self, name):
        """What was passed has the arrays and the structure that it had."""
        estimator, bare, _ = made(name)
        args = case(BY_NAME[name].model, "squared").args

        def compute(state):
            leaves, tree = jax.tree.flatten(state)
            estimator.update_cache(state, *OPTIONS, None)
            estimator.update_curvature_matrix_estimate(state, 0.5, 0.5, N, KEY, args, None)
            again, same_tree = jax.tree.flatten(state)
            assert tree == same_tree
            assert all(x is y for x, y in zip(leaves, again, strict=True))

        jax.eval_shape(compute, bare)

    @pytest.mark.parametrize("exact", [True, False])
    def test_the_first_power_needs_no_cache(self, name, exact):
        estimator, bare, _ = made(name)
        vector = like(case(BY_NAME[name].model, "squared").model.params, 3)

        @jax.jit
        def compute(state):
            options = (state, vector, DAMPING, exact)
            products = [estimator.multiply(*options, cached, None) for cached in (True, False)]
            return *map(flat, products), estimator.to_dense_matrix(state)

        cached, found, matrix = compute(bare)
        assert_same(cached, found, 0, 0)
        if exact:
            assert_same(cached, matrix @ flat(vector) + DAMPING * flat(vector), 1e-9, 1e-10)


def test_a_first_power_that_is_cached_is_of_when_it_was_updated():
    blocks = BY_NAME["full"]
    estimator = blocks.estimator()
    before, later = (blocks.state(estimator, None, None, seed=seed) for seed in (0, 1))
    cached = estimator.update_cache(before, DAMPING, 1, None, False, None)
    pairs = zip(later.blocks_states, cached.blocks_states, strict=True)
    mixed = replace(later, blocks_states=tuple(replace(new, cache=old.cache) for new, old in pairs))
    vector = like(case(blocks.model, "squared").model.params, 3)
    product = lambda state, use_cached: estimator.multiply(
        state, vector, DAMPING, True, use_cached, None
    )
    assert_same(product(mixed, True), product(before, False), 1e-12, 1e-12)


def test_more_powers_than_the_threshold_are_cached_as_eigenvectors():
    """Also if the state was made for fewer."""
    blocks = BY_NAME["full"]
    with curvax.set_default_eigen_decomposition_threshold(2):
        estimator = blocks.estimator()
    state = blocks.state(estimator, None, -1)
    state = estimator.update_cache(state, DAMPING, (-0.5, -1, 2), None, False, None)
    assert {*state.blocks_states[0].cache} == {"eigenvectors", "eigenvalues"}
    vector = like(case(blocks.model, "squared").model.params, 3)
    product = estimator.multiply_matpower(state, vector, DAMPING, -0.5, True, True, None)
    matrix = estimator.to_dense_matrix(state)
    damped = np.asarray(matrix) + DAMPING * np.eye(len(matrix))
    expected = power_of(damped, -0.5) @ flat(vector)
    assert_same(flat(product), jnp.asarray(expected), 1e-8, 1e-9)


class Own:
    """A mixin with an update, which comes before a block of curvax in the order of classes."""

    def update_curvature_matrix_estimate(self, state, *args):
        return state


class TestOwnUpdates:
    def test_they_are_known_when_a_class_is_defined(self):
        class Mixed(Own, curvax.DenseTwoKroneckerFactored):
            pass

        class Further(Mixed):
            pass

        class Cached(curvax.DenseFull):
            def update_cache(self, state, *args):
                return state

        plain = (curvax.DenseTwoKroneckerFactored, curvax.DenseFull, curvax.NaiveDiagonal, Cached)
        assert all(ctor.has_own_update for ctor in (Mixed, Further))
        assert not any(ctor.has_own_update for ctor in plain)
        assert Cached.has_own_cache
        assert not any(ctor.has_own_cache for ctor in (*plain[:3], Mixed))

    def test_factors_that_are_not_all_there_is(self):
        class Scaled(curvax.DenseTwoKroneckerFactored):
            def state_dependent_scale(self, state):
                return 2.0

        class Further(curvax.Conv2DTwoKroneckerFactored):
            def fixed_scale(self):
                return 2.0

        assert curvax.DenseTwoKroneckerFactored.is_plain
        assert Further.is_plain
        assert not Scaled.is_plain
        assert not curvax.DenseEKFAC.is_plain

    def test_a_state_with_more_averages(self):
        """A class may keep averages of its own after ours, which `super()` leaves alone."""

        class More(curvax.DenseTwoKroneckerFactored):
            class State(curvax.DenseTwoKroneckerFactored.State):
                loss: curvax.WeightedMovingAverage

            def _initial_fields(self):
                zero = curvax.WeightedMovingAverage.zeros_array(())
                return {**super()._initial_fields(), "loss": zero}

            def update_curvature_matrix_estimate(self, state, *args):
                state = super().update_curvature_matrix_estimate(state, *args)
                return replace(state, loss=state.loss.updated(jnp.float32(3), *args[1:3]))

        given = case("mlp", "squared")
        states = [
            estimated(
                curvax.BlockDiagonalCurvature(given.func, layer_tag_to_block_ctor={"dense": ctor}),
                given.args,
                "fisher_gradients",
            ).blocks_states[0]
            for ctor in (More, curvax.DenseTwoKroneckerFactored)
        ]
        assert_same(states[0].loss.value, jnp.float32(3))
        assert_same(states[0].inputs_factor, states[1].inputs_factor, 1e-12, 1e-12)
        assert_same(states[0].outputs_factor, states[1].outputs_factor, 1e-12, 1e-12)


@pytest.mark.parametrize("ctors", [None, FULL, DIAGONAL])
def test_rows_of_dense_matrices_follow_ravel_pytree(ctors):
    """A bias that comes before its weights in the tree, and one that comes after them."""

    def func(p, batch):
        y = dense(jnp.tanh(dense(batch["x"], p[0]["w"], p[0]["b"])), *p[1])
        curvax.register_squared_error_loss(y, batch["y"], weight=0.5)

    params = [{"w": normal(0, 3, 2), "b": normal(1, 2)}, (normal(2, 2, 2), normal(3, 2))]
    args = params, {"x": normal(4, N, 3), "y": normal(5, N, 2)}
    estimator = curvax.BlockDiagonalCurvature(func, layer_tag_to_block_ctor=ctors)
    state = jax.jit(lambda *args: estimated(estimator, args, "ggn_exact"))(*args)
    orders = {block.name: block.parameters_canonical_order for block in estimator.blocks}
    assert orders == {"[0]['w'], [0]['b']": (1, 0), "[1][0], [1][1]": (0, 1)}

    def product(part):
        """The matrix times a vector that is zero outside of one layer, there."""
        zeros = jax.tree.map(jnp.zeros_like, params)

        def compute(x):
            vector = [x if k == part else each for k, each in enumerate(zeros)]
            return estimator.multiply(state, vector, 0.0, True, False, None)[part]

        return compute

    blocks = estimator.to_diagonal_block_dense_matrix(state)
    for names, block, matrix in zip(estimator.params_names, estimator.blocks, blocks, strict=True):
        part = int(names[0][1])
        vector, restore = ravel_pytree(like(params[part], 7))
        expected = ravel_pytree(product(part)(restore(vector)))[0]
        assert_same(matrix @ vector, expected, 1e-10, 1e-10)
        own = state.blocks_states[estimator.blocks.index(block)]
        assert_same(block.to_dense_matrix(own), matrix, 0, 0)
    whole = estimator.to_dense_matrix(state)
    vector = like(params, 8)
    expected = estimator.multiply(state, vector, 0.0, True, False, None)
    assert_same(whole @ flat(vector), flat(expected), 1e-10, 1e-10)
