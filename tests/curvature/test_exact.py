"""In modes without chance, estimates are what they are by definition.

Each case is one compiled program of estimates and oracles (`cases`). By default each model meets
one loss in one mode; all meet all in slow tests.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.flatten_util import ravel_pytree

import curvax
from curvature.cases import (
    DIAGONAL,
    FULL,
    LOSSES,
    MODELS,
    Case,
    case,
    dense_curvature,
    estimated_matrix,
    fit,
    kronecker_curvature,
)
from helpers import assert_same

MODES = ["fisher_exact", "ggn_exact", "fisher_empirical"]


def slowly(models: Sequence[str], losses: Sequence[str]) -> list[Any]:
    """Models × losses, in one mode after the other."""
    pairs = enumerate(pair for pair in itertools.product(models, losses) if fit(*pair))
    modes = lambda k, *pair: MODES[k % 3] if case(*pair).has_fisher else "ggn_exact"
    return [
        pytest.param(*pair, modes(k, *pair), marks=pytest.mark.slow, id=f"all-{'-'.join(pair)}")
        for k, pair in pairs
    ]


NAMES = [model.name for model in MODELS]
PRODUCT = slowly(NAMES, ["softmax", "both", "own", "several"])
of_these = lambda cases, slow=PRODUCT: pytest.mark.parametrize(
    ("model", "loss", "mode"), [*cases, *slow]
)


def close(actual: Any, expected: Any) -> None:
    assert_same(jnp.asarray(actual), jnp.asarray(expected), 1e-9, 1e-10)


def close_where(mask: Any, actual: Any, expected: Any) -> None:
    close(jnp.where(mask, actual, 0), jnp.where(mask, expected, 0))


def blocks(case: Case, ctors: Any = None, **options: Any) -> curvax.BlockDiagonalCurvature:
    return curvax.BlockDiagonalCurvature(case.func, layer_tag_to_block_ctor=ctors, **options)


@functools.cache
def full(model: str, loss: str, mode: str) -> tuple[Any, Any]:
    """Full blocks, and the whole matrix by definition."""
    given = case(model, loss)
    compute = lambda *args: (
        estimated_matrix(blocks(given, FULL), args, mode),
        dense_curvature(given, *args, mode),
    )
    return jax.jit(compute)(*given.args)


@of_these(
    [
        ("mapped", "several", "fisher_empirical"),
        ("scale and shift", "bernoulli", "fisher_exact"),
        ("positions", "both", "fisher_empirical"),
        ("tied table", "variance", "fisher_exact"),
        ("recurrent", "own", "ggn_exact"),
        ("stack", "both", "ggn_exact"),
        ("parts", "squared", "fisher_exact"),
        ("grouped", "own", "ggn_exact"),
    ]
)
def test_full_blocks_are_blocks_of_the_exact_matrix(model, loss, mode):
    ours, naive = full(model, loss, mode)
    given = case(model, loss)
    assert jnp.linalg.norm(naive) > 0.01
    expected = jnp.where(given.same_block(), naive, 0)
    close_where(given.elsewhere(given.model.generic), ours, expected)


@of_these(
    [
        ("scale and shift", "several", "fisher_exact"),
        ("recurrent", "softmax", "fisher_empirical"),
        ("channels first", "variance", "fisher_exact"),
    ],
    slowly(NAMES, ["several"]),
)
def test_diagonal_blocks_are_the_diagonal(model, loss, mode):
    given = case(model, loss)
    compute = lambda *args: (
        estimated_matrix(blocks(given, DIAGONAL), args, mode),
        dense_curvature(given, *args, mode),
    )
    ours, naive = jax.jit(compute)(*given.args)
    mask = given.elsewhere(given.model.generic)
    close_where(mask, ours, jnp.diag(jnp.diag(naive)))


@of_these(
    [
        ("mlp", "softmax", "fisher_exact"),
        ("mlp", "both", "ggn_exact"),
        ("exponential", "several", "fisher_exact"),
        ("mlp", "several", "fisher_empirical"),
        ("mlp", "own", "ggn_exact"),
    ],
    slowly(["mlp", "exponential", "stack"], list(LOSSES)),
)
def test_explicit_curvature_is_the_exact_matrix(model, loss, mode):
    given = case(model, loss)
    compute = lambda *args: (
        estimated_matrix(curvax.ExplicitExactCurvature(given.func), args, mode),
        dense_curvature(given, *args, mode),
    )
    close(*jax.jit(compute)(*given.args))


@of_these(
    [
        ("heads", "both", "fisher_exact"),
        ("table", "variance", "fisher_empirical"),
        ("twice", "bernoulli", "fisher_exact"),
        ("recurrent", "softmax", "fisher_empirical"),
        ("stack", "squared", "fisher_exact"),
        ("parts", "own", "ggn_exact"),
        ("dilated", "both", "ggn_exact"),
        ("grouped", "several", "fisher_empirical"),
        ("channels first", "own", "ggn_exact"),
    ]
)
def test_kronecker_factors_are_those_of_the_book(model, loss, mode):
    given = case(model, loss)
    mask = given.elsewhere(given.model.no_book)
    if not mask.any():
        return
    compute = lambda *args: (
        estimated_matrix(blocks(given), args, mode),
        kronecker_curvature(given, *args, mode),
    )
    close_where(mask, *jax.jit(compute)(*given.args))


class TestWhereKroneckerIsExact:
    @pytest.mark.parametrize("model", ["deep linear", "linear positions"])
    def test_linear_networks_with_squared_error(self, model):
        given = case(model, "squared")
        self.check(given, given.args)

    @pytest.mark.parametrize(
        ("model", "loss"),
        [
            ("one position", "both"),
            ("table", "bernoulli"),
            pytest.param("mlp", "several", marks=pytest.mark.slow),
        ],
    )
    def test_one_example(self, model, loss):
        given = case(model, loss)
        params, batch = given.args
        cut = (slice(1),) * (2 if model == "table" else 1)  # One example, and one word of it.
        take = lambda x: x[cut[: x.ndim]]
        self.check(given, (params, jax.tree.map(take, batch)))

    def check(self, given, args):
        compute = lambda *args: (
            estimated_matrix(blocks(given), args, "ggn_exact"),
            dense_curvature(given, *args),
        )
        ours, naive = jax.jit(compute)(*args)
        close(ours, jnp.where(given.same_block(), naive, 0))

    def test_means_over_positions_with_reduce(self):
        ours, naive, _ = reduced("pooled", "squared")
        close(ours, jnp.where(case("pooled", "squared").same_block(), naive, 0))


def reducing(ctor: Any) -> Any:
    return functools.partial(ctor, weight_sharing="reduce")


REDUCED = {
    "dense": reducing(curvax.DenseTwoKroneckerFactored),
    "conv2d": reducing(curvax.Conv2DTwoKroneckerFactored),
    "conv": reducing(curvax.ConvTwoKroneckerFactored),
    "embedding": reducing(curvax.EmbeddingTwoKroneckerFactored),
}


@functools.cache
def reduced(model: str, loss: str) -> tuple[Any, Any, Any]:
    given = case(model, loss)
    compute = lambda *args: (
        estimated_matrix(blocks(given, REDUCED), args, "ggn_exact"),
        dense_curvature(given, *args),
        kronecker_curvature(given, *args, reduce=True),
    )
    return jax.jit(compute)(*given.args)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("pooled", "squared"),
        ("grouped", "both"),
        *(
            pytest.param(model.name, "several", marks=pytest.mark.slow)
            for model in MODELS
            if not model.no_book
        ),
    ],
)
def test_reduced_factors_are_those_of_the_book(model, loss):
    ours, _, book = reduced(model, loss)
    if model == "table":  # The factor of its rows is always diagonal.
        given = case(model, loss).model.params
        rows = {name: jnp.indices(x.shape)[0] for name, x in given.items()}
        rows["v"] = jnp.zeros_like(rows["v"])
        rows = ravel_pytree(rows)[0]
        book = jnp.where(rows[:, None] == rows[None], book, 0)
    close(ours, book)


def test_block_hessians_of_piecewise_linear_networks():
    given = case("relu", "softmax")

    def hessian(params, batch):
        point, unflatten = ravel_pytree(params)
        return jax.hessian(lambda point: given.mean_loss(unflatten(point), batch))(point)

    compute = lambda *args: (
        estimated_matrix(blocks(given, FULL), args, "ggn_exact"),
        hessian(*args),
    )
    ours, naive = jax.jit(compute)(*given.args)
    assert jnp.linalg.norm(ours) > 0.1
    close(ours, jnp.where(given.same_block(), naive, 0))
