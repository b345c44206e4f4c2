"""Curvature blocks and estimators that are run with kfac_jax 0.0.8 and with curvax alike.

    .venv-kfac/bin/python tests/drop_in/blocks_cases.py > tests/drop_in/blocks_values.json

records what kfac_jax returns; `test_blocks.py` compares. Each case is a function of the module
`kfac_jax` to a pytree of arrays and numbers.
"""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DAMPING = 0.1
FLAGS = (False, True)
# kfac_jax computes "2_norm" of large matrices only.
NORMS = ("avg_diag", "1_norm", "avg_fro")


def normal(seed, *shape):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def squared_error(k, prediction, y):
    k.register_squared_error_loss(prediction, y)
    return jnp.mean(jnp.sum((prediction - y) ** 2, axis=-1))


def dense(k, params, batch):
    x, y = batch
    return squared_error(k, jnp.tanh(x @ params["w"] + params["b"]), y)


def without_bias(k, params, batch):
    x, y = batch
    return squared_error(k, jnp.tanh(x @ params["w"]), y)


def conv(k, params, batch):
    x, y = batch
    layout = ("NHWC", "HWIO", "NHWC")
    z = lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=layout)
    z = z + params["b"]
    return squared_error(k, jnp.tanh(jnp.sum(jnp.tanh(z), axis=(1, 2))), y)


def scale_and_shift(k, params, batch):
    x, y = batch
    return squared_error(k, jnp.tanh(x * params["scale"] + params["shift"]), y)


@dataclasses.dataclass
class Model:
    """A function of parameters and a batch, these two, and the tag of its only layer."""

    function: callable
    params: dict
    batch: tuple
    tag: str

    @property
    def size(self):
        return len(self.batch[0])


DENSE = Model(
    dense,
    {"w": normal(0, 3, 2), "b": normal(1, 2)},
    (normal(2, 5, 3), normal(3, 5, 2)),
    "dense",
)
# A factor of size one, and one without a bias.
SINGLE_OUTPUT = Model(
    dense, {"w": normal(0, 3, 1), "b": normal(1, 1)}, (normal(2, 5, 3), normal(3, 5, 1)), "dense"
)
NO_BIAS = Model(without_bias, {"w": normal(0, 3, 2)}, DENSE.batch, "dense")
# Of one example, so that the gradient of the batch is that of an example.
ONE_EXAMPLE = Model(dense, DENSE.params, jax.tree.map(lambda x: x[:1], DENSE.batch), "dense")
CONV = Model(
    conv,
    {"w": normal(0, 2, 2, 2, 2), "b": normal(1, 2)},
    (normal(2, 3, 3, 3, 2), normal(3, 3, 2)),
    "conv2d",
)
SCALE_AND_SHIFT = Model(
    scale_and_shift,
    {"scale": normal(0, 3), "shift": normal(1, 3)},
    (normal(2, 5, 3), normal(3, 5, 3)),
    "scale_and_shift",
)


def updated(k, model, block, mode="ggn_exact", **options):
    """Return an estimator with this block, and its state after two updates."""
    func = functools.partial(model.function, k)
    estimator = k.BlockDiagonalCurvature(
        func, layer_tag_to_block_ctor={model.tag: block}, **options
    )
    estimator.finalize((model.params, model.batch))

    def run(params, batch):
        key = jax.random.PRNGKey(0)
        state = estimator.init(key, (params, batch), -1, -1, True)
        for scale in (1.0, 0.5):
            args = params, (batch[0] * np.float32(scale), batch[1])
            state = estimator.update_curvature_matrix_estimate(
                state, 0.9, 0.1, DAMPING, model.size, key, args, mode
            )
        return estimator.update_cache(state, DAMPING, -1, -1, True, None)

    return estimator, jax.jit(run)(model.params, model.batch)


def averages(k, state):
    is_average = lambda x: isinstance(x, k.utils.WeightedMovingAverage)
    found = jax.tree.leaves(state, is_leaf=is_average)
    return [x for x in found if is_average(x)]


