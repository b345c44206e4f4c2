"""Estimation modes: what is pulled back from the losses, in one pass or several.

Every curvature here is a sum of outer products of vectors `Jᵀ c`, where `J` is the Jacobian of what
the losses depend on, and the cotangents `c` are chosen so that their own outer products are the
curvature of the losses: on average, where they are random; or all of them together, where there is
one pass for each column of a factor.

In modes that are exact or empirical, the cotangents of each row of a loss get a random sign.
Nothing that is quadratic in the gradients of single rows depends on these. But what is known only
of all of them together (`NaiveDiagonal`, `NaiveFull`, or an example with several rows) has no
systematic error then. Row by row, with a pass for each, nothing is random.

All that is random is drawn for each row on its own, by its number in the whole batch. So it is the
same whether a batch is taken at once or in parts, by one device or by several.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvax._errors import where
from curvax._types import Array, PyTree
from curvax.layers.tracing.loss_map import LossMap

# Which rows of a batch are those of a device, where it is sharded over a mapped axis.
#
# What is drawn for a row depends on its number in the whole batch, and sums over a whole batch are
# over all devices. So an estimate is the same on any number of them.


class LocalBatch(NamedTuple):
    """The local part of a batch: its number of examples, and the mapped axis of all devices."""

    num_examples: int
    axis_name: str | None


def row_numbers(count: int, stack: Sequence[int], local: LocalBatch) -> Array:
    """The numbers, in the whole batch, of the rows that a loss has here.

    They are along the axes of loops and of `vmap` of these lengths, and then along one of its own.
    One of all these is that of examples, where the parts of devices lie side by side.
    """
    numbers, axis = jnp.arange(count, dtype=jnp.uint32), local.axis_name
    if axis is None:
        return numbers
    part = jnp.uint32(_side_by_side(count, stack, local.num_examples))
    others = jnp.uint32(lax.axis_size(axis) - 1)
    device = lax.axis_index(axis).astype(jnp.uint32)
    return numbers + part * (numbers // part * others + device)


def sum_over_devices(sums: PyTree, axis_name: str | None) -> PyTree:
    """Return sums over the whole batch from those over local ones, for averages of squares.

    The square of the sum over all of n devices is n times what each of them adds to the average.
    """
    if axis_name is None:
        return sums
    scale = lax.axis_size(axis_name) ** -0.5
    return lax.psum(jax.tree.map(lambda x: x * scale, sums), axis_name)


def _side_by_side(count: int, stack: Sequence[int], num_examples: int) -> int:
    """How many rows of a device lie side by side, with those of other devices beside them.

    The axis of examples is one of their number, or else one with several rows for each of them.
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

Cotangents = list[tuple[Array, ...]]
"""For each loss, an array for each of its `parameter_dependants`."""

Operands = tuple[Sequence[tuple[Array, ...]], Sequence[tuple[Array, ...]]]
"""What losses are made of: what depends on parameters, and the rest; for each loss."""


@dataclass(frozen=True)
class Sweep:
    """Some passes of one kind: their number, and from the number of a pass to its cotangents."""

    count: int
    cotangents: Callable[[Any], Cotangents]


def check_mode(mode: str) -> str:
    """The mode, if there is such."""
    if mode not in MODES:
        raise ValueError(
            f"{where()}: the estimation mode {mode!r} is not known, only {', '.join(MODES)}."
        )
    return mode


def draws(
    at: LossMap, mode: str, rng: Array, local: LocalBatch, num_samples: int = 1
) -> list[Array]:
    """What is random in a mode: for each loss an array with a row for each of its own.

    In modes that are on average right only, there are several samples, along the second axis.
    """
    shapes: list[tuple[int, ...]] = []

    def look(params: Sequence[Array]) -> None:
        dependants, (others, _) = at(params)
        matrix, _, way = mode.partition("_")
        for loss in at.losses(dependants, others):
            rows = loss.parameter_dependants[0].shape[:1]
            if way == "empirical":
                shapes.append(rows)
            elif way == "gradients":
                shapes.append((*rows, num_samples))
            else:
                _, *inner = _inner_shape(loss, matrix)
                samples = (num_samples, *inner) if way == "curvature_prop" else (math.prod(inner),)
                shapes.append((*rows, *samples))

    jax.eval_shape(look, at.params)
    drawn = []
    keys = _split(rng, (len(shapes),))
    for key, (count, *rest), stack in zip(keys, shapes, at.stacks, strict=True):
        rows = jax.vmap(jax.random.fold_in, (None, 0))(key, row_numbers(count, stack, local))
        if mode == "fisher_gradients":
            one = lambda k, shape=tuple(rest): _split(k, shape)
        else:
            one = lambda k, shape=tuple(rest): jax.random.rademacher(k, shape, jnp.float32)
        drawn.append(jax.vmap(one)(rows))
    return drawn


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    """Return keys of this shape; a single one is the key itself."""
    return (
        jax.random.split(key, shape) if math.prod(shape) != 1 else key.reshape(*shape, *key.shape)
    )


