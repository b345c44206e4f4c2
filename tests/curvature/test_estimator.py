"""Estimators besides their matrices: maps of parameters, states, settings, errors."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import curvax
from curvature.cases import (
    FULL,
    KEY,
    MLP,
    N,
    case,
    dense_curvature,
    estimated,
    estimated_matrix,
    flat,
    normal,
)
from helpers import assert_same

GIVEN = case("mlp", "several")
ARGS = GIVEN.args


def close(actual, expected) -> None:
    assert_same(actual, expected, 1e-9, 1e-10)


def estimator(**options):
    found = curvax.BlockDiagonalCurvature(GIVEN.func, **options)
    found.finalize(ARGS)
    return found


class TestParameters:
    def test_maps(self):
        found = estimator()
        assert found.params_structure_vector_of_indices == {"b": 0, "c": 1, "v": 2, "w": 3}
        assert found.params_block_index == {"b": 1, "c": 0, "v": 0, "w": 1}
        assert list(found.indices_to_block_map) == [(2, 1), (3, 0)]
        assert list(found.indices_to_block_map.values()) == list(found.blocks)
        assert (found.num_blocks, found.num_params_variables) == (2, 4)
        assert (found.block_dims, found.dim) == ((6, 8), 14)

    def test_vectors_of_blocks(self):
        found = estimator()
        vectors = found.params_vector_to_blocks_vectors(MLP)
        assert_same(vectors, ((MLP["v"], MLP["c"]), (MLP["w"], MLP["b"])))
        assert_same(found.blocks_vectors_to_params_vector(vectors), MLP)

    def test_dense_matrices_are_in_the_order_of_the_parameters(self):
        found = estimator(layer_tag_to_block_ctor=FULL)

        def compute(*args):
            state = estimated(found, args, "ggn_exact")
            product = found.multiply(state, args[0], 0.0, True, False, None)
            blocks = found.to_diagonal_block_dense_matrix(state)
            return product, found.to_dense_matrix(state), blocks

        product, matrix, blocks = jax.jit(compute)(*ARGS)
        close(flat(product), matrix @ flat(MLP))
        first = jnp.array([2, 3, 4, 5, 6, 7])  # `c` and `v`, among `b`, `c`, `v` and `w`.
        close(blocks[0], matrix[first[:, None], first[None]])

    def test_explicit_curvature_is_one_block(self):
        found = curvax.ExplicitExactCurvature(GIVEN.func)
        found.finalize(ARGS)
        assert (found.num_blocks, found.dim, found.batch_index) == (1, 14, 1)
        assert list(found.indices_to_block_map) == [(0, 1, 2, 3)]
        assert found.default_estimation_mode == "fisher_exact"
        assert found.default_mat_type == "fisher"

    def test_blocks_by_index_come_before_those_by_tag(self):
        found = estimator(
            layer_tag_to_block_ctor={"dense": curvax.DenseFull},
            index_to_block_ctor={(3, 0): curvax.DenseDiagonal},
        )
        assert [type(block) for block in found.blocks] == [curvax.DenseFull, curvax.DenseDiagonal]

    def test_attributes(self):
        found = curvax.BlockDiagonalCurvature(GIVEN.func, 0, "ggn_exact")
        assert found.func == GIVEN.func
        assert (found.params_index, found.default_estimation_mode) == (0, "ggn_exact")
        assert found.default_mat_type == "ggn"
        assert found.blocks is None


class TestDamping:
    found = estimator()

    def products(self, weights, damping=0.1):
        """Inverses of one block after the other, with a weight for each."""
        state = states()
        product = jax.jit(
            lambda state, weights: self.found.multiply_inverse(
                state, MLP, weights, True, False, None
            )
        )
        return product(state, weights)

    def test_a_weight_for_each_block(self):
        each, first, last = map(self.products, ([0.1, 2.0], 0.1, 2.0))
        close(each, {"v": first["v"], "c": first["c"], "w": last["w"], "b": last["b"]})
        close(self.products((0.1, 2.0)), each)
        close(self.products(jnp.array([0.1, 2.0])), each)

    def test_cached(self):
        state = self.found.init(KEY, ARGS, None, -1)

        def compute(state, weights):
            cached = self.found.update_cache(state, weights, None, -1, False, None)
            direct = self.found.multiply_inverse(state, MLP, weights, False, False, None)
            return self.found.multiply_inverse(cached, MLP, 0.0, False, True, None), direct

        kept = states()
        for own, other in zip(state.blocks_states, kept.blocks_states, strict=True):
            own.inputs_factor, own.outputs_factor = other.inputs_factor, other.outputs_factor
        close(*jax.jit(compute)(state, [0.1, 2.0]))

    @pytest.mark.parametrize("weights", [[0.1], (0.1,) * 3, jnp.full(3, 0.1)])
    def test_another_number_of_weights(self, weights):
        with pytest.raises(ValueError, match=r"one for each of the 2 blocks, got [13]"):
            self.found.multiply_inverse(states(), MLP, weights, True, False, None)
        with pytest.raises(ValueError, match=r"one for each of the 2 blocks, got [13]"):
            self.found.update_cache(states(), weights, None, None, False, None)


@functools.cache
def states():
    found = estimator()
    return jax.jit(lambda *args: estimated(found, args, "fisher_exact"))(*ARGS)


class TestStates:
    """A state is a pytree whose structure stays the same."""

    def test_averages_over_a_loop(self):
        found = estimator(layer_tag_to_block_ctor=FULL)

        def compute(params, batch):
            def step(state, x):
                args = params, {**batch, "x": x}
                state = found.update_curvature_matrix_estimate(
                    state, 0.7, 0.2, N, KEY, args, None, "ggn_exact"
                )
                return found.update_cache(state, 0.1, -0.5, -1, True, None), None

            xs = jnp.stack([batch["x"], 2 * batch["x"], -batch["x"]])
            state = found.init(KEY, (params, batch), -0.5, -1, True)
            matrices = jnp.stack([dense_curvature(GIVEN, params, {**batch, "x": x}) for x in xs])
            weights = 0.2 * 0.7 ** jnp.arange(3.0)[::-1]
            state, _ = lax.scan(step, state, xs)
            inverse = found.multiply_inverse(state, params, 0.1, False, True, None)
            average = jnp.einsum("k,kpq->pq", weights / weights.sum(), matrices)
            return found.to_dense_matrix(state), average, inverse

        ours, naive, inverse = jax.jit(compute)(*ARGS)
        naive = jnp.where(GIVEN.same_block(), naive, 0)
        close(ours, naive)
        close(flat(inverse), jnp.linalg.solve(naive + 0.1 * jnp.eye(14), flat(MLP)))

    def test_an_ensemble(self):
        found = estimator()
        params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), MLP)
        _, batch = ARGS

        def compute(params):
            state = estimated(found, (params, batch), "fisher_empirical")
            return found.multiply_inverse(state, params, 0.1, True, False, None)

        together = jax.jit(jax.vmap(compute))(params)
        one = jax.jit(compute)(jax.tree.map(lambda x: x[1], params))
        close(jax.tree.map(lambda x: x[1], together), one)

    def test_nothing_seen_yet(self):
        found = estimator()

        def compute():
            state = found.init(KEY, ARGS, None, None)
            return found.to_dense_matrix(state), found.eigenvalues(state, False)

        assert_same(jax.jit(compute)(), (jnp.zeros((14, 14)), jnp.zeros(14)))

    def test_eigenvalues_of_blocks(self):
        found = estimator()
        values = found.block_eigenvalues(states(), False)
        assert [len(each) for each in values] == [6, 8]
        assert_same(found.eigenvalues(states(), False), jnp.concatenate(values))

    def test_batches_that_are_not_finite_are_skipped(self):
        found = estimator()
        params, batch = ARGS
        update = jax.jit(
            lambda state, x: found.update_curvature_matrix_estimate(
                state, 0.5, 1.0, N, KEY, (params, {**batch, "x": x}), None, "ggn_exact"
            )
        )
        before = states()
        after = update(before, batch["x"].at[0, 0].set(jnp.nan))
        for old, new in zip(before.blocks_states, after.blocks_states, strict=True):
            for average in ("inputs_factor", "outputs_factor"):
                assert_same(getattr(new, average).value, getattr(old, average).value)
                assert getattr(new, average).refused == 1
        # Of the second moment of the inputs it is too large; both factors refuse it.
        large = update(before, batch["x"].at[0, 0].set(1e200)).blocks_states
        assert [state.inputs_factor.refused for state in large] == [0, 1]
        assert [state.outputs_factor.refused for state in large] == [0, 1]
        again = update(after, batch["x"])
        assert again.blocks_states[0].inputs_factor.refused == 1
        assert again.blocks_states[0].inputs_factor.weight == 1.5

    def test_the_state_given_is_not_changed(self):
        found = estimator()
        before = jax.tree.leaves(states())
        update = lambda weight: found.update_cache(states(), weight, None, None, True, None)
        jax.make_jaxpr(update)(0.1)
        assert all(x is y for x, y in zip(jax.tree.leaves(states()), before, strict=True))


class TestErrors:
    """All of them come up while something is traced."""

    def test_before_anything_is_known(self):
        found = curvax.BlockDiagonalCurvature(GIVEN.func)
        for ask in (
            lambda: found.num_blocks,
            lambda: found.dim,
            lambda: found.params_vector_to_blocks_vectors(MLP),
            lambda: found.eigenvalues(states(), False),
        ):
            with pytest.raises(ValueError, match=r"not known before .* Call init or finalize"):
                ask()

    @pytest.mark.parametrize("mode", ["fisher", "ggn_gradients", "ggn_empirical", "hessian_exact"])
    def test_another_mode(self, mode):
        message = f"the estimation mode '{mode}' is not known, only fisher_gradients"
        with pytest.raises(ValueError, match=message):
            curvax.BlockDiagonalCurvature(GIVEN.func, 0, mode)
        with pytest.raises(ValueError, match=message):
            estimated(curvax.BlockDiagonalCurvature(GIVEN.func), ARGS, mode)
        with pytest.raises(ValueError, match=message):
            estimated(curvax.ExplicitExactCurvature(GIVEN.func), ARGS, mode)

    @pytest.mark.parametrize("vector", [{"w": MLP["w"]}, MLP | {"w": MLP["b"]}, 1.0])
    def test_a_vector_unlike_the_parameters(self, vector):
        found = estimator()
        for multiply in (found.multiply, found.multiply_inverse):
            with pytest.raises(ValueError, match="expected a vector like the parameters"):
                multiply(states(), vector, 0.1, True, False, None)
        with pytest.raises(ValueError, match="expected a vector like the parameters"):
            found.params_vector_to_blocks_vectors(vector)

    def test_vectors_unlike_the_blocks(self):
        found = estimator()
        with pytest.raises(ValueError, match=r"the blocks have \[2, 2\] parameters, got \[2\]"):
            found.blocks_vectors_to_params_vector(found.params_vector_to_blocks_vectors(MLP)[:1])

    def test_a_tag_that_is_not_there(self):
        found = curvax.BlockDiagonalCurvature(
            GIVEN.func, layer_tag_to_block_ctor={"dens": curvax.DenseFull}
        )
        with pytest.raises(ValueError, match=r"no block is known for the tag 'dens"):
            found.finalize(ARGS)

    def test_an_index_that_is_not_there(self):
        found = curvax.BlockDiagonalCurvature(
            GIVEN.func, index_to_block_ctor={(0, 3): curvax.DenseFull}
        )
        with pytest.raises(ValueError, match=r"has \[\(0, 3\)\], but .* \(\(2, 1\), \(3, 0\)\)"):
            found.finalize(ARGS)

    def test_a_loss_without_targets(self):
        func = lambda w, batch: curvax.register_squared_error_loss(batch["x"] @ w)
        args = normal(0, 3, 2), {"x": normal(1, N, 3)}
        for found in (curvax.BlockDiagonalCurvature(func), curvax.ExplicitExactCurvature(func)):
            with pytest.raises(ValueError, match="targets"):
                jax.eval_shape(lambda *a, e=found: estimated(e, a, "fisher_empirical"), *args)

    def test_a_loss_without_a_fisher_matrix(self):
        given = case("mlp", "own")
        for mode in ("fisher_exact", "fisher_gradients", "fisher_curvature_prop"):
            found = curvax.BlockDiagonalCurvature(given.func)
            with pytest.raises(
                (ValueError, AttributeError, NotImplementedError), match=r"(?i)fisher|distribution"
            ):
                jax.eval_shape(lambda *a, e=found, m=mode: estimated(e, a, m), *given.args)


def test_losses_with_several_rows_for_each_example_are_exact():
    """Logits may be registered for all positions, one after the other."""
    x, params = normal(0, N, 3, 2), {"w": normal(1, 2, 2), "v": normal(2, 2, 2)}
    model = lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]

    def func(p, batch):
        curvax.register_softmax_cross_entropy_loss(model(p, batch["x"]).reshape(-1, 2))

    def naive(p, x):
        point, unflatten = ravel_pytree(p)
        jacobian = jax.jacrev(lambda point: model(unflatten(point), x).reshape(-1, 2))(point)
        q = jax.nn.softmax(model(p, x).reshape(-1, 2))
        matrices = jax.vmap(lambda q: jnp.diag(q) - jnp.outer(q, q))(q)
        return jnp.einsum("rip,rij,rjq->pq", jacobian, matrices, jacobian) / N

    compute = lambda p, x: (
        estimated_matrix(curvax.ExplicitExactCurvature(func), (p, {"x": x}), "fisher_exact"),
        naive(p, x),
    )
    close(*jax.jit(compute)(params, x))


def test_a_parameter_that_is_used_as_it_is_and_in_slices():
    """Parts that overlap have one block together."""

    def func(p, batch):
        y = jnp.tanh(batch["x"] @ p["w"]) @ p["w"][:2]
        curvax.register_squared_error_loss(y)

    args = {"w": normal(0, 3, 2)}, {"x": normal(1, N, 3)}
    found = curvax.BlockDiagonalCurvature(func)

    def compute(*args):
        state = estimated(found, args, "ggn_exact")
        inverse = found.multiply_inverse(state, args[0], 0.1, True, False, None)
        return found.to_dense_matrix(state), found.eigenvalues(state, False), inverse

    matrix, values, inverse = jax.jit(compute)(*args)
    close(jnp.sort(values), jnp.linalg.eigvalsh(matrix))
    close(flat(inverse), jnp.linalg.solve(matrix + 0.1 * jnp.eye(6), flat(args[0])))
