"""Losses with random parameters, and their matrices: a new line joins every test.

`CASES` are all of them, `LOG_PROBS` those with a predictive distribution. `measured` computes, in
one compiled program for each, what the methods of a loss say and what autodiff and sums over all
outcomes say. Matrices are over the entries of all `parameter_dependants` of the whole batch, so
that a leak from one example to another would show.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import curvax
from curvax.losses.function_loss import FunctionLoss


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


class Case(NamedTuple):
    """How to make a loss, its arrays by name, and all that its targets can be.

    `outcomes(loss)` yields targets for the whole batch. Their probabilities come from the
    distribution, or are given next to them, where a quadrature stands for a continuum.
    """

    name: str
    make: Callable[..., Any]
    arrays: dict[str, Any]
    outcomes: Callable[[Any], Iterable[Any]] | None = None

    def loss(self, dtype: Any = jnp.float64) -> Any:
        as_array = lambda x: jnp.asarray(x, dtype if np.asarray(x).dtype.kind == "f" else None)
        arrays = {
            name: x if isinstance(x, float) else as_array(x) for name, x in self.arrays.items()
        }
        return self.make(**arrays)


def quadrature(loss):
    """Gauss-Hermite, exact for polynomials of degree up to 7 in each entry of the target."""
    nodes, weights = np.polynomial.hermite.hermgauss(4)
    mean, deviation = np.asarray(loss.dist.loc), np.asarray(loss.dist.stddev())
    event = mean.shape[1:]
    for choice in map(list, itertools.product(range(4), repeat=int(np.prod(event)))):
        weight = np.prod(weights[choice] / np.sqrt(np.pi))
        yield mean + np.sqrt(2) * deviation * nodes[choice].reshape(event), weight


def answers(loss):
    """All zeros and ones for one example, the same for all examples."""
    shape = loss.params[0].shape
    for bits in itertools.product((0.0, 1.0), repeat=int(np.prod(shape[1:]))):
        yield np.broadcast_to(np.reshape(bits, shape[1:]), shape), None


def classes(loss):
    """All classes for one example, the same for all examples."""
    *shape, number = loss.params[0].shape
    for choice in itertools.product(range(number), repeat=int(np.prod(shape[1:]))):
        yield np.broadcast_to(np.reshape(choice, shape[1:]), shape), None


def one_hots(loss):
    for numbers, weight in classes(loss):
        yield np.eye(loss.params[0].shape[-1])[numbers], weight


def log_cosh(prediction, target):
    return jnp.sum(jnp.log(jnp.cosh(prediction - target)))


def log_sum_exp(prediction):
    return jax.nn.logsumexp(prediction) + jnp.sum(prediction**2)


def poisson(prediction, count):
    return jnp.exp(prediction) - count.astype(prediction.dtype) * prediction


def soft(seed: int, *shape: int) -> np.ndarray:
    weights = np.exp(normal(seed, *shape))
    return weights / weights.sum(-1, keepdims=True)


MEAN = curvax.NormalMeanNegativeLogProbLoss
BOTH = curvax.NormalMeanVarianceNegativeLogProbLoss
BITS = curvax.MultiBernoulliNegativeLogProbLoss
CLASS = curvax.CategoricalLogitsNegativeLogProbLoss
HOT = curvax.OneHotCategoricalLogitsNegativeLogProbLoss
EACH = np.array([0.3, 1.5, 0.8])
MASK = np.array([1, 0, 1])


def of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(FunctionLoss, fn)


def pair(seed: int, *shape: int) -> dict[str, np.ndarray]:
    return {"mean": normal(seed, *shape), "variance": np.exp(0.5 * normal(seed + 1, *shape))}


LOG_PROBS = [
    Case("mean", MEAN, {"mean": normal(1, 3, 2), "targets": normal(2, 3, 2)}, quadrature),
    Case(
        "mean of numbers",
        MEAN,
        {"mean": normal(3, 3), "targets": normal(4, 3), "variance": 1.7, "weight": 0.4},
        quadrature,
    ),
    Case(
        "mean with a variance and a weight for each example",
        MEAN,
        {
            "mean": normal(5, 3, 1, 2),
            "targets": normal(6, 3, 1, 2),
            "variance": EACH,
            "weight": EACH,
        },
        quadrature,
    ),
    Case("both", BOTH, {**pair(7, 3, 2), "targets": normal(8, 3, 2)}, quadrature),
    Case(
        "both of numbers",
        BOTH,
        {**pair(9, 3), "targets": normal(10, 3), "weight": np.array(2.5)},
        quadrature,
    ),
    Case(
        "both of matrices", BOTH, {**pair(11, 2, 2, 1), "targets": normal(12, 2, 2, 1)}, quadrature
    ),
    Case("bits", BITS, {"logits": normal(13, 3, 2), "targets": normal(14, 3, 2) > 0}, answers),
    Case(
        "bits of matrices, fractional targets",
        BITS,
        {"logits": normal(15, 3, 1, 2), "targets": np.abs(np.sin(normal(16, 3, 1, 2)))},
        answers,
    ),
    Case("a bit", BITS, {"logits": normal(17, 3), "targets": MASK, "weight": np.array(2)}, answers),
    Case(
        "masked bits of examples",
        BITS,
        {
            "logits": normal(30, 3, 2),
            "targets": (normal(31, 3, 2) > 0).astype(float),
            "mask": MASK,
            "weight": EACH,
        },
        answers,
    ),
    Case(
        "masked bits",
        BITS,
        {
            "logits": normal(32, 3, 2),
            "targets": np.abs(np.sin(normal(33, 3, 2))),
            "mask": np.array([[True, False], [True, True], [False, False]]),
        },
        answers,
    ),
    Case("class", CLASS, {"logits": normal(18, 3, 3), "targets": np.array([2, 0, 1])}, classes),
    Case(
        "classes along a sequence",
        CLASS,
        {
            "logits": normal(19, 2, 2, 3),
            "targets": np.array([[2, 0], [1, 1]]),
            "mask": np.array([[True, False], [True, True]]),
            "weight": np.array(0.6),
        },
        classes,
    ),
    Case(
        "masked class",
        CLASS,
        {"logits": normal(20, 3, 4), "targets": np.array([2, -7, 1]), "mask": MASK, "weight": 3.0},
        classes,
    ),
    Case("one-hot", HOT, {"logits": normal(21, 3, 3), "targets": np.eye(3)}, one_hots),
    Case(
        "masked one-hot, fractional targets, a weight for each example",
        HOT,
        {
            "logits": normal(22, 3, 3),
            "targets": soft(23, 3, 3),
            "mask": MASK.astype(float),
            "weight": EACH,
        },
        one_hots,
    ),
]
FUNCTIONS = [
    Case(
        "function",
        of(log_cosh),
        {"predictions": normal(24, 3, 2), "targets": normal(25, 3, 2), "weight": 0.4},
    ),
    Case("function of matrices", of(log_sum_exp), {"predictions": normal(26, 3, 2, 2)}),
    Case(
        "function of numbers and counts",
        of(poisson),
        {"predictions": normal(27, 3), "targets": np.array([0, 3, 1]), "weight": EACH},
    ),
]
CASES = LOG_PROBS + FUNCTIONS
# One of each kind, masked and weighted in some way.
SOME = [
    LOG_PROBS[2],
    LOG_PROBS[3],
    LOG_PROBS[8],
    LOG_PROBS[10],
    LOG_PROBS[12],
    LOG_PROBS[15],
    *FUNCTIONS[1:],
]
BY_NAME = {case.name: case for case in CASES}


def name_of(case: Case) -> str:
    return case.name


def has_fisher(loss: Any) -> bool:
    return isinstance(loss, curvax.NegativeLogProbLoss)


def matrix_of(linear: Callable[[Any], Any], like: Any) -> jax.Array:
    """The matrix of a linear function of a pytree, from its values at all basis vectors."""
    flat, unflatten = ravel_pytree(like)
    column = lambda unit: ravel_pytree(linear(unflatten(unit)))[0]
    return jax.vmap(column, out_axes=1)(jnp.eye(flat.size))


def one_by_one(arrays: Any) -> jax.Array:
    """Flat vectors, one for each example, that are zero in the entries of all others."""
    examples = jnp.arange(arrays[0].shape[0])

    def own(example: Any) -> jax.Array:
        mine = lambda x: (examples == example).reshape(-1, *(1,) * (x.ndim - 1))
        return ravel_pytree([jnp.where(mine(x), x, 0) for x in arrays])[0]

    return jax.vmap(own)(examples)


def factor_by_one_hots(multiply: Callable[[Any], Any], shape: tuple[int, ...]) -> jax.Array:
    """The factor, put together from the columns for each index and each example."""
    columns = [one_by_one(multiply(index)) for index in np.ndindex(*shape[1:])]
    by_example = jnp.stack(columns, axis=1)
    return by_example.reshape(-1, by_example.shape[-1]).T


def fisher_by_outcomes(loss: Any, targets: Any, weights: Any) -> jax.Array:
    """The sum over all outcomes of their probability times the outer product of the gradient."""

    def term(targets: Any, weight: Any) -> jax.Array:
        gradients = one_by_one(loss.grad_of_evaluate(targets, "sqrt"))
        examples = len(gradients)
        if weight is None:
            probability = jnp.exp(loss.dist.log_prob(targets).reshape(examples, -1).sum(1))
        else:
            probability = jnp.full(examples, weight)
        return jnp.einsum("b,bi,bj->ij", probability, gradients, gradients)

    axes = (0, None if weights is None else 0)
    return jnp.sum(jax.vmap(term, in_axes=axes)(targets, weights), axis=0)


@functools.cache
def measured(name: str) -> dict[str, np.ndarray]:
    """What the loss says of itself, and what the oracles say, as dense float64 arrays."""
    case = BY_NAME[name]

    def compute(dependants: Any) -> dict[str, Any]:
        loss = case.loss().copy_with_different_inputs(dependants)
        flat, unflatten = ravel_pytree(dependants)
        inner = jnp.zeros(loss.ggn_factor_inner_shape)

        def total(flat: Any, mode: str = "regular") -> Any:
            return jnp.sum(loss.copy_with_different_inputs(unflatten(flat)).evaluate(None, mode))

        results = {
            "gradient": ravel_pytree(loss.grad_of_evaluate(None, "regular"))[0],
            "gradient by autodiff": jax.grad(total)(flat),
            "Hessian by autodiff": jax.hessian(total)(flat),
            "ggn": matrix_of(loss.multiply_ggn, dependants),
            "ggn factor": matrix_of(loss.multiply_ggn_factor, inner),
            "ggn factor transposed": matrix_of(loss.multiply_ggn_factor_transpose, dependants),
            "ggn factor by one-hots": factor_by_one_hots(
                loss.multiply_ggn_factor_replicated_one_hot, inner.shape
            ),
        }
        if has_fisher(loss):
            results |= {
                "Fisher": matrix_of(loss.multiply_fisher, dependants),
                "Fisher factor": matrix_of(loss.multiply_fisher_factor, inner),
                "Fisher factor transposed": matrix_of(
                    loss.multiply_fisher_factor_transpose, dependants
                ),
                "Fisher factor by one-hots": factor_by_one_hots(
                    loss.multiply_fisher_factor_replicated_one_hot, inner.shape
                ),
                "Fisher by outcomes": fisher_by_outcomes(loss, *outcomes),
            }
        return results

    if case.outcomes:
        targets, weights = zip(*case.outcomes(case.loss()), strict=True)
        stacked = None if weights[0] is None else jnp.array(weights)
        outcomes = jnp.asarray(np.stack(targets)), stacked
    return jax.tree.map(np.asarray, jax.jit(compute)(case.loss().parameter_dependants))
