"""Options of estimators: norms of blocks, direct empirical modes, vmapped samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from helpers import mesh_of

KEY = jax.random.key(0)
BATCH, INPUTS, HIDDEN, OUTPUTS = 4, 3, 2, 2


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


PARAMS = {"a": normal(0, INPUTS, HIDDEN), "b": normal(1, HIDDEN, OUTPUTS)}
X, Y = normal(2, BATCH, INPUTS), normal(3, BATCH, OUTPUTS)
ARGS = (PARAMS, (X, Y))
NAIVE = {"dense": curvax.NaiveDiagonal}


def loss(params, batch):
    x, y = batch
    prediction = jnp.tanh(x @ params["a"]) @ params["b"]
    curvax.register_squared_error_loss(prediction, y)
    return jnp.mean(jnp.sum((prediction - y) ** 2, axis=1))


def estimated(estimator, mode="ggn_exact", args=ARGS, axis=None, size=BATCH):
    state = estimator.init(KEY, args, None, -1)
    return estimator.update_curvature_matrix_estimate(
        state, 0.0, 1.0, size, KEY, args, axis, mode, identity_weight=0.1
    )


BLOCKS = [
    curvax.DenseTwoKroneckerFactored,
    curvax.DenseFull,
    curvax.DenseDiagonal,
    curvax.ScaledIdentity,
    curvax.DenseEKFAC,
]


@pytest.mark.parametrize("block", BLOCKS)
def test_norms_are_those_of_the_dense_matrix(block):
    estimator = curvax.BlockDiagonalCurvature(loss, layer_tag_to_block_ctor={"dense": block})
    estimator.finalize(ARGS)

    def norms(*args):
        state = estimated(estimator, args=args)
        names = ("avg_diag", "1_norm", "2_norm", "avg_fro")
        found = [estimator.block_norms(state, name) for name in names]
        return estimator.to_diagonal_block_dense_matrix(state), found

    matrices, found = jax.jit(norms)(*ARGS)
    for k, matrix in enumerate(map(np.asarray, matrices)):
        expected = [
            np.mean(np.diag(matrix)),
            np.max(np.sum(np.abs(matrix), 0)),
            np.max(np.linalg.eigvalsh(matrix)),
            np.linalg.norm(matrix) / np.sqrt(len(matrix)),
        ]
        np.testing.assert_allclose([each[k] for each in found], expected, rtol=1e-10)


def test_damping_in_proportion_to_norms():
    """The option equals one identity weight for each block, times the norm of the block."""
    estimator = curvax.BlockDiagonalCurvature(loss)
    estimator.finalize(ARGS)

    def both(*args):
        state = estimated(estimator, args=args)
        weights = [0.1 * norm for norm in estimator.block_norms(state, "avg_fro")]
        scaled = {"norm_to_scale_identity_weight_per_block": "avg_fro"}
        found = []
        for weight, option in ((0.1, scaled), (weights, {})):
            cached = estimator.update_cache(state, weight, None, -1, False, None, **option)
            how = (False, False, None)
            found.append(estimator.multiply_inverse(cached, PARAMS, 0.0, False, True, None))
            found.append(estimator.multiply_inverse(state, PARAMS, weight, *how, **option))
        return found

    found = jax.jit(both)(*ARGS)
    for other in found[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), found[0], other)


def test_an_unknown_norm():
    estimator = curvax.BlockDiagonalCurvature(loss)
    state = estimator.init(KEY, ARGS, None, None)
    with pytest.raises(ValueError, match="Unrecognized norm type: 'trace'"):
        estimator.block_norms(state, "trace")


@pytest.mark.parametrize("is_given", [False, True])
def test_the_gradient_itself(is_given):
    doubled = lambda *args: (0.0, jax.tree.map(lambda g: 2 * g, jax.grad(loss)(*args)))
    estimator = curvax.BlockDiagonalCurvature(
        loss, layer_tag_to_block_ctor=NAIVE, func_and_grad=doubled if is_given else None
    )
    state = jax.jit(lambda *args: estimated(estimator, "fisher_empirical_direct", args))(*ARGS)
    gradient = jax.tree.leaves(jax.grad(loss)(*ARGS))
    for block, g in zip(state.blocks_states, gradient, strict=True):
        expected = ((2 if is_given else 1) * g) ** 2 / BATCH
        np.testing.assert_allclose(block.diagonal_factors[0].value, expected, rtol=1e-12)


@pytest.mark.parametrize("mode", ["fisher_empirical_direct", "fisher_empirical_direct_synced"])
def test_the_gradient_itself_on_devices(mode):
    """Gradients of devices are squared and averaged; synced ones averaged and squared."""
    estimator = curvax.BlockDiagonalCurvature(loss, layer_tag_to_block_ctor=NAIVE)
    estimator.finalize(ARGS)
    spec = jax.sharding.PartitionSpec
    run = lambda params, batch: estimated(estimator, mode, (params, batch), "d", BATCH // 2)
    state = jax.jit(
        jax.shard_map(
            run, mesh=mesh_of(2, name="d"), in_specs=(spec(), spec("d")), out_specs=spec()
        )
    )(*ARGS)
    halves = [
        jax.tree.leaves(jax.grad(loss)(PARAMS, (X[part], Y[part])))
        for part in (slice(0, 2), slice(2, 4))
    ]
    for block, one, other in zip(state.blocks_states, *halves, strict=True):
        if mode.endswith("synced"):
            square = ((one + other) / 2) ** 2
        else:
            square = (one**2 + other**2) / 2
        expected = square / (BATCH // 2)
        np.testing.assert_allclose(block.diagonal_factors[0].value, expected, rtol=1e-12)


def test_blocks_that_need_more_than_the_gradient():
    estimator = curvax.BlockDiagonalCurvature(loss)
    with pytest.raises(ValueError, match=r"no inputs of layers.*\['a'\], \['b'\] need more"):
        estimated(estimator, "fisher_empirical_direct")
    exact = curvax.ExplicitExactCurvature(loss)
    with pytest.raises(ValueError, match="Use fisher_empirical"):
        estimated(exact, "fisher_empirical_direct")


@pytest.mark.parametrize("mode", ["fisher_gradients", "ggn_curvature_prop"])
def test_vmapped_samples(mode):
    found = []
    for should_vmap in (False, True):
        estimator = curvax.BlockDiagonalCurvature(
            loss, num_samples=3, should_vmap_samples=should_vmap
        )
        run = lambda *args, e=estimator: e.to_dense_matrix(estimated(e, mode, args))
        found.append(jax.jit(run)(*ARGS))
    np.testing.assert_allclose(*found, rtol=1e-12, atol=1e-14)


def test_blocks_for_a_tag_that_the_function_does_not_use():
    blocks = {"my_own": curvax.DenseFull}
    estimator = curvax.BlockDiagonalCurvature(loss, layer_tag_to_block_ctor=blocks)
    estimator.finalize(ARGS)
    assert estimator.num_blocks == 2
