"""A user-supplied block of a user-supplied layer gives what ours gives for the same layer."""

import functools

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvature.cases import KEY, N, estimated, normal
from helpers import assert_same

repeated_dense_tag = curvax.LayerTag("repeated_dense_tag", num_inputs=1, num_outputs=1)


def compute_layer(x, params):
    """A dense layer at all positions, spelled so that it is nothing else."""
    w, b = params
    y = jnp.einsum("nti,io->nto", jnp.sin(jnp.arcsin(x)), w)
    return y + jnp.broadcast_to(b, y.shape)


pattern = curvax.GraphPattern(
    name="repeated_dense",
    tag_primitive=repeated_dense_tag,
    compute_func=compute_layer,
    parameters_extractor_func=lambda equations: {},
    example_args=[jnp.zeros((2, 3, 2)), [jnp.zeros((2, 2)), jnp.zeros(2)]],
)


class RepeatedDense(curvax.DenseTwoKroneckerFactored):
    """Updates its factors in place, from the rows of all positions."""

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name
    ):
        (x,), (g,) = estimation_data["inputs"], estimation_data["outputs_tangents"]
        rows, cotangents = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        rows = jnp.concatenate([rows, jnp.ones_like(rows[:, :1])], 1)
        state.inputs_factor.update(rows.T @ rows / len(rows), ema_old, ema_new)
        state.outputs_factor.update(cotangents.T @ cotangents / batch_size, ema_old, ema_new)
        return state


PARAMS = {"w": 0.3 * normal(0, 2, 2), "b": normal(1, 2), "v": normal(2, 2, 2)}
BATCH = {"x": 0.1 * normal(3, N, 3, 2), "y": normal(4, N, 3, 2)}
MODES = [
    "fisher_gradients",
    "fisher_exact",
    "fisher_empirical",
    "ggn_curvature_prop",
    pytest.param("fisher_curvature_prop", marks=pytest.mark.slow),
    pytest.param("ggn_exact", marks=pytest.mark.slow),
]


def func(layer, p, batch):
    y = jnp.tanh(layer(batch["x"], (p["w"], p["b"]))) @ p["v"]
    curvax.register_squared_error_loss(y, batch["y"], weight=0.7)


own = functools.partial(func, compute_layer)
plain = functools.partial(func, lambda x, params: x @ params[0] + spread(params[1]))
PATTERNS = (*curvax.DEFAULT_GRAPH_PATTERNS, pattern)


def spread(b):
    return jnp.broadcast_to(b, (N, 3, 2))


def factors(state):
    return [
        (each.inputs_factor.value, each.outputs_factor.value, each.inputs_factor.weight)
        for each in state.blocks_states
    ]


@pytest.fixture(autouse=True)
def _registered():
    with curvax.set_default_tag_to_block_ctor("repeated_dense", RepeatedDense):
        yield


@pytest.mark.parametrize("mode", MODES)
def test_all_modes(mode):
    def compute(*args):
        ours = curvax.BlockDiagonalCurvature(plain)
        theirs = curvax.BlockDiagonalCurvature(own, graph_patterns=PATTERNS)
        found = []
        for estimator in (theirs, ours):
            state = estimated(estimator, args, mode)
            state = estimator.update_curvature_matrix_estimate(
                state, 0.5, 1.0, N, KEY, args, None, mode
            )
            found.append(factors(state))
        assert [type(block) for block in theirs.blocks] == [
            curvax.DenseTwoKroneckerFactored,
            RepeatedDense,
        ]
        return found

    theirs, ours = jax.jit(compute)(PARAMS, BATCH)
    assert_same(theirs, ours, 1e-9, 1e-10)


def test_it_is_the_default_only_inside_the_setting():
    assert curvax.get_default_tag_to_block_ctor("repeated_dense_tag") is RepeatedDense
    with curvax.set_default_tag_to_block_ctor("repeated_dense_tag", curvax.NaiveDiagonal):
        assert curvax.get_default_tag_to_block_ctor("repeated_dense") is curvax.NaiveDiagonal
    assert curvax.get_default_tag_to_block_ctor("repeated_dense") is RepeatedDense


