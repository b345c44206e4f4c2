"""Weights with their bias, or a scale with its shift, that are parts of one parameter.

The curvature of a parameter is that of all its uses together. The oracle is the Gauss-Newton matrix
from Jacobians of single examples, restricted to the parameters of each block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from jax import lax
from jax.flatten_util import ravel_pytree

import curvax
from curvature.cases import biased, normal
from helpers import key

N = 5
X = normal(0, N, 3)
KNOWN = ("dense_tag", "scale_and_shift_tag", "conv_tag", "embedding_tag")
FULL = dict.fromkeys(KNOWN, curvax.DenseFull) | {"scale_and_shift_tag": curvax.ScaleAndShiftFull}


class Case(NamedTuple):
    """A function of parameters and inputs; `tag` is what `params["w"]` is registered as."""

    name: str
    apply: Callable[[Any, Any], Any]
    params: dict[str, jax.Array]
    tag: str = "dense_tag"


def scaled(x: jax.Array, s: jax.Array) -> jax.Array:
    return x * jnp.broadcast_to(s, x.shape)


def scanned(p: Any, x: Any) -> Any:
    step = lambda h, w: (jnp.tanh(biased(h @ w[:3], w[3])), None)
    return lax.scan(step, x, p["w"])[0]


def recurrent(p: Any, x: Any) -> Any:
    step = lambda h, t: (jnp.tanh(biased(h @ p["w"][:2], p["w"][2]) + t[:, None]), None)
    return lax.scan(step, jnp.zeros((x.shape[0], 2)), x.T)[0]


def concatenated(p: Any, x: Any) -> Any:
    weights = jnp.concatenate([p["v"][:3], p["w"][:3]], 1)
    return jnp.tanh(biased(x @ weights, jnp.concatenate([p["v"][3], p["w"][3]])))


def convolved(p: Any, x: Any) -> Any:
    images, kernel = jnp.stack([x, x**2], 2), p["w"][:12].reshape(2, 2, 3)
    layout = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(images, kernel, (1,), "SAME", dimension_numbers=layout)
    return biased(y, p["w"][12:])


def looked_up(p: Any, x: Any) -> Any:
    rows = (x[:, 0] > 0).astype(jnp.int32) + (x[:, 1] > 0).astype(jnp.int32)
    return jnp.tanh(biased(p["w"][:3][rows], p["w"][3]))


def looked_up_and_convolved(p: Any, x: Any) -> Any:
    rows = (x > 0).astype(jnp.int32) + (x > 1).astype(jnp.int32)
    images, kernel = p["w"][:6].reshape(3, 2)[rows], p["w"][6:18].reshape(2, 2, 3)
    layout = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(images, kernel, (1,), "SAME", dimension_numbers=layout)


MATRIX = {"w": normal(1, 4, 2)}
PAIR = {"v": normal(2, 4, 3), "w": normal(3, 4, 3)}
CASES = [
    Case("the last row is the bias", lambda p, x: biased(x @ p["w"][:3], p["w"][3]), MATRIX),
    Case(
        "for each example",
        lambda p, x: jax.vmap(lambda x: p["w"][:3].T @ x + p["w"][3])(x),
        MATRIX,
    ),
    Case(
        "two biases",
        lambda p, x: biased(biased(x @ p["w"][:3], p["w"][3]), p["w"][4]),
        {"w": normal(1, 5, 2)},
    ),
    Case(
        "a row of the weights is the bias",
        lambda p, x: jnp.tanh(biased(x @ p["w"], p["w"][0])),
        {"w": normal(1, 3, 2)},
        "generic_tag",
    ),
    Case(
        "scale and shift",
        lambda p, x: biased(scaled(x, p["w"][0]), p["w"][1]),
        {"w": normal(1, 2, 3)},
        "scale_and_shift_tag",
    ),
    Case(
        "the scale is the shift",
        lambda p, x: biased(scaled(x, p["w"]), p["w"]),
        {"w": normal(1, 3)},
        "scale_and_shift_tag",
    ),
    Case(
        "an element of the scale is the shift",
        lambda p, x: biased(scaled(x, p["w"]), p["w"][0]),
        {"w": normal(1, 3)},
        "generic_tag",
    ),
    Case("a stack", scanned, {"w": normal(1, 2, 4, 3)}),
    Case("a recurrent layer", recurrent, {"w": normal(1, 3, 2)}),
    Case("concatenated layers", concatenated, PAIR),
    Case(
        "each has the bias of the other",
        lambda p, x: biased(jnp.tanh(biased(x @ p["v"][:3], p["w"][3])) @ p["w"][:3], p["v"][3]),
        PAIR,
    ),
    Case(
        "the bias of one layer is among the weights of the next",
        lambda p, x: biased(jnp.tanh(biased(x @ p["u"], p["w"][3])) @ p["w"][:3], p["v"]),
        {"u": normal(1, 3, 3), "v": normal(2, 3), "w": normal(3, 4, 3)},
    ),
    Case(
        "the bias of one layer is all the weights of the next",
        lambda p, x: (jnp.tanh(biased(x @ p["z"], p["w"])) @ p["w"])[:, None] + p["x"],
        {"w": normal(1, 3), "x": normal(2, 1, 1), "z": normal(3, 3, 3)},
        "generic_tag",
    ),
    Case("a convolution", convolved, {"w": normal(1, 15)}, "conv_tag"),
    Case("a table", looked_up, MATRIX, "embedding_tag"),
    Case(
        "a table and a convolution", looked_up_and_convolved, {"w": normal(1, 18)}, "embedding_tag"
    ),
]
BY_NAME = {case.name: case for case in CASES}


def loss_of(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    def loss(params: Any, x: Any) -> None:
        prediction = apply(params, x).reshape(x.shape[0], -1)
        curvax.register_squared_error_loss(prediction, weight=0.5)

    return loss


def gauss_newton(apply: Callable[[Any, Any], Any], params: Any, x: Any) -> np.ndarray:
    flat, unflatten = ravel_pytree(params)
    of_example = lambda p, x: apply(unflatten(p), x[None]).reshape(-1)
    j = jax.jit(jax.vmap(jax.jacfwd(of_example), (None, 0)))(flat, x)
    return np.einsum("noi,noj->ij", j, j) / len(x)


def estimated(apply: Callable[[Any, Any], Any], params: Any, x: Any, **options: Any) -> Any:
    """An estimator, its state after one batch, and what the function is registered as."""
    loss = loss_of(apply)
    report = curvax.explain_registration(loss, (params, x))
    present = {row.tag for row in report.rows}
    ctors = options.pop("ctors", {})
    estimator = curvax.BlockDiagonalCurvature(
        loss,
        default_estimation_mode="ggn_exact",
        layer_tag_to_block_ctor={tag: ctor for tag, ctor in ctors.items() if tag in present},
    )
    state = estimator.init(key(), (params, x), None, None)

    @jax.jit  # One program takes less time to compile than its operations one by one.
    def update(state: Any, params: Any, x: Any) -> Any:
        args = (state, 0.0, 1.0, len(x), key(1), (params, x), None)
        return estimator.update_curvature_matrix_estimate(*args)

    return estimator, update(state, params, x), report


def rows_of(params: Any, indices: tuple[int, ...]) -> np.ndarray:
    """Where the elements of some parameters are in the whole matrix."""
    stops = np.cumsum([0, *(x.size for x in jax.tree.leaves(params))])
    return np.concatenate([np.arange(stops[n], stops[n + 1]) for n in indices])


def check_blocks(estimator: Any, params: Any) -> None:
    """Each parameter is in one block, once."""
    indices = [n for block in estimator.indices_to_block_map for n in block]
    assert sorted(indices) == list(range(len(params)))
    assert estimator.dim == sum(x.size for x in params.values())


def check_products(estimator: Any, state: Any, params: Any) -> np.ndarray:
    """Products and inverses are those of the matrix, which is PSD. Returns the matrix."""
    vector = jax.tree.map(lambda p: normal(9, *p.shape), params)

    @jax.jit
    def products(state: Any, vector: Any) -> Any:
        how = (0.1, True, False, None)
        solved = estimator.multiply_inverse(state, vector, *how)
        return estimator.to_dense_matrix(state), solved, estimator.multiply(state, vector, *how)

    matrix, solved, product = products(state, vector)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-13)
    assert np.linalg.eigvalsh(matrix).min() > -1e-12
    flat, damped = ravel_pytree(vector)[0], matrix + 0.1 * np.eye(len(matrix))
    np.testing.assert_allclose(ravel_pytree(solved)[0], np.linalg.solve(damped, flat), atol=1e-9)
    np.testing.assert_allclose(ravel_pytree(product)[0], damped @ flat, atol=1e-9)
    return matrix


@pytest.mark.parametrize("name", BY_NAME)
def test_full_blocks_are_exact(name):
    """Or the parameter is generic, which the report says."""
    _, apply, params, tag = BY_NAME[name]
    estimator, state, report = estimated(apply, params, X, ctors=FULL)
    check_blocks(estimator, params)
    matrix, truth = np.asarray(estimator.to_dense_matrix(state)), gauss_newton(apply, params, X)
    tags = {row.path[2:-2]: row.tag for row in report.rows}
    assert tags["w"] == tag
    for own in estimator.indices_to_block_map:
        if report.rows[own[0]].tag != "generic_tag":
            rows = rows_of(params, own)
            part = np.ix_(rows, rows)
            np.testing.assert_allclose(matrix[part], truth[part], atol=1e-12 * np.abs(truth).max())
        else:
            assert "do not go together" in report.rows[own[0]].reason


@pytest.mark.parametrize("name", ["the last row is the bias", "a stack", "a table"])
def test_default_blocks_are_matrices(name):
    _, apply, params, _ = BY_NAME[name]
    estimator, state, _ = estimated(apply, params, X)
    check_blocks(estimator, params)
    check_products(estimator, state, params)


def flat_network(sizes: tuple[int, int, int], order: tuple[str, ...], gaps: tuple[int, ...]) -> Any:
    """A network of two layers whose arrays are cut from one vector, in some order, with gaps.

    Returns the network, the length of the vector, and where each array is in it.
    """
    inputs, hidden, outputs = sizes
    shapes = {
        "w1": (inputs, hidden),
        "b1": (hidden,),
        "s": (hidden,),
        "w2": (hidden, outputs),
        "b2": (outputs,),
    }
    bounds, stop = {}, 0
    for name, gap in zip(order, gaps, strict=True):
        start = stop + gap
        stop = start + int(np.prod(shapes[name]))
        bounds[name] = (start, stop)

    def apply(params: Any, x: Any) -> Any:
        p = {
            name: params["w"][start:stop].reshape(shapes[name])
            for name, (start, stop) in bounds.items()
        }
        h = x[:, :inputs] @ p["w1"]
        h = jnp.tanh(biased(h, p["b1"]) if "b1" in p else h)
        z = (scaled(h, p["s"]) if "s" in p else h) @ p["w2"]
        return biased(z, p["b2"]) if "b2" in p else z

    return apply, stop, bounds


@st.composite
def flat_networks(draw: Any) -> Any:
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=3, max_size=3)))
    optional = draw(st.sets(st.sampled_from(["b1", "s", "b2"]), min_size=1))
    order = tuple(draw(st.permutations(["w1", "w2", *sorted(optional)])))
    return sizes, order, tuple(draw(st.integers(0, 1)) for _ in order)


@given(flat_networks())
@example(((3, 2, 2), ("w1", "b1", "s", "w2", "b2"), (0, 0, 0, 0, 0)))
def test_networks_in_one_vector(network):
    """Full blocks are exact; of default ones the diagonals of biases and scales are."""
    apply, length, bounds = flat_network(*network)
    params = {"w": normal(1, length)}
    truth = gauss_newton(apply, params, X)
    atol = 1e-12 * np.abs(truth).max()
    estimator, state, report = estimated(apply, params, X, ctors=FULL)
    check_blocks(estimator, params)
    assert (report.coverage, report.rows[0].reason) == (1.0, "")
    assert report.rows[0].sites == len(bounds)
    np.testing.assert_allclose(estimator.to_dense_matrix(state), truth, atol=atol)
    estimator, state, _ = estimated(apply, params, X)
    check_blocks(estimator, params)
    matrix = check_products(estimator, state, params)
    for name in {"b1", "s", "b2"} & set(bounds):
        part = slice(*bounds[name])
        diagonal = np.diag(np.diagonal(truth)[part])
        np.testing.assert_allclose(matrix[part, part], diagonal, atol=atol)


def test_what_has_a_diagonal_block_is_reported():
    estimator, _, _ = estimated(BY_NAME["the last row is the bias"].apply, MATRIX, X)
    (row,) = estimator.report().rows
    assert row.remarks == ("parts that only scale or shift have a diagonal block",)


def test_a_function_that_makes_blocks_is_called_for_each_part():
    """As the class that it calls would be; else all parts would be taken for the first."""
    make = lambda equation, name: curvax.DenseTwoKroneckerFactored(equation, name)
    apply = BY_NAME["the last row is the bias"].apply
    estimator, state, _ = estimated(apply, MATRIX, X, ctors={"dense_tag": make})
    expected, other, _ = estimated(apply, MATRIX, X)
    assert np.array_equal(estimator.to_dense_matrix(state), expected.to_dense_matrix(other))


@pytest.mark.parametrize("is_tied", [True, False])
def test_whether_estimates_are_linear_is_asked_of_the_parts(is_tied):
    """Of weights that are used both ways round they are not."""

    def apply(p: Any, x: Any) -> Any:
        w = p["w"][:6].reshape(3, 2)
        h = biased(x @ w, p["w"][6:])
        return h @ w.T if is_tied else h

    estimator, _, _ = estimated(apply, {"w": normal(1, 8)}, X)
    (block,) = estimator.indices_to_block_map.values()
    assert block.has_linear_estimates(block.uses) != is_tied


def test_least_squares_with_the_bias_in_the_last_row_converges():
    x, w = normal(0, 50, 3), jnp.zeros((4, 2))
    y = x @ jnp.ones((3, 2)) + 1.0

    def loss(w: Any, batch: Any) -> Any:
        x, y = batch
        z = curvax.register_squared_error_loss(biased(x @ w[:3], w[3]), y, weight=0.5)
        return 0.5 * jnp.mean(jnp.sum((z - y) ** 2, 1))

    optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0, num_burnin_steps=0)
    state = optimizer.init(w, key(), (x, y))
    losses = []
    for step in range(8):
        options = {"learning_rate": 0.5, "momentum": 0.0, "damping": 1e-3}
        w, state, stats = optimizer.step(w, state, key(step), batch=(x, y), **options)
        losses.append(float(stats["loss"]))
    assert optimizer.estimator.dim == 8
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-3 * losses[0]
