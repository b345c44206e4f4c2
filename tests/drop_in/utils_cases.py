"""Calls of kfac_jax's `utils` that are run with kfac_jax 0.0.8 and with curvax alike.

    .venv-kfac/bin/python tests/drop_in/utils_cases.py > tests/drop_in/utils_values.json

records what kfac_jax returns, on eight virtual devices; `test_utils.py` compares. Each case is a
function of the module `utils` to a pytree of arrays, numbers and strings.
"""

import json
import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

PSD = jnp.array([[2.0, 1.0], [1.0, 3.0]], jnp.float32)
LARGE = jnp.eye(3, dtype=jnp.float32) * 2 + 1
MATRIX = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
ROWS = jnp.arange(16, dtype=jnp.float32).reshape(8, 2)
TREE = {"a": np.ones(4, np.float32), "b": {"c": np.arange(9, dtype=np.float32)}}


def eigen(matrix):
    return jnp.linalg.eigh(matrix)


def average(u):
    made = u.WeightedMovingAverage.zeros_array((2,))
    made.update(jnp.ones(2), 0.9, 0.1)
    made.update(jnp.ones(2) * 3, 0.5, 1.0)
    return made


def chunks(u, multi_device):
    total = u.MultiChunkAccumulator.empty(multi_device)
    shape = (8, 3) if multi_device else (3,)
    total.add({"a": jnp.full(shape, 2.0)}, 3)
    total.add({"a": jnp.full(shape, 4.0)}, 1)
    return total


def keys(u):
    return u.make_different_rng_key_on_all_devices(jax.random.PRNGKey(0))


def serialised(u):
    tree = u.serialize_state_tree({"x": average(u), "y": [jnp.ones(1), (jnp.zeros(2),)]})
    tree["x"].pop("__class__")
    return tree