def sweeps(
    at: LossMap, operands: Operands, mode: str, drawn: Sequence[Array], row_by_row: bool = False
) -> list[Sweep]:
    """All passes of a mode, for losses that are made of these operands.

    Those of exact and empirical modes are for all rows of a loss at once, or `row_by_row`.
    """
    matrix, _, way = mode.partition("_")
    if way == "gradients":
        return [_samples(drawn, lambda k, keys: _sampled(at, operands, k, keys))]
    losses = at.losses(*operands)
    if way == "curvature_prop":
        propagated = lambda k, signs: _factor(losses[k], matrix)(signs.astype(_dtype(losses[k])))
        return [_samples(drawn, propagated)]
    one = _empirical if way == "empirical" else _columns
    return [one(losses, number, matrix, signs, row_by_row) for number, signs in enumerate(drawn)]


def num_passes(mode: str, drawn: Sequence[Array], row_by_row: bool = False) -> int:
    """How many passes a mode takes."""
    _, _, way = mode.partition("_")
    if way not in ("exact", "empirical"):
        return drawn[0].shape[1]
    columns = [signs.shape[1] if way == "exact" else 1 for signs in drawn]
    rows = [signs.shape[0] if row_by_row else 1 for signs in drawn]
    return sum(n * k for n, k in zip(rows, columns, strict=True))


def _samples(
    drawn: Sequence[Array], cotangents: Callable[[int, Array], tuple[Array, ...]]
) -> Sweep:
    """A pass for each sample, such that their sum is the average."""
    count = drawn[0].shape[1]

    def of_sample(number: Any) -> Cotangents:
        made = [cotangents(k, x[:, number]) for k, x in enumerate(drawn)]
        return jax.tree.map(lambda x: x / jnp.asarray(count**0.5, x.dtype), made)

    if count > 1:
        return Sweep(count, of_sample)
    only = of_sample(0)
    return Sweep(1, lambda _: only)


def _sampled(at: LossMap, operands: Operands, number: int, keys: Array) -> tuple[Array, ...]:
    """The gradient of a loss for targets that are drawn from what is predicted."""
    dependants, others = operands

    def of_row(dependants_row: Any, others_row: Any, key: Array) -> tuple[Array, ...]:
        own = [list(x) for x in dependants], [list(x) for x in others]
        own[0][number] = [x[None] for x in dependants_row]
        own[1][number] = [x[None] if has else x for x, has in zip(others_row, split, strict=True)]
        loss = at.losses(*own)[number]
        return tuple(x[0] for x in loss.grad_of_evaluate_on_sample(key, "sqrt"))

    rows = keys.shape[0]
    split = [x.ndim > 0 and x.shape[0] == rows for x in others[number]]
    axes = (0, [0 if has else None for has in split], 0)
    return jax.vmap(of_row, axes)(list(dependants[number]), list(others[number]), keys)


def _empirical(
    losses: Sequence[Any], number: int, matrix: str, signs: Array, row_by_row: bool
) -> Sweep:
    del matrix
    gradients = losses[number].grad_of_evaluate(None, "sqrt")

    def cotangents(row: Any) -> Cotangents:
        factors = _only(row, signs) if row_by_row else signs
        like = lambda x: factors.reshape(factors.shape + (1,) * (x.ndim - 1)).astype(x.dtype)
        return _alone(losses, number, tuple(x * like(x) for x in gradients))

    return Sweep(len(signs) if row_by_row else 1, cotangents)


def _columns(
    losses: Sequence[Any], number: int, matrix: str, signs: Array, row_by_row: bool
) -> Sweep:
    """A pass for each column of a factor of the loss's curvature (and for each of its rows)."""
    loss = losses[number]
    shape = _inner_shape(loss, matrix)
    signs = signs.astype(_dtype(loss))
    rows, columns = signs.shape

    def cotangents(k: Any) -> Cotangents:
        column = k % columns
        own = signs[:, column]
        own = _only(k // columns, own) if row_by_row else own
        inner = jnp.zeros_like(signs).at[:, column].set(own).reshape(shape)
        return _alone(losses, number, _factor(loss, matrix)(inner))

    return Sweep(rows * columns if row_by_row else columns, cotangents)


def _only(row: Any, x: Array) -> Array:
    """A vector with zeros in all rows but one."""
    return jnp.where(jnp.arange(len(x)) == row, x, 0)


def _alone(losses: Sequence[Any], number: int, own: tuple[Array, ...]) -> Cotangents:
    """Cotangents of one loss, and zeros for the others."""
    return [
        own if k == number else tuple(jnp.zeros_like(x) for x in loss.parameter_dependants)
        for k, loss in enumerate(losses)
    ]


def _factor(loss: Any, matrix: str) -> Callable[[Array], tuple[Array, ...]]:
    return loss.multiply_fisher_factor if matrix == "fisher" else loss.multiply_ggn_factor


def _inner_shape(loss: Any, matrix: str) -> tuple[int, ...]:
    return loss.fisher_factor_inner_shape if matrix == "fisher" else loss.ggn_factor_inner_shape


def _dtype(loss: Any) -> Any:
    return jnp.result_type(*(x.dtype for x in loss.parameter_dependants))