@pytest.mark.parametrize("with_own", [False, True])
def test_naive_blocks_need_to_know_nothing_of_the_layer(with_own):
    """Whether or not there is another block that takes its data itself."""
    ctors = {"repeated_dense_tag": curvax.NaiveDiagonal}
    dense = Given if with_own else curvax.DenseTwoKroneckerFactored

    def compute(*args):
        theirs = curvax.BlockDiagonalCurvature(
            own, layer_tag_to_block_ctor={**ctors, "dense": dense}, graph_patterns=PATTERNS
        )
        index = {(2, 0): curvax.NaiveDiagonal}
        ours = curvax.BlockDiagonalCurvature(plain, index_to_block_ctor=index)
        found = [estimated(each, args, "fisher_exact").blocks_states[1] for each in (theirs, ours)]
        return [[x.value for x in each.diagonal_factors] for each in found]

    theirs, ours = jax.jit(compute)(PARAMS, BATCH)
    assert_same(theirs, ours, 1e-9, 1e-10)


class Given(curvax.DenseTwoKroneckerFactored):
    """Takes the data itself, and does what it would do anyway."""

    def update_curvature_matrix_estimate(self, *args):
        return super().update_curvature_matrix_estimate(*args)


def test_a_tag_that_no_block_is_known_for():
    other = curvax.LayerTag("other_tag", num_inputs=1, num_outputs=1)

    def func(w, batch):
        curvax.register_squared_error_loss(other.bind(batch["x"] @ w, batch["x"], w))

    args = normal(0, 2, 2), {"x": normal(1, N, 2)}
    estimator = curvax.BlockDiagonalCurvature(func)
    with pytest.raises(ValueError, match=r"no block is known for the tag 'other_tag'.*Choose one"):
        estimator.finalize(args)
    with curvax.set_default_tag_to_block_ctor("other_tag", curvax.DenseFull):
        estimator = curvax.BlockDiagonalCurvature(func)
        with pytest.raises(NotImplementedError, match=r"nothing is known of .* other_tag"):
            jax.eval_shape(lambda *args: estimated(estimator, args, "ggn_exact"), *args)


def test_plain_settings_hold_from_then_on():
    before = curvax.get_max_parallel_elements()
    setting = curvax.set_max_parallel_elements(17)
    assert curvax.get_max_parallel_elements() == 17
    with setting:
        pass
    assert curvax.get_max_parallel_elements() == before


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
@pytest.mark.parametrize(
    "setter", ["set_max_parallel_elements", "set_default_eigen_decomposition_threshold"]
)
def test_settings_are_positive_ints(setter, value, unchecked):
    with pytest.raises(ValueError, match=f"curvax.{setter}: expected a positive int, got {value}"):
        getattr(curvax, setter)(value)


def test_what_makes_blocks_is_callable(unchecked):
    with pytest.raises(TypeError, match="block_ctor makes blocks, got 3"):
        curvax.set_default_tag_to_block_ctor("dense", 3)


def test_defaults():
    assert curvax.get_max_parallel_elements() == 2**23
    assert curvax.get_default_eigen_decomposition_threshold() == 5
    names = {
        "dense_tag": "DenseTwoKroneckerFactored",
        "conv2d": "Conv2DTwoKroneckerFactored",
        "conv_tag": "ConvTwoKroneckerFactored",
        "embedding": "EmbeddingTwoKroneckerFactored",
        "scale_and_shift_tag": "ScaleAndShiftDiagonal",
        "generic": "NaiveDiagonal",
    }
    for name, block in names.items():
        assert curvax.get_default_tag_to_block_ctor(name).__name__ == block
    with pytest.raises(ValueError, match="no block is known for the tag 'dens'"):
        curvax.get_default_tag_to_block_ctor("dens")