CASES = {
    "product": lambda u: [u.product([2, 3]), u.product([]), u.product(iter((2.0, 4.0)))],
    "scalar_mul": lambda u: [u.scalar_mul(TREE, 2), u.scalar_div(TREE, 4)],
    "default_add_function": lambda u: u.default_add_function(TREE, TREE, 2.0, 10.0),
    "sum_of_objects": lambda u: u.sum_of_objects([TREE, TREE, TREE]),
    "weighted_sum_of_objects": lambda u: u.weighted_sum_of_objects([TREE, TREE], [2.0, 3.0]),
    "inner_product": lambda u: [u.inner_product(TREE, TREE), u.norm(TREE), u.squared_norm(TREE)],
    "cosine_similarity": lambda u: u.cosine_similarity([PSD], [np.abs(PSD - 1)]),
    "per_parameter_norm": lambda u: u.per_parameter_norm(TREE, "norm"),
    "matrix_of_inner_products": lambda u: u.matrix_of_inner_products([[PSD], [2 * PSD]]),
    "vector_of_inner_products": lambda u: u.vector_of_inner_products([PSD], [[PSD], [2 * PSD]]),
    "symmetric_matrix_inner_products": lambda u: u.symmetric_matrix_inner_products(
        [[PSD], [2 * PSD]], [[PSD], [3 * PSD]]
    ),
    "asymmetric_matrix_inner_products": lambda u: u.asymmetric_matrix_inner_products(
        [[PSD], [2 * PSD]], [[PSD], [3 * PSD]]
    ),
    "abstract_objects_equal": lambda u: [
        u.abstract_objects_equal({"a": PSD}, {"a": 0 * PSD}),
        u.abstract_objects_equal({"a": PSD}, {"a": PSD.astype(int)}),
        u.abstract_objects_equal({"a": PSD}, {"a": PSD.astype(int)}, False),
        u.abstract_objects_equal({"a": PSD}, {"b": PSD}),
    ],
    "pytree_size": lambda u: [u.pytree_size(TREE), u.tree_is_empty({}), u.tree_is_empty(TREE)],
    "first_dim_is_size": lambda u: [
        u.first_dim_is_size(2, PSD, jnp.ones(2)),
        u.first_dim_is_size(2, PSD, jnp.ones(3)),
        u.first_dim_is_size(2),
    ],
    "to_tuple_or_repeat": lambda u: [
        u.to_tuple_or_repeat(2.0, 3),
        u.to_tuple_or_repeat(jnp.arange(3.0), 3),
        u.to_tuple_or_repeat([1, 2], 2),
        u.to_tuple_or_repeat(jnp.arange(12.0).reshape(4, 3), 3),
    ],
    "filter_sequence": lambda u: u.filter_sequence((1, 2, 3), [True, False, True]),
    "replace_char": lambda u: u.replace_char("abc", "XY", 1),
    "default_batch_size_extractor": lambda u: u.default_batch_size_extractor(
        {"a": np.ones((5, 2))}
    ),
    "call_func_with_conditional_kwargs": lambda u: u.call_func_with_conditional_kwargs(
        lambda x, a=1: (x, a), 3, a=5, b=6
    ),
    "fake_element_from_iterator": lambda u: (lambda zeros, rest: [zeros, next(rest), next(rest)])(
        *u.fake_element_from_iterator(iter([PSD, 2 * PSD, 3 * PSD]))
    ),
    "loop_and_parallelize_average": lambda u: [
        u.loop_and_parallelize_average(lambda x: x**2, size)(jnp.arange(5.0)) for size in (1, 2, 9)
    ],
    "psd_inv": lambda u: [u.psd_inv(PSD), u.invert_psd_matrices([PSD, jnp.array([4.0, 9.0])])],
    "psd_solve": lambda u: u.psd_solve(PSD, jnp.array([1.0, 2.0], jnp.float32)),
    "psd_solve_maybe_zero_last_idx": lambda u: [
        u.psd_solve_maybe_zero_last_idx(jnp.asarray(m), jnp.array([1.0, 2.0]))
        for m in (PSD, np.diag([2.0, 0.0]).astype(np.float32))
    ],
    "safe_psd_eigh": lambda u: [np.abs(x) for x in u.safe_psd_eigh(PSD)],
    "safe_psd_eigh, negative": lambda u: u.safe_psd_eigh(-PSD)[0],
    "psd_matrix_norm": lambda u: [
        [u.psd_matrix_norm(jnp.asarray(m), kind) for m in (PSD, PSD[0], PSD[0, 0])]
        for kind in ("avg_diag", "1_norm", "avg_fro")
    ],
    "psd_matrix_norm, spectral": lambda u: u.psd_matrix_norm(
        jnp.diag(jnp.arange(1.0, 13.0)), "2_norm"
    ),
    "pi_adjusted_kronecker_factors": lambda u: [
        u.pi_adjusted_kronecker_factors(*map(jnp.asarray, factors), damping=0.1)
        for factors in FACTORS
    ],
    "pi_adjusted_kronecker_inverse": lambda u: [
        u.pi_adjusted_kronecker_inverse(*map(jnp.asarray, factors), damping=0.1)
        for factors in FACTORS
    ],
    "kronecker_product_mul_v": lambda u: [
        u.kronecker_product_mul_v(PSD, LARGE, MATRIX, symmetric) for symmetric in (True, False)
    ],
    "kronecker_eigen_basis_mul_v": lambda u: u.kronecker_eigen_basis_mul_v(
        eigen(PSD)[1], eigen(LARGE)[1], jnp.outer(eigen(LARGE)[0], eigen(PSD)[0]), MATRIX
    ),
    "kronecker_product_axis_mul_v": lambda u: [
        u.kronecker_product_axis_mul_v([LARGE, PSD], MATRIX),
        u.kronecker_product_axis_mul_v(
            [None, PSD + MATRIX[:2]], MATRIX[1:], transpose=[False, True]
        ),
        u.kronecker_product_axis_mul_v(
            [PSD, jnp.arange(36.0).reshape(6, 6)], jnp.arange(12.0).reshape(2, 2, 3), [[0], [1, 2]]
        ),
    ],
    "kronecker_eigen_basis_axis_mul_v": lambda u: u.kronecker_eigen_basis_axis_mul_v(
        [eigen(LARGE)[1], eigen(PSD)[1]],
        jnp.outer(eigen(LARGE)[0], eigen(PSD)[0]),
        MATRIX,
    ),
    "tnt_scale": lambda u: [u.tnt_scale([PSD * k for k in range(1, n + 1)]) for n in (1, 2, 3)],
    "outer_product": lambda u: u.outer_product(jnp.arange(2.0), jnp.arange(3.0), jnp.arange(4.0)),
    "block_permuted": lambda u: u.block_permuted(jnp.arange(9.0).reshape(3, 3), [1, 2], [1, 0]),
    "rearrange": lambda u: [
        u.rearrange(jnp.arange(24.0).reshape(2, 3, 4), spec)
        for spec in ("a b c -> c a b", "a b c -> (b a) c", "a b c -> b (c a)")
    ],
    "stable_sqrt": lambda u: [
        [u.stable_sqrt(x), jax.grad(u.stable_sqrt)(x)] for x in (0.0, 1e-12, 4.0)
    ],
    "WeightedMovingAverage": lambda u: [average(u).value, average(u).weight, average(u).shape],
    "WeightedMovingAverage, cleared": lambda u: [
        (made := average(u)).value_and_clear(),
        made.value,
        made.weight,
    ],
    "WeightedMovingAverage, made": lambda u: u.WeightedMovingAverage(2.0, jnp.arange(3.0)).value,
    "MultiChunkAccumulator": lambda u: [chunks(u, False).value, chunks(u, False).accumulator],
    "MultiChunkAccumulator, devices": lambda u: chunks(u, True).value,
    "serialize_state_tree": serialised,
    "make_different_rng_key_on_all_devices": keys,
    "p_split": lambda u: [u.p_split(keys(u)), u.p_split_num(keys(u), 3)],
    "replicate_all_local_devices": lambda u: u.replicate_all_local_devices({"a": jnp.arange(3.0)}),
    "broadcast_all_local_devices": lambda u: u.broadcast_all_local_devices({"a": ROWS}),
    "get_first": lambda u: [u.get_first(ROWS), u.get_mean(ROWS), u.get_sum(ROWS)],
    "pmap_mean": lambda u: [u.pmap_mean(ROWS), u.pmap_sum(ROWS), u.pmap_zeros_like(ROWS)],
    "pmap_sync_and_divide_value": lambda u: u.pmap_sync_and_divide_value(ROWS, jnp.full(8, 2.0)),
    "jit_sync_and_divide_value": lambda u: u.jit_sync_and_divide_value(PSD, 2.0),
    "host_mean": lambda u: [u.host_mean(PSD), u.host_all_gather(PSD)],
    "in_pmap": lambda u: [
        u.in_pmap("x"),
        u.in_pmap(None),
        jax.pmap(lambda x: jnp.asarray(u.in_pmap("x")), axis_name="x")(jnp.ones(2)),
    ],
    "pmean_if_pmap": lambda u: [
        u.pmean_if_pmap(PSD, "x"),
        u.psum_if_pmap(PSD, None),
        jax.pmap(lambda x: u.psum_if_pmap(x, "x"), axis_name="x")(PSD),
    ],
    "distribute_thunks": lambda u: jax.pmap(
        lambda x: u.distribute_thunks([lambda: x * 0 + 1, lambda: 2 * jnp.ones(3)], "i"),
        axis_name="i",
    )(jnp.ones(2)),
    "copy_obj": lambda u: [u.copy_obj(TREE), u.copy_array(jnp.ones(2)), u.jit_zeros_like(TREE)],
}
FACTORS = [
    (PSD, 2 * PSD),
    (PSD, 2 * PSD, 5 * PSD),
    (PSD, PSD[0]),
    (PSD, PSD[1, 1]),
    (PSD[0, 0], PSD[1, 1]),
    (PSD[:1, 0], PSD),
    (PSD,),
    (PSD, 0 * PSD),
    (PSD, np.nan * PSD),
]


def plain(tree):
    """Return a result as nested lists, numbers and strings."""
    if isinstance(tree, dict):
        return {key: plain(x) for key, x in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(x) for x in tree]
    return tree if isinstance(tree, str) else np.asarray(tree).tolist()


if __name__ == "__main__":
    from kfac_jax import utils

    json.dump({name: plain(case(utils)) for name, case in CASES.items()}, sys.stdout, indent=1)