def described(k, estimator, state, norms=NORMS):
    """Return what can be asked of an estimator with one block."""
    return jax.jit(lambda state: _described(k, estimator, state, norms))(state)


def _described(k, estimator, state, norms):
    (block,), (block_state,) = estimator.blocks, state.blocks_states
    params = estimator.blocks_vectors_to_params_vector(
        [[jnp.asarray(normal(7 + n, *s)) for n, s in enumerate(block.parameters_shapes)]]
    )
    product = lambda *how: estimator.multiply_matpower(state, params, DAMPING, *how, None)
    return {
        "averages": [
            [x.value, x.weight] for x in averages(k, dataclasses.replace(block_state, cache={}))
        ],
        "dense": estimator.to_dense_matrix(state),
        "eigenvalues": [
            jnp.sort(block.eigenvalues(block_state, cached).reshape(-1)) for cached in FLAGS
        ],
        "scale": [block.scale(block_state, cached) for cached in FLAGS],
        "norms": [block.norm(block_state, name) for name in norms],
        "product": product(1, True, False),
        "inverse": [product(-1, exact, cached) for exact in FLAGS for cached in FLAGS],
        "shapes": [block.parameters_shapes, block.inputs_shapes, block.outputs_shapes, block.dim],
    }


def block_case(model, name, mode="ggn_exact", norms=NORMS, **options):
    def case(k):
        ctor = functools.partial(getattr(k, name), **options) if options else getattr(k, name)
        return described(k, *updated(k, model, ctor, mode), norms)

    return case


def scaled_by_norm(model, name):
    """Return products with damping in proportion to a norm of the block."""

    def case(k):
        estimator, state = updated(k, model, getattr(k, name))
        how = (model.params, DAMPING, False, False, None)
        return [estimator.multiply_inverse(state, *how, norm) for norm in NORMS]

    return case


def undamped_diagonal(k):
    estimator, state = updated(k, DENSE, k.DenseFull)
    return estimator.undamped_diagonal(state)


def explicit(k):
    func = functools.partial(dense, k)
    args = jax.tree.map(jnp.asarray, (DENSE.params, DENSE.batch))
    found = []
    for options in ({}, {"param_order": (1, 0)}):
        estimator = k.ExplicitExactCurvature(func, **options)
        key = jax.random.PRNGKey(0)
        state = estimator.init(key, args, -1, None)
        state = estimator.update_curvature_matrix_estimate(
            state, 0.0, 1.0, DAMPING, DENSE.size, key, args, "ggn_exact"
        )
        found.append(estimator.to_dense_matrix(state))
        found.append(estimator.undamped_diagonal(state))
        found.append(estimator.multiply_inverse(state, DENSE.params, DAMPING, True, False, None))
        found.append(estimator.param_order)
    return found


def implicit(k):
    curvature = k.ImplicitExactCurvature(functools.partial(dense, k))
    args, vector = (DENSE.params, DENSE.batch), DENSE.params
    ones = jnp.ones((5, 2), jnp.float32)
    product, losses = curvature.multiply_jacobian(args, vector, True)
    return [
        curvature.batch_size(args),
        curvature.get_loss_inner_vector_shapes_and_batch_size(args, "ggn"),
        curvature.get_loss_input_shapes_and_batch_size(args),
        curvature.multiply_ggn(args, vector),
        curvature.multiply_hessian(args, vector),
        curvature.multiply_fisher(args, vector),
        curvature.multiply_ggn_factor(args, [ones]),
        curvature.multiply_fisher_factor(args, [ones]),
        curvature.multiply_ggn_factor_transpose(args, vector),
        curvature.multiply_fisher_factor_transpose(args, vector),
        product,
        curvature.multiply_jacobian_transpose(args, ((ones,),)),
        curvature.multiply_loss_ggn(losses, ((ones,),)),
        curvature.multiply_loss_fisher(losses, ((ones,),)),
        curvature.multiply_loss_ggn_factor(losses, (ones,)),
        curvature.multiply_loss_fisher_factor(losses, (ones,)),
        curvature.multiply_loss_ggn_factor_transpose(losses, ((ones,),)),
        curvature.multiply_loss_fisher_factor_transpose(losses, ((ones,),)),
    ]


