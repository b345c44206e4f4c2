"""Blocks and estimators as clients of kfac_jax write them, with the numbers of curvax's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
import curvax.kfac_jax
from curvax.kfac_jax import curvature_blocks, curvature_estimator
from helpers import mesh_of

KEY = jax.random.key(0)
POSITIONS, BATCH, INPUTS, OUTPUTS = 3, 4, 5, 2


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


PARAMS = {"w": normal(0, INPUTS, OUTPUTS), "b": normal(1, OUTPUTS)}
X = normal(2, BATCH, POSITIONS, INPUTS)
ARGS = (PARAMS, X)


def model(params, x):
    """A dense layer that is applied at several positions of each example."""
    y = jnp.tanh(x @ params["w"] + params["b"][None, None])
    return curvax.register_squared_error_loss(jnp.sum(y, axis=1))


def merged(x):
    return x.reshape(-1, x.shape[-1])


class Scaled(curvature_blocks.DenseTwoKroneckerFactored):
    """A dense block whose factors are averages over positions as well as examples."""

    def fixed_scale(self):
        (shape,) = self.inputs_shapes
        return float(np.prod(shape) // (shape[0] * shape[-1]))


class Newest(Scaled):
    """As for 0.0.8."""

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, identity_weight, batch_size
    ):
        (x,) = estimation_data.primals.inputs
        (g,) = estimation_data.tangents.outputs
        assert x.shape[0] == batch_size
        replace = dataclasses.replace
        data = replace(
            estimation_data,
            primals=replace(estimation_data.primals, inputs=(merged(x),)),
            tangents=replace(estimation_data.tangents, outputs=(merged(g),)),
        )
        return super().update_curvature_matrix_estimate(
            state=state,
            estimation_data=data,
            ema_old=ema_old,
            ema_new=ema_new,
            identity_weight=identity_weight,
            batch_size=x.size // x.shape[-1],
        )


class NewestByPosition(Newest):
    """As for 0.0.8, with arguments by position."""

    def update_curvature_matrix_estimate(self, *args):
        return super().update_curvature_matrix_estimate(*args)


def as_dictionary(estimation_data, key="outputs_tangent"):
    data = dict(**estimation_data)
    (x,), (g,) = data["inputs"], data[key]
    data["inputs"], data[key] = (merged(x),), (merged(g),)
    return data, x.size // x.shape[-1]


class Dictionary(Scaled):
    """As for 0.0.6: a dictionary, and neither damping nor a mapped axis."""

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size
    ):
        data, batch_size = as_dictionary(estimation_data)
        return super().update_curvature_matrix_estimate(
            state=state,
            estimation_data=data,
            ema_old=ema_old,
            ema_new=ema_new,
            batch_size=batch_size,
        )


class DictionaryByPosition(Scaled):
    """As for 0.0.6, by position, with the other name of the cotangents."""

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size, *args, **kwargs
    ):
        data, batch_size = as_dictionary(estimation_data, "outputs_tangents")
        return super().update_curvature_matrix_estimate(
            state, data, ema_old, ema_new, batch_size, *args, **kwargs
        )


class Oldest(Scaled):
    """As for the first releases: with the name of a mapped axis."""

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name
    ):
        data, batch_size = as_dictionary(estimation_data)
        return super().update_curvature_matrix_estimate(
            state, data, ema_old, ema_new, batch_size, pmap_axis_name
        )


class OwnFactors(curvature_blocks.DenseTwoKroneckerFactored):
    """Updates the factors itself, after it was made with specifications of its parameters."""

    def __init__(self, layer_tag_eq):
        self._layer_tag_eq = layer_tag_eq
        specs = ["ab -> (a)(b)" if len(shape) == 2 else "a -> ()(a)" for shape in self.shapes]
        super().__init__(layer_tag_eq, specs)

    @property
    def shapes(self):
        return self.parameters_shapes

    def fixed_scale(self):
        (shape,) = self.inputs_shapes
        return float(shape[1])

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, identity_weight, batch_size
    ):
        del identity_weight
        state = state.copy()
        (x,), (g,) = estimation_data.primals.inputs, estimation_data.tangents.outputs
        x, g = merged(x), merged(g)
        x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
        state.factors[0].update(x.T @ x / len(x), ema_old, ema_new)
        state.factors[1].update(g.T @ g / len(x), ema_old, ema_new)
        return state


class OwnArray(Dictionary):
    """Arranges the parameters itself."""

    def parameters_shaped_list_to_array(self, parameters_shaped_list):
        w, b = parameters_shaped_list
        return jnp.concatenate([w, b[None]], axis=0)

    def array_to_parameters_shaped_list(self, array):
        return array[:-1], array[-1]

    def update_curvature_matrix_estimate(
        self, state, estimation_data, ema_old, ema_new, batch_size
    ):
        assert self.array_shape == (INPUTS + 1, OUTPUTS)
        return super().update_curvature_matrix_estimate(
            state, estimation_data, ema_old, ema_new, batch_size
        )


class OwnKronecker(curvature_blocks.KroneckerFactored):
    """Is not a dense block: has a state, a cache and products of its own."""

    def fixed_scale(self):
        return float(POSITIONS)

    def _init(self, rng, exact_powers_to_cache, approx_powers_to_cache, cache_eigenvalues):
        del rng, cache_eigenvalues
        assert (exact_powers_to_cache, approx_powers_to_cache) == ({-1}, {-1})
        zeros = curvax.kfac_jax.utils.WeightedMovingAverage.zeros_array
        sizes = (INPUTS + 1, OUTPUTS)
        return curvature_blocks.KroneckerFactored.State(
            cache={"-1": [jnp.zeros((n, n)) for n in sizes]},
            factors=tuple(zeros((n, n), jnp.float64) for n in sizes),
        )

    def _update_cache(self, state, identity_weight, exact_powers, approx_powers, eigenvalues):
        del eigenvalues
        assert (exact_powers, approx_powers) == ({-1}, {-1})
        factors = [factor.value for factor in state.factors]
        inverse = curvax.kfac_jax.utils.pi_adjusted_kronecker_inverse
        state.cache["-1"] = list(inverse(*factors, damping=identity_weight))
        return state

    def multiply_matpower(self, state, vector, identity_weight, power, exact_power, use_cached):
        if power == 1:
            return super().multiply_matpower(
                state, vector, identity_weight, power, exact_power, use_cached
            )
        assert use_cached
        inputs, outputs = state.cache["-1"]
        array = self.parameters_shaped_list_to_array(vector)
        product = inputs @ array @ outputs / self.fixed_scale()
        return self.array_to_parameters_shaped_list(product)

    update_curvature_matrix_estimate = OwnFactors.update_curvature_matrix_estimate


OWN = [
    OwnKronecker,
    Newest,
    NewestByPosition,
    Dictionary,
    DictionaryByPosition,
    Oldest,
    OwnFactors,
    OwnArray,
]


def estimated(estimator, mode="ggn_exact", args=ARGS, batch_size=BATCH, axis=None):
    state = estimator.init(KEY, args, -1, -1)
    for _ in range(2):
        state = estimator.update_curvature_matrix_estimate(
            state, 0.9, 0.1, 0.01, batch_size, KEY, args, mode, axis
        )
    return estimator.update_cache(state, 0.01, -1, -1, False, axis)


@functools.cache
def plain():
    """Return the matrix by curvax's own block, and its inverse times the parameters."""
    estimator = curvax.BlockDiagonalCurvature(model)
    state = estimator.update_curvature_matrix_estimate(
        estimator.init(KEY, ARGS, None, -1), 0.0, 1.0, BATCH, KEY, ARGS, None, "ggn_exact"
    )
    state = estimator.update_cache(state, 0.01, None, -1, False, None)
    inverse = estimator.multiply_inverse(state, PARAMS, 0.01, False, True, None)
    return estimator.to_dense_matrix(state), inverse


