"""Estimation modes: the cotangents that are pulled back from the losses, in one pass or several.

Every curvature matrix here is a sum of outer products of vectors `Jᵀ c`, where `J` is the Jacobian
of the inputs of the losses. The cotangents `c` are such that the sum of their outer products is the
curvature of the losses in their inputs: in expectation, where `c` is random; or exactly, with one
pass for each column of a factor.

- `gradients`: `c` is the gradient for a target that is sampled from the predictive distribution
  (Martens & Grosse 2015, "Optimizing neural networks with Kronecker-factored approximate
  curvature").
- `curvature_prop`: `c` is a factor of the curvature times random signs (Martens, Sutskever &
  Swersky 2012, "Estimating the Hessian by back-propagating curvature").
- `exact`: `c` is a column of that factor.
- `empirical`: `c` is the gradient for the target of the batch.
- `empirical_direct`: there are no cotangents; the gradient of the objective itself is squared.

In exact and empirical modes, the cotangents of each row of a loss have a random sign. Whatever is
quadratic in the gradients of single rows does not depend on it. But estimates from the sum over all
rows (`NaiveDiagonal`, `NaiveFull`, or an example with several rows) are unbiased only with it. With
one pass for each row, nothing is random.

Random numbers are sampled for each row separately, from its index in the global batch. So they
depend neither on microbatches nor on the number of devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.layers.tracing.loss_map import Losses, LossMap
from curvax.losses.loss_function import LossFunction, NegativeLogProbLoss

# Which rows of the global batch a device has, where the batch is sharded over a mapped axis.


class LocalBatch(NamedTuple):
    """The local shard of a batch: its number of examples, and the mapped axis of all devices."""

    num_examples: int
    axis_name: str | None


def row_indices(count: int, stack: Sequence[int], local: LocalBatch) -> Array:
    """Return the indices in the global batch of the `count` rows that a loss has locally.

    These are the rows of all steps of loops and `vmap`s of lengths `stack`, merged with the axis of
    the loss. The examples are along one of all these axes, and along it the shards are contiguous.
    """
    indices, axis = jnp.arange(count, dtype=jnp.uint32), local.axis_name
    if axis is None:
        return indices
    run = jnp.uint32(_contiguous_rows(count, stack, local.num_examples))
    others = jnp.uint32(lax.axis_size(axis) - 1)
    device = lax.axis_index(axis).astype(jnp.uint32)
    return indices + run * (indices // run * others + device)


def sum_over_devices(sums: PyTree, axis_name: str | None) -> PyTree:
    """Return sums over the global batch, scaled for an average of squares over devices.

    With n devices, the square of the global sum is n times what each contributes to the average.
    """
    if axis_name is None:
        return sums
    scale = lax.axis_size(axis_name) ** -0.5
    return lax.psum(jax.tree.map(lambda x: x * scale, sums), axis_name)


def _contiguous_rows(count: int, stack: Sequence[int], num_examples: int) -> int:
    """Return how many local rows are contiguous in the global batch.

    The example axis is the last one whose length is the number of examples, or else the last one
    whose length is a multiple of it.
    """
    lengths = (*stack, count // max(math.prod(stack), 1))
    fits = [k for k, length in enumerate(lengths) if length == num_examples]
    fits = fits or [k for k, length in enumerate(lengths) if length % max(num_examples, 1) == 0]
    return max(math.prod(lengths[fits[-1] if fits else -1 :]), 1)


MODES = (
    "fisher_gradients",
    "fisher_curvature_prop",
    "fisher_exact",
    "fisher_empirical",
    "ggn_curvature_prop",
    "ggn_exact",
)

DIRECT_MODES = ("fisher_empirical_direct", "fisher_empirical_direct_synced")
"""Modes without registered losses: from the gradient of the objective itself."""

Cotangents = list[tuple[Array, ...]]
"""For each loss, an array for each of its `parameter_dependants`."""

Index = int | Array
"""The index of a pass or a row; traced inside a loop."""

Operands = tuple[Sequence[tuple[Array, ...]], Sequence[tuple[Array, ...]]]
"""For each loss, the arrays that depend on parameters; and for each loss, the others."""


@dataclass(frozen=True)
class Sweep:
    """Backward passes of one kind: their number, and the cotangents of the pass of an index."""

    count: int
    cotangents: Callable[[Index], Cotangents]


def check_mode(mode: str) -> str:
    """Return the mode; raise an error if it is unknown."""
    known = (*MODES, *DIRECT_MODES)
    if mode not in known:
        raise ValueError(
            f"{where()}: the estimation mode {mode!r} is not known, only {', '.join(known)}."
        )
    return mode


def is_sampled(mode: str) -> bool:
    """Return whether a mode samples, so that it is right in expectation only."""
    return mode.endswith(("gradients", "curvature_prop"))


def sample_randomness(
    at: LossMap, mode: str, rng: Array, local: LocalBatch, num_samples: int = 1
) -> list[Array]:
    """Return the random keys or signs of a mode: an array for each loss, with its rows first.

    In modes that are right in expectation only, samples are along the second axis.
    """
    shapes: list[tuple[int, ...]] = []

    def look(params: Sequence[Array]) -> None:
        dependants, (others, _) = at(params)
        matrix, _, method = mode.partition("_")
        for loss in at.losses(dependants, others):
            rows = loss.parameter_dependants[0].shape[:1]
            if method == "empirical":
                shapes.append(rows)
            elif method == "gradients":
                shapes.append((*rows, num_samples))
            else:
                _, *inner = _inner_shape(loss, matrix)
                is_exact = method == "exact"
                columns = (math.prod(inner),) if is_exact else (num_samples, *inner)
                shapes.append((*rows, *columns))

    jax.eval_shape(look, at.params)
    randomness = []
    keys = _split_key(rng, (len(shapes),))
    for key, (count, *rest), stack in zip(keys, shapes, at.stacks, strict=True):
        row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_indices(count, stack, local))
        if mode == "fisher_gradients":
            of_row = lambda k, shape=tuple(rest): _split_key(k, shape)
        else:
            of_row = lambda k, shape=tuple(rest): jax.random.rademacher(k, shape, jnp.float32)
        randomness.append(jax.vmap(of_row)(row_keys))
    return randomness


def _split_key(key: Array, shape: tuple[int, ...]) -> Array:
    """Return keys of this shape; the key itself if it is to be a single one."""
    return (
        jax.random.split(key, shape) if math.prod(shape) != 1 else key.reshape(*shape, *key.shape)
    )


def sweeps(
    at: LossMap,
    operands: Operands,
    mode: str,
    randomness: Sequence[Array],
    row_by_row: bool = False,
) -> list[Sweep]:
    """Return all backward passes of a mode, for losses with these operands.

    A pass of an exact or empirical mode is for all rows of a loss, or for one if `row_by_row`.
    """
    matrix, _, method = mode.partition("_")
    if method == "gradients":
        return [_samples(randomness, lambda k, keys: _sampled(at, operands, k, keys))]
    losses = at.losses(*operands)
    if method == "curvature_prop":
        propagated = lambda k, signs: _factor(losses[k], matrix)(signs.astype(_dtype(losses[k])))
        return [_samples(randomness, propagated)]
    if method == "empirical":
        return [_empirical(losses, n, signs, row_by_row) for n, signs in enumerate(randomness)]
    return [_columns(losses, n, matrix, signs, row_by_row) for n, signs in enumerate(randomness)]


def num_passes(mode: str, randomness: Sequence[Array], row_by_row: bool = False) -> int:
    """Return the number of backward passes of a mode."""
    _, _, method = mode.partition("_")
    if method not in ("exact", "empirical"):
        return randomness[0].shape[1]
    columns = [signs.shape[1] if method == "exact" else 1 for signs in randomness]
    rows = [signs.shape[0] if row_by_row else 1 for signs in randomness]
    return sum(n * k for n, k in zip(rows, columns, strict=True))


def _samples(
    randomness: Sequence[Array], cotangents: Callable[[int, Array], tuple[Array, ...]]
) -> Sweep:
    """Return a pass for each sample, scaled so that the sum over passes is the average."""
    count = randomness[0].shape[1]

    def of_sample(index: Index) -> Cotangents:
        of_losses = [cotangents(k, x[:, index]) for k, x in enumerate(randomness)]
        return jax.tree.map(lambda x: x / jnp.asarray(count**0.5, x.dtype), of_losses)

    if count > 1:
        return Sweep(count, of_sample)
    only = of_sample(0)
    return Sweep(1, lambda _: only)


def _sampled(at: LossMap, operands: Operands, index: int, keys: Array) -> tuple[Array, ...]:
    """Return the gradient of a loss for targets sampled from its predictive distribution."""
    dependants, others = operands

    def of_row(
        dependants_row: Sequence[Array], others_row: Sequence[Array], key: Array
    ) -> tuple[Array, ...]:
        with_row = [list(x) for x in dependants], [list(x) for x in others]
        with_row[0][index] = [x[None] for x in dependants_row]
        with_row[1][index] = [
            x[None] if has else x for x, has in zip(others_row, has_rows, strict=True)
        ]
        loss = at.losses(*with_row)[index]
        return tuple(x[0] for x in loss.grad_of_evaluate_on_sample(key, "sqrt"))

    rows = keys.shape[0]
    has_rows = [x.ndim > 0 and x.shape[0] == rows for x in others[index]]
    axes = (0, [0 if has else None for has in has_rows], 0)
    return jax.vmap(of_row, axes)(list(dependants[index]), list(others[index]), keys)


def _empirical(losses: Losses, index: int, signs: Array, row_by_row: bool) -> Sweep:
    """Return a pass for the gradient of a loss (or for each of its rows), with random signs."""
    gradients = losses[index].grad_of_evaluate(None, "sqrt")

    def cotangents(row: Index) -> Cotangents:
        factors = _only(row, signs) if row_by_row else signs
        like = lambda x: factors.reshape(factors.shape + (1,) * (x.ndim - 1)).astype(x.dtype)
        return _of_one_loss(losses, index, tuple(x * like(x) for x in gradients))

    return Sweep(len(signs) if row_by_row else 1, cotangents)


def _columns(losses: Losses, index: int, matrix: str, signs: Array, row_by_row: bool) -> Sweep:
    """Return a pass for each column of a factor of a loss's curvature (and for each row)."""
    loss = losses[index]
    shape = _inner_shape(loss, matrix)
    signs = signs.astype(_dtype(loss))
    rows, columns = signs.shape

    def cotangents(k: Index) -> Cotangents:
        column = k % columns
        entries = signs[:, column]
        entries = _only(k // columns, entries) if row_by_row else entries
        inner = jnp.zeros_like(signs).at[:, column].set(entries).reshape(shape)
        return _of_one_loss(losses, index, _factor(loss, matrix)(inner))

    return Sweep(rows * columns if row_by_row else columns, cotangents)


def _only(row: Index, x: Array) -> Array:
    """Return a vector with zeros in all rows but one."""
    return jnp.where(jnp.arange(len(x)) == row, x, 0)


def _of_one_loss(losses: Losses, index: int, cotangents: tuple[Array, ...]) -> Cotangents:
    """Return the cotangents of one loss, and zeros for the others."""
    return [
        cotangents if k == index else tuple(jnp.zeros_like(x) for x in loss.parameter_dependants)
        for k, loss in enumerate(losses)
    ]


# Losses without a predictive distribution have no Fisher matrix: reading it raises.


def _factor(loss: LossFunction, matrix: str) -> Callable[[Array], tuple[Array, ...]]:
    if matrix == "fisher":
        return cast(NegativeLogProbLoss, loss).multiply_fisher_factor
    return loss.multiply_ggn_factor


def _inner_shape(loss: LossFunction, matrix: str) -> tuple[int, ...]:
    if matrix == "fisher":
        return cast(NegativeLogProbLoss, loss).fisher_factor_inner_shape
    return loss.ggn_factor_inner_shape


def _dtype(loss: LossFunction) -> jnp.dtype:
    return jnp.result_type(*(x.dtype for x in loss.parameter_dependants))