def properties(k):
    estimator, state = updated(k, DENSE, k.DenseTwoKroneckerFactored)
    (block,) = estimator.blocks
    return [
        estimator.block_dims,
        estimator.num_blocks,
        estimator.dim,
        estimator.num_params_variables,
        estimator.params_block_index,
        estimator.params_structure_vector_of_indices,
        [list(indices) for indices in estimator.indices_to_block_map],
        estimator.param_order,
        block.array_shape,
        block.array_ndim,
        block.number_of_parameters,
        block.parameters_canonical_order,
        block.parameters_shaped_list_to_array([jnp.asarray(DENSE.params[k]) for k in "wb"]),
        estimator.sync(state, None).blocks_states[0].factors[0].value,
    ]


def of_convolution(k):
    estimator, _ = updated(k, CONV, k.Conv2DTwoKroneckerFactored)
    (block,) = estimator.blocks
    images, weights = jnp.asarray(CONV.batch[0]), jnp.asarray(normal(8, 3, 3, 3) ** 2)
    names = ("inputs_channel_index", "inputs_spatial_shape", "kernel_output_axis")
    names += ("num_inputs_channels", "num_locations", "num_outputs_channels")
    names += ("outputs_channel_index", "weights_output_channel_index")
    names += ("weights_spatial_shape", "weights_spatial_size", "array_shape")
    return [
        [getattr(block, name) for name in names],
        block.output_size(),
        block.compute_inputs_stats(images),
        block.compute_inputs_stats(images, weights),
        block.compute_inputs_stats(images, weights[:, 0, 0]),
        block.compute_outputs_stats(jnp.asarray(normal(9, 3, 3, 3, 2))),
    ]


def rearranged(k):
    """A block whose parameters have specifications of their own, and more than two factors."""
    specs = ["abcd -> (ab)cd"]  # The kernel (2, 2, 2, 2) becomes (4, 2, 2).
    model = dataclasses.replace(CONV, function=without_conv_bias, params={"w": CONV.params["w"]})
    one = jax.tree.map(lambda x: x[:1], model.batch)
    model = dataclasses.replace(model, batch=one)
    block = functools.partial(k.NaiveTNT, parameters_specs=specs)
    found = described(k, *updated(k, model, block))
    del found["dense"]  # That of kfac_jax has the wrong shape.
    return found


def without_conv_bias(k, params, batch):
    return conv(k, {"w": params["w"], "b": np.zeros(2, np.float32)}, batch)


def repeated(k, masks, **options):
    """The data of a layer with positions, some of which are masked, passed to the block itself."""
    estimator, _ = updated(k, DENSE, functools.partial(k.RepeatedDenseKroneckerFactored, **options))
    (block,) = estimator.blocks
    state = block.init(jax.random.PRNGKey(0), None, -1, False)
    for seed in (0, 1):
        x, g = normal(seed, 4, 3, 2, 3), normal(seed + 2, 4, 3, 2, 2)
        if masks:
            g[0, 1], g[2], g[1, 2, 0, 0] = 0, 0, 0
        state = block.update_curvature_matrix_estimate(state, data(k, x, g), 0.9, 0.1, 0.0, 4)
    values = [state.factors[0].value, state.factors[1].value, state.average_repeats.value]
    state = block.update_cache(state, DAMPING, None, -1, False)
    vector = [jnp.asarray(DENSE.params["w"]), jnp.asarray(DENSE.params["b"])]
    values += block.multiply_inverse(state, vector, DAMPING, False, True)
    return [*values, block.scale(state, False), block.to_dense_matrix(state)]


def data(k, x, g):
    x, g = jnp.asarray(x), jnp.asarray(g)
    layer = functools.partial(k.LayerData, params=())
    return k.LayerVjpData(
        primals=layer(inputs=(x,), outputs=(g,)), tangents=layer(inputs=(), outputs=(g,))
    )