def assert_as_plain(estimator, state):
    matrix, inverse = plain()
    np.testing.assert_allclose(estimator.to_dense_matrix(state), matrix, rtol=1e-10)
    found = estimator.multiply_inverse(state, PARAMS, 0.01, False, True, None)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8), found, inverse)


@pytest.mark.parametrize("block", OWN)
def test_a_block_of_any_release(block):
    estimator = curvature_estimator.BlockDiagonalCurvature(
        model, layer_tag_to_block_ctor={"dense": block}
    )
    assert_as_plain(estimator, estimated(estimator))
    assert isinstance(estimator.blocks[0], block)


def test_default_blocks_are_those_of_the_subpackage():
    estimator = curvature_estimator.BlockDiagonalCurvature(model)
    assert_as_plain(estimator, estimated(estimator))
    (block,) = estimator.blocks
    assert type(block) is curvature_blocks.DenseTwoKroneckerFactored
    assert isinstance(block, curvature_blocks.KroneckerFactored)
    assert block.name == "['w'], ['b']"


@pytest.mark.parametrize("block", [curvature_blocks.DenseTwoKroneckerFactored, Newest, Oldest])
def test_devices(block):
    """An update under `shard_map` averages over devices; `sync` then changes nothing."""
    estimator = curvature_estimator.BlockDiagonalCurvature(
        model, layer_tag_to_block_ctor={"dense": block}
    )
    estimator.finalize(ARGS)

    def on_device(params, x):
        state = estimated(estimator, args=(params, x), batch_size=x.shape[0], axis="d")
        return estimator.sync(state, "d")

    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(
        on_device,
        mesh=mesh_of(2, name="d"),
        in_specs=(spec(), spec("d")),
        out_specs=spec(),
        check_vma=False,
    )
    assert_as_plain(estimator, jax.jit(run)(*ARGS))


