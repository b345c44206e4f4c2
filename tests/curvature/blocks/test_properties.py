"""What blocks say of themselves, and what they are made of."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvature.cases import (
    DIAGONAL,
    FULL,
    KEY,
    N,
    case,
    estimated,
    estimated_matrix,
    kronecker_curvature,
    normal,
)
from helpers import assert_same


def blocks_of(model: str, ctors=None):
    """The estimator of a model, and its blocks by the names of their first parameters."""
    given = case(model, "squared")
    estimator = curvax.BlockDiagonalCurvature(given.func, layer_tag_to_block_ctor=ctors)
    estimator.finalize(given.args)
    assert estimator.blocks is not None
    return estimator, {block.name[2]: block for block in estimator.blocks}


class TestProperties:
    def test_of_a_dense_layer(self):
        _, blocks = blocks_of("mlp")
        block = blocks["w"]
        assert block.name == "['w'], ['b']"
        assert block.layer_tag_primitive is curvax.layers.tags.dense_tag
        assert block.layer_tag_primitive.name == "dense_tag"
        assert block.parameters_shapes == ((3, 2), (2,))
        assert block.parameter_variables[0].aval.shape == (3, 2)
        assert len(block.parameter_variables) == 2
        assert block.inputs_shapes == ((N, 3),)
        assert block.outputs_shapes == ((N, 2),)
        assert block.parameters_canonical_order == (1, 0)  # The function has `b` before `w`.
        assert isinstance(block.layer_tag_extra_params, dict)
        assert block.number_of_parameters == 2
        assert block.dim == 8
        assert block.has_bias
        assert not blocks_of("scale and shift")[1]["w"].has_bias

    def test_of_a_convolution(self):
        _, blocks = blocks_of("channels first")
        block = blocks["w"]
        assert isinstance(block, curvax.Conv2DTwoKroneckerFactored)
        assert block.outputs_channel_index == 1
        assert block.inputs_channel_index == 1
        assert block.weights_output_channel_index == 0
        assert block.weights_spatial_size == 4
        assert block.num_locations == 9
        assert block.num_inputs_channels == 2
        assert block.num_outputs_channels == 2
        assert block.fixed_scale() == 9
        assert block.layer_tag_extra_params["window_strides"] == (1, 1)

    def test_of_a_strided_convolution(self):
        block = blocks_of("strided")[1]["w"]
        assert (block.outputs_channel_index, block.weights_output_channel_index) == (3, 3)
        assert block.num_locations == 3 * 5

    @pytest.mark.parametrize("ctors", [FULL, DIAGONAL])
    def test_of_a_layer_that_scales_and_shifts(self, ctors):
        block = blocks_of("scale and shift", ctors)[1]["s"]
        assert block.has_scale
        assert block.has_shift

    @pytest.mark.parametrize("ctor", [curvax.Conv2DDiagonal, curvax.Conv2DFull])
    def test_of_how_much_is_held_at_once(self, ctor):
        limited = functools.partial(ctor, max_elements_for_vmap=7)
        assert blocks_of("2-D", {"conv2d": limited})[1]["w"].max_elements_for_vmap == 7
        assert blocks_of("2-D", {"conv2d": ctor})[1]["w"].max_elements_for_vmap is None

    def test_scales(self):
        estimator, blocks = blocks_of("2-D")
        state = estimator.init(KEY, case("2-D", "squared").args, None, None)
        block, own = blocks["w"], state.blocks_states[1]
        assert block.scale(own, True) == block.scale(own, False) == 9
        assert block.state_dependent_scale(own) == 1
        assert blocks["v"].fixed_scale() == 1

    def test_of_a_block_of_an_equation(self):
        """Blocks can be made by hand, from the equation of a tag."""

        def func(w, x):
            y = curvax.register_dense(x @ w, x, w)
            return curvax.register_squared_error_loss(y)

        jaxpr = jax.make_jaxpr(func)(normal(0, 3, 2), normal(1, N, 3))
        (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "dense_tag"]
        block = curvax.DenseTwoKroneckerFactored(equation, "by hand")
        assert block.parameters_shapes == ((3, 2),)
        state = block.init(KEY, None, None, False)
        x, g = normal(1, N, 3), normal(2, N, 2)
        at = {"inputs": (x,), "outputs_tangents": (g,)}
        data = {**at, "sites": (at,)}
        new = block.update_curvature_matrix_estimate(state, data, 0.0, 1.0, N, None)
        assert_same(new.inputs_factor.value, x.T @ x / N)
        assert_same(new.outputs_factor.value, g.T @ g / N)
        assert not state.inputs_factor.weight

    def test_states(self):
        _, blocks = blocks_of("mlp")
        state = blocks["w"].init(KEY, -1, [-0.5, -1], True)
        assert isinstance(state, curvax.TwoKroneckerFactored.State)
        assert isinstance(state, curvax.CurvatureBlock.State)
        assert isinstance(state.inputs_factor, curvax.WeightedMovingAverage)
        assert set(state.cache) == {"-1", "-0.5", "eigen", "eigenvalues"}
        full = blocks_of("mlp", FULL)[1]["w"].init(KEY, None, None, False)
        assert isinstance(full.matrix, curvax.WeightedMovingAverage)
        diagonal = blocks_of("mlp", DIAGONAL)[1]["w"].init(KEY, None, None, False)
        assert [x.value.shape for x in diagonal.diagonal_factors] == [(3, 2), (2,)]

    def test_vectors_and_lists(self):
        block = blocks_of("mlp", FULL)[1]["w"]
        w, b = normal(0, 3, 2), normal(1, 2)
        vector = block.parameters_list_to_single_vector([w, b])
        assert_same(vector, jnp.concatenate([w.reshape(-1), b]))
        assert_same(block.single_vector_to_parameters_list(vector), (w, b))
        with pytest.raises(ValueError, match=r"of the shapes \(\(3, 2\), \(2,\)\), got"):
            block.parameters_list_to_single_vector([b, w])
        with pytest.raises(ValueError, match=r"has the shape \(8,\), got \(7,\)"):
            block.single_vector_to_parameters_list(vector[1:])

    def test_wrong_vectors(self):
        block = blocks_of("mlp")[1]["w"]
        state = block.init(KEY, None, None, False)
        with pytest.raises(ValueError, match=r"a vector for the block .* got \(\(2,\),\)"):
            block.multiply(state, [normal(0, 2)], 0.1, True, False)

    def test_wrong_weight_sharing(self, unchecked):
        ctor = functools.partial(curvax.DenseTwoKroneckerFactored, weight_sharing="share")
        with pytest.raises(ValueError, match="weight_sharing is 'expand' or 'reduce', got 'share'"):
            blocks_of("mlp", {"dense": ctor})


class TestScaledIdentity:
    @pytest.mark.parametrize("power", [-1, 1, 0.3])
    def test_products(self, power):
        ctor = functools.partial(curvax.ScaledIdentity, scale=2.0)
        block = blocks_of("mlp", {"dense": ctor})[1]["w"]
        state = block.init(KEY, -1, -1, False)
        vector = normal(0, 3, 2), normal(1, 2)
        for exact in (True, False):
            product = block.multiply_matpower(state, vector, 0.5, power, exact, True)
            assert_same(product, tuple(x * 2.5**power for x in vector))
        assert_same(block.eigenvalues(state, False), jnp.full(8, 2.0))

    def test_it_is_positive(self, unchecked):
        ctor = functools.partial(curvax.ScaledIdentity, scale=0.0)
        with pytest.raises(ValueError, match=r"the scale must be positive, got 0\.0"):
            blocks_of("mlp", {"dense": ctor})

    def test_it_is_the_identity_times_its_scale(self):
        given = case("mlp", "squared")
        estimator = curvax.BlockDiagonalCurvature(
            given.func, layer_tag_to_block_ctor={"dense": curvax.ScaledIdentity}
        )
        compute = lambda *args: estimated_matrix(estimator, args, "ggn_exact")
        assert_same(jax.jit(compute)(*given.args), jnp.eye(14))


class TestWideFactors:
    """Factors beyond a size are kept as diagonals, and that is said."""

    @pytest.mark.parametrize(("model", "size"), [("mlp", 1), ("dilated", 3)])
    def test_they_are_diagonal(self, model, size):
        given = case(model, "several")
        wide = lambda ctor: functools.partial(ctor, max_factor_size=size)
        ctors = {
            "dense": wide(curvax.DenseTwoKroneckerFactored),
            "conv2d": wide(curvax.Conv2DTwoKroneckerFactored),
        }
        estimator = curvax.BlockDiagonalCurvature(given.func, layer_tag_to_block_ctor=ctors)
        compute = lambda *args: (
            estimator.to_dense_matrix(estimated(estimator, args, "ggn_exact")),
            kronecker_curvature(given, *args),
        )
        ours, book = jax.jit(compute)(*given.args)
        rows, columns = {}, {}
        for name, x in given.model.params.items():
            width = x.shape[-1]
            inputs, outputs = np.divmod(np.arange(x.size), width)
            layer = next(own.split() for own in given.model.layers if name in own.split())
            height = given.model.params[layer[0]].size // width
            is_wide = height + len(layer) - 1 > size
            inputs = inputs + height * (name in "bc")
            rows[name] = inputs if is_wide else 0 * inputs
            columns[name] = outputs if width > size else 0 * outputs
        names = sorted(rows)
        same = [
            np.equal.outer(*[np.concatenate([index[name] for name in names])] * 2)
            for index in (rows, columns)
        ]
        assert_same(ours, jnp.where(same[0] & same[1], book, 0), 1e-9, 1e-10)
        first = [row.remarks for row in estimator.report().rows if "['w']" in row.params]
        assert "the factor of the inputs is diagonal" in first[0][0]
        assert f"more than {size}" in str(estimator.report())


def test_tied_tables_have_a_pair_of_factors_for_each_way():
    """Both are scaled to equal mean traces and added up; the table of indices is diagonal."""
    given = case("tied table", "squared")
    estimator = curvax.BlockDiagonalCurvature(given.func)
    (e,), x = given.model.params.values(), given.model.x

    def book(e):
        h = jnp.tanh(e[x].mean(1))
        counts = jnp.zeros(5).at[x.reshape(-1)].add(1) / x.size
        # The loss is twice the identity in the outputs; one row for each of an example's words.
        back = jax.vmap(jax.jacobian(lambda m: jnp.tanh(m) @ e.T))(e[x].mean(1)) / 2
        looked_up = jnp.diag(counts), 2 * 2 * jnp.einsum("noi,noj->ij", back, back) / N
        projected = 2 * jnp.eye(5), h.T @ h / N
        total = [jnp.zeros((5, 5)), jnp.zeros((2, 2))]
        for pair in (looked_up, projected):
            means = [jnp.trace(m) / len(m) for m in pair]
            middle = jnp.sqrt(means[0] * means[1])
            total = [t + m * middle / mean for t, m, mean in zip(total, pair, means, strict=True)]
        return jnp.kron(jnp.diag(jnp.diag(total[0])), total[1]) / 2

    compute = lambda *args: (
        estimator.to_dense_matrix(estimated(estimator, args, "ggn_exact")),
        book(args[0]["e"]),
    )
    ours, naive = jax.jit(compute)(*given.args)
    assert e.shape == (5, 2)
    assert_same(ours, naive, 1e-9, 1e-10)


def test_states_can_be_pickled():
    for model, ctors in (("mlp", None), ("parts", None), ("2-D", FULL), ("mlp", DIAGONAL)):
        estimator, _ = blocks_of(model, ctors)
        state = estimator.init(KEY, case(model, "squared").args, -1, -1, True)
        again = pickle.loads(pickle.dumps(state))
        assert jax.tree.structure(again) == jax.tree.structure(state)
        assert_same(again, state)