def convolution_tnt(weighting_per_location):
    return lambda k: described(
        k,
        *updated(
            k,
            CONV,
            functools.partial(k.Conv2DTNT, weighting_per_location=weighting_per_location),
        ),
    )


CASES = {
    "DenseTwoKroneckerFactored": block_case(DENSE, "DenseTwoKroneckerFactored"),
    "DenseTwoKroneckerFactored, one output": block_case(SINGLE_OUTPUT, "DenseTwoKroneckerFactored"),
    "DenseTwoKroneckerFactored, no bias": block_case(NO_BIAS, "DenseTwoKroneckerFactored"),
    "DenseDiagonal": block_case(DENSE, "DenseDiagonal"),
    "DenseFull": block_case(DENSE, "DenseFull"),
    "NaiveDiagonal": block_case(ONE_EXAMPLE, "NaiveDiagonal"),
    "NaiveFull": block_case(ONE_EXAMPLE, "NaiveFull"),
    "NaiveDiagonal, direct": block_case(DENSE, "NaiveDiagonal", "fisher_empirical_direct"),
    "NaiveFull, direct": block_case(DENSE, "NaiveFull", "fisher_empirical_direct_synced"),
    "ScaledIdentity": block_case(DENSE, "ScaledIdentity", scale=3.0),
    "Conv2DTwoKroneckerFactored": block_case(CONV, "Conv2DTwoKroneckerFactored"),
    "Conv2DDiagonal": block_case(CONV, "Conv2DDiagonal"),
    "Conv2DFull": block_case(CONV, "Conv2DFull"),
    "ScaleAndShiftDiagonal": block_case(SCALE_AND_SHIFT, "ScaleAndShiftDiagonal"),
    "ScaleAndShiftFull": block_case(SCALE_AND_SHIFT, "ScaleAndShiftFull"),
    "RepeatedDenseKroneckerFactored": block_case(DENSE, "RepeatedDenseKroneckerFactored"),
    "RepeatedDenseKroneckerFactored, positions": functools.partial(repeated, masks=False),
    "RepeatedDenseKroneckerFactored, masks": functools.partial(repeated, masks=True),
    "RepeatedDenseKroneckerFactored, masks ignored": functools.partial(
        repeated, masks=True, use_masking=False
    ),
    "NaiveTNT": block_case(ONE_EXAMPLE, "NaiveTNT"),
    "NaiveTNT, direct": block_case(DENSE, "NaiveTNT", "fisher_empirical_direct"),
    "NaiveTNT, three factors": rearranged,
    "DenseTNT": block_case(DENSE, "DenseTNT"),
    "Conv2DTNT": convolution_tnt(True),
    "Conv2DTNT, weights of examples": convolution_tnt(False),
    "DenseTwoKroneckerFactored, empirical": block_case(
        DENSE, "DenseTwoKroneckerFactored", "fisher_empirical"
    ),
    "DenseDiagonal, empirical": block_case(DENSE, "DenseDiagonal", "fisher_empirical"),
    "NaiveFull, empirical": block_case(ONE_EXAMPLE, "NaiveFull", "fisher_empirical"),
    "undamped_diagonal": undamped_diagonal,
    "ExplicitExactCurvature": explicit,
    "ImplicitExactCurvature": implicit,
    "properties": properties,
    "properties of a convolution": of_convolution,
    "damping by norms": scaled_by_norm(DENSE, "DenseTwoKroneckerFactored"),
    "damping by norms, diagonal": scaled_by_norm(DENSE, "DenseDiagonal"),
}


def plain(tree):
    """Return a result as nested lists and numbers, rounded to six digits."""
    if isinstance(tree, dict):
        return {key: plain(x) for key, x in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(x) for x in tree]
    return np.vectorize(lambda x: float(f"{x:.6g}"))(np.asarray(tree, float)).tolist()


if __name__ == "__main__":
    import kfac_jax
    from kfac_jax import layers_and_loss_tags

    kfac_jax.LayerData = layers_and_loss_tags.LayerData
    values = {name: plain(case(kfac_jax)) for name, case in CASES.items()}
    json.dump(values, sys.stdout, separators=(",", ":"))