def test_a_call_that_no_release_has():
    estimator = curvature_estimator.BlockDiagonalCurvature(model)
    estimator.finalize(ARGS)
    (block,) = estimator.blocks
    for args, kwargs in (((), {}), ((1, 2, 3, 4, 5, 6), {"batch_size": 7}), ((1,) * 8, {})):
        with pytest.raises(TypeError, match="takes state, estimation_data, ema_old"):
            block.update_curvature_matrix_estimate(*args, **kwargs)


def test_the_mean_of_registered_losses():
    def normal_model(params, x):
        mean = jnp.sum(x @ params["w"] + params["b"][None, None], axis=1)
        curvax.register_normal_predictive_distribution(mean, 0 * mean, variance=2.0)
        return jnp.mean(jnp.sum(mean**2 / 4 + jnp.log(4 * jnp.pi) / 2, axis=1))

    estimator = curvature_estimator.BlockDiagonalCurvature(normal_model)
    found = estimator.compute_func_from_registered(ARGS, BATCH)
    np.testing.assert_allclose(found, normal_model(*ARGS), rtol=1e-12)


def test_before_the_function_is_traced():
    estimator = curvature_estimator.BlockDiagonalCurvature(model)
    with pytest.raises(ValueError, match="has not been finalized"):
        _ = estimator.blocks
    with pytest.raises(ValueError, match="At least one of `func` and `func_and_grad`"):
        curvature_estimator.BlockDiagonalCurvature()
    with pytest.raises(ValueError, match="Unrecognised default_estimation_mode 'exact'"):
        curvature_estimator.BlockDiagonalCurvature(model, default_estimation_mode="exact")
    estimator.finalize(ARGS)
    assert estimator.jaxpr.layer_indices == ((1, 0),)


def test_default_blocks_of_tags():
    defaults = curvature_estimator
    assert defaults.get_default_tag_to_block_ctor("unknown") is None
    defaults.set_multi_default_tag_to_block_ctor({"unknown": curvature_blocks.DenseFull})
    for name in ("unknown", "unknown_tag"):
        assert defaults.get_default_tag_to_block_ctor(name) is curvature_blocks.DenseFull
