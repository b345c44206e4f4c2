"""Blocks in random states, to compute with: a new line of `BLOCKS` joins every test."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from curvature.cases import DIAGONAL, FULL, KEY, case

DAMPING = 0.3


class Blocks(NamedTuple):
    """The blocks of a model, of some classes."""

    name: str
    model: str
    ctors: dict[str, Callable[..., Any]] | None = None

    def estimator(self) -> Any:
        given = case(self.model, "squared")
        found = curvax.BlockDiagonalCurvature(given.func, layer_tag_to_block_ctor=self.ctors)
        found.finalize(given.args)
        return found

    def state(self, estimator: Any, *options: Any, seed: int = 0) -> Any:
        """A state with random averages."""
        args = case(self.model, "squared").args
        state = jax.jit(lambda: estimator.init(KEY, args, *options))()
        return filled(state, np.random.default_rng(seed))


EKFAC = {"dense": curvax.DenseEKFAC, "conv2d": curvax.Conv2DEKFAC, "conv": curvax.Conv2DEKFAC}
BLOCKS = [
    Blocks("Kronecker", "mlp"),
    Blocks("full", "scale and shift", FULL),
    Blocks("diagonal", "scale and shift", DIAGONAL),
    Blocks("identity", "mlp", {"dense": functools.partial(curvax.ScaledIdentity, scale=2.5)}),
    Blocks(
        "eigenvalue-corrected", "2-D", {"conv2d": curvax.Conv2DEKFAC, "dense": curvax.DenseEKFAC}
    ),
    Blocks("groups", "grouped"),
    Blocks("table", "table"),
    Blocks("parts", "parts"),
    Blocks(
        "wide",
        "mlp",
        {"dense": functools.partial(curvax.DenseTwoKroneckerFactored, max_factor_size=2)},
    ),
]


def is_average(x: Any) -> bool:
    return isinstance(x, curvax.WeightedMovingAverage)


def filled(state: Any, rng: np.random.Generator, rank: int | None = None) -> Any:
    """The state with random averages of weight two: matrices, or what is the diagonal of one."""

    def draw(path: Any, average: Any) -> Any:
        if not is_average(average):
            return average
        shape = average.raw_value.shape
        name = jax.tree_util.keystr(path)
        is_matrix = "diagonal" not in name and "eigenvalues" not in name and len(shape) > 1
        if is_matrix:
            half = rng.standard_normal((*shape[:-1], rank or shape[-1] + 1))
            value = half @ half.swapaxes(-1, -2)
        else:
            value = rng.standard_normal(shape) ** 2
        dtype = average.raw_value.dtype
        return curvax.WeightedMovingAverage(jnp.asarray(2.0, dtype), jnp.asarray(2 * value, dtype))

    return jax.tree_util.tree_map_with_path(draw, state, is_leaf=is_average)


def power_of(matrix: Any, power: float) -> np.ndarray:
    """A power of a symmetric matrix by its eigenvalues."""
    values, vectors = np.linalg.eigh(np.asarray(matrix))
    return (vectors * values**power) @ vectors.T
