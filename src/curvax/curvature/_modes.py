"""Estimation modes: what is pulled back from the losses, in one pass or several.

Every curvature here is a sum of outer products of vectors `Jᵀ c`, where `J` is the Jacobian of what
the losses depend on, and the cotangents `c` are chosen so that their own outer products are the
curvature of the losses: on average, where they are random; or all of them together, where there is
one pass for each column of a factor.

In modes that are exact or empirical, the cotangents of each example get a random sign. Nothing that
is quadratic in the gradients of single examples depends on these. But what is known only of all
examples together (`NaiveDiagonal`, `NaiveFull`) has no systematic error then.

All that is random is drawn for each example on its own, so that it is the same whether a batch is
taken at once or in parts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from curvax._types import Array
from curvax.tracing import LossMap

__all__ = ["MODES", "Cotangents", "Sweep", "check_mode", "draws", "num_passes", "sweeps"]

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
            f"curvax: the estimation mode {mode!r} is not known, only {', '.join(MODES)}."
        )
    return mode


def draws(at: LossMap, mode: str, rng: Array) -> list[Array]:
    """What is random in a mode: for each loss an array with a row for each of its own."""
    shapes: list[tuple[int, ...]] = []

    def look(params: Sequence[Array]) -> None:
        dependants, (others, _) = at(params)
        matrix, _, way = mode.partition("_")
        for loss in at.losses(dependants, others):
            rows = loss.parameter_dependants[0].shape[:1]
            if way in ("gradients", "empirical"):
                shapes.append(rows)
            else:
                shape = _inner_shape(loss, matrix)
                shapes.append(shape if way == "curvature_prop" else (*rows, math.prod(shape[1:])))

    jax.eval_shape(look, at.params)
    keys = jax.random.split(rng, len(shapes))
    if mode == "fisher_gradients":
        return [jax.random.split(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    drawn = zip(keys, shapes, strict=True)
    return [jax.random.rademacher(key, shape, jnp.float32) for key, shape in drawn]


def sweeps(at: LossMap, operands: Operands, mode: str, drawn: Sequence[Array]) -> list[Sweep]:
    """All passes of a mode, for losses that are made of these operands."""
    matrix, _, way = mode.partition("_")
    if way == "gradients":
        sampled = [_sampled(at, operands, k, keys) for k, keys in enumerate(drawn)]
        return [Sweep(1, lambda _: sampled)]
    losses = at.losses(*operands)
    if way == "curvature_prop":
        made = [
            _factor(loss, matrix)(signs.astype(_dtype(loss)))
            for loss, signs in zip(losses, drawn, strict=True)
        ]
        return [Sweep(1, lambda _: made)]
    one = _empirical if way == "empirical" else _columns
    return [one(losses, number, matrix, signs) for number, signs in enumerate(drawn)]


def num_passes(mode: str, drawn: Sequence[Array]) -> int:
    """How many passes a mode takes."""
    _, _, way = mode.partition("_")
    if way == "exact":
        return sum(signs.shape[1] for signs in drawn)
    return len(drawn) if way == "empirical" else 1


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


def _empirical(losses: Sequence[Any], number: int, matrix: str, signs: Array) -> Sweep:
    del matrix
    gradients = losses[number].grad_of_evaluate(None, "sqrt")
    like = lambda x: signs.reshape(signs.shape + (1,) * (x.ndim - 1)).astype(x.dtype)
    own = tuple(x * like(x) for x in gradients)
    return Sweep(1, lambda _: _alone(losses, number, own))


def _columns(losses: Sequence[Any], number: int, matrix: str, signs: Array) -> Sweep:
    """A pass for each column of a factor of the loss's curvature."""
    loss = losses[number]
    shape = _inner_shape(loss, matrix)
    signs = signs.astype(_dtype(loss))

    def cotangents(column: Any) -> Cotangents:
        inner = jnp.zeros_like(signs).at[:, column].set(signs[:, column]).reshape(shape)
        return _alone(losses, number, _factor(loss, matrix)(inner))

    return Sweep(signs.shape[1], cotangents)


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
