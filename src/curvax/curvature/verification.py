"""`verify_curvature`: how far an estimate is from the exact matrix, block by block."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvax._errors import where
from curvax._reports import table
from curvax._types import Array, PyTree
from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.curvature.implicit import ImplicitExactCurvature


@dataclass(frozen=True)
class BlockError:
    """How far a block is from the exact one.

    Attributes:
        params: the paths of its parameters.
        block: the class of the block.
        error: the norm of the difference, divided by the norm of the exact block.
        params_errors: the same, of the rows that belong to each parameter.
        scale: the mean of the block's quadratic form, divided by that of the exact one; a block
            that is only too large or too small by a factor has that factor here.
    """

    params: tuple[str, ...]
    block: str
    error: float
    params_errors: tuple[float, ...]
    scale: float


@dataclass(frozen=True)
class VerificationReport:
    """How far an estimate is from the exact matrix; it prints as a table.

    All norms are Frobenius norms, estimated by products with random vectors.

    Attributes:
        matrix: which exact matrix it was compared with.
        rows: the errors of all blocks.
        outside: the share of the exact matrix that is in no block: the norm of that part, divided
            by the norm of all.
    """

    matrix: str
    rows: tuple[BlockError, ...]
    outside: float

    @property
    def largest_error(self) -> float:
        """The largest of the errors of all blocks."""
        return max(row.error for row in self.rows)

    def __str__(self) -> str:
        rows = [
            (path, row.block, f"{error:.2g}", f"{row.error:.2g}", f"{row.scale:.3g}")
            for row in self.rows
            for path, error in zip(row.params, row.params_errors, strict=True)
        ]
        head = ("parameter", "block", "error", "error of block", "scale")
        text = table(head, rows)
        return (
            f"{text}\n\n{100 * self.outside:.3g} % of the norm of the exact {self.matrix} matrix "
            f"is between blocks"
        )


def verify_curvature(
    estimator: BlockDiagonalCurvature,
    state: Any,
    func_args: Sequence[PyTree],
    rng: Array,
    *,
    num_probes: int = 16,
    matrix: str | None = None,
    batch_size: Any = None,
) -> VerificationReport:
    """Compare an estimate of curvature with exact products: how good is K-FAC for this model?

    For each block, some random vectors that are zero elsewhere are multiplied with the estimate and
    with the exact matrix at these arguments. Estimates that are averages over several batches, or
    that come from a few samples, differ from it for that reason too.

    Arguments:
        estimator: the estimator.
        state: its state.
        func_args: the arguments of the function.
        rng: a key for the random vectors.
        num_probes: how many vectors for each block. Errors are known to about 1 part in
            `sqrt(num_probes)`.
        matrix: what to compare with, "fisher", "ggn" or "hessian"; by default the matrix that the
            estimator estimates by default.
        batch_size: the number of examples, if it is not the length of the batch.

    Returns:
        A report with a row for each block.

    Raises:
        ValueError: if there is no such matrix, or `num_probes` is less than one.
    """
    matrix = estimator.default_mat_type if matrix is None else matrix
    if matrix not in ("fisher", "ggn", "hessian") or num_probes < 1:
        raise ValueError(
            f"{where()}: matrix is 'fisher', 'ggn' or 'hessian' and num_probes at least one, got "
            f"{matrix!r} and {num_probes}."
        )
    options: dict[str, Any] = {"batch_index": estimator.batch_argument}
    if batch_size is not None:
        options["batch_size_extractor"] = lambda _: batch_size
    exact = ImplicitExactCurvature(estimator.func, estimator.params_index, **options)
    multiply_exact = getattr(exact, f"multiply_{matrix}")

    def mean_of_probes(func_args: Sequence[PyTree], state: Any) -> tuple[list[_Norms], Any]:
        def of_probe(key: Array) -> tuple[list[_Norms], Any]:
            product = functools.partial(multiply_exact, func_args)
            return _norms_of_probe(estimator, state, product, key)

        norms = jax.lax.map(of_probe, jax.random.split(rng, num_probes))
        return jax.tree.map(lambda x: jnp.mean(x, 0), norms)

    return _report(estimator, matrix, *jax.jit(mean_of_probes)(tuple(func_args), state))


class _Norms(NamedTuple):
    """What a random vector says of a block: numbers for each of its parameters, and of all."""

    differences: list[Array]
    """Squared norms of estimated minus exact products, for each parameter."""
    sizes: list[Array]
    """Squared norms of exact products, for each parameter."""
    forms: list[Any]
    """The quadratic forms of the estimate and of the exact block."""


def _norms_of_probe(
    estimator: BlockDiagonalCurvature,
    state: Any,
    product: Callable[[PyTree], PyTree],
    key: Array,
) -> tuple[list[_Norms], Any]:
    """Multiply a random vector, block by block, with the estimate and with the exact matrix.

    Returns:
        The norms of each block, and the squared norm of the exact product of the whole vector.
    """
    leaves, tree = jax.tree.flatten(estimator.params_shapes)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    vector = jax.tree.unflatten(tree, drawn)
    parts = estimator.params_vector_to_blocks_vectors(vector)
    norms = []
    for index, (block, own) in enumerate(
        zip(estimator.blocks or (), state.blocks_states, strict=True)
    ):
        alone = [
            [x if k == index else jnp.zeros_like(x) for x in part] for k, part in enumerate(parts)
        ]
        everywhere = product(estimator.blocks_vectors_to_params_vector(alone))
        exact = estimator.params_vector_to_blocks_vectors(everywhere)[index]
        estimated = block.multiply(own, parts[index], 0.0, True, False)
        differences = [jnp.sum((a - b) ** 2) for a, b in zip(estimated, exact, strict=True)]
        forms = [
            sum(jnp.sum(a * b) for a, b in zip(parts[index], each, strict=True))
            for each in (estimated, exact)
        ]
        norms.append(_Norms(differences, [jnp.sum(b**2) for b in exact], forms))
    return norms, sum(jnp.sum(x**2) for x in jax.tree.leaves(product(vector)))


def _report(
    estimator: BlockDiagonalCurvature, matrix: str, norms: Sequence[_Norms], total: Any
) -> VerificationReport:
    """Make a report of the mean norms of all probes."""
    blocks = zip(estimator.params_names, estimator.blocks or (), norms, strict=True)
    rows = [
        _row(names, block, *(list(map(float, each)) for each in own))
        for names, block, own in blocks
    ]
    inside = sum(float(size) for own in norms for size in own.sizes)
    outside = max(0.0, 1 - inside / float(total)) ** 0.5 if float(total) else 0.0
    return VerificationReport(matrix, tuple(rows), outside)


def _row(
    names: Sequence[str], block: Any, apart: list[float], sizes: list[float], forms: list[float]
) -> BlockError:
    errors = [_ratio(a, b) ** 0.5 for a, b in zip(apart, sizes, strict=True)]
    error = _ratio(sum(apart), sum(sizes)) ** 0.5
    return BlockError(tuple(names), type(block).__name__, error, tuple(errors), _ratio(*forms))


def _ratio(part: float, whole: float) -> float:
    """A quotient, of which nothing in nothing is no error, and something in nothing is infinite."""
    if whole:
        return part / whole
    return 0.0 if not part else float("inf")
