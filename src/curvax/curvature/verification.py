"""`verify_curvature`: the distance of an estimate from the exact matrix, block by block."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from curvax._errors import where
from curvax._reports import table
from curvax._types import Array, PyTree
from curvax.curvature.batch import default_batch_size_extractor
from curvax.curvature.block_diagonal import BlockDiagonalCurvature, BlockDiagonalState
from curvax.curvature.blocks.base import CurvatureBlock, present
from curvax.curvature.implicit import ImplicitExactCurvature, Number


@dataclass(frozen=True)
class BlockError:
    """The distance of a block from the exact one.

    Attributes:
        params: Paths of the parameters.
        block: Class of the block.
        error: Norm of the difference, divided by the norm of the exact block.
        params_errors: The same for the rows of each parameter.
        scale: Mean of the block's quadratic form, divided by that of the exact one: the factor, for
            a block that is wrong by a factor only.
    """

    params: tuple[str, ...]
    block: str
    error: float
    params_errors: tuple[float, ...]
    scale: float


@dataclass(frozen=True)
class VerificationReport:
    """The distance of an estimate from the exact matrix, printed as a table.

    All norms are Frobenius norms, estimated from products with random vectors.

    Attributes:
        matrix: The exact matrix of the comparison: "fisher", "ggn" or "hessian".
        rows: The errors of each block.
        outside: Norm of the part of the exact matrix that is in no block, divided by its norm.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
        >>> estimator = curvax.BlockDiagonalCurvature(model)
        >>> key = jax.random.key(0)
        >>> state = estimator.init(key, args, None, None)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
        ... )
        >>> report = curvax.verify_curvature(estimator, state, args, key)
        >>> report.matrix, report.rows[0].block, round(report.rows[0].scale, 3)
        ('fisher', 'DenseTwoKroneckerFactored', 1.0)
    """

    matrix: str
    rows: tuple[BlockError, ...]
    outside: float

    @property
    def largest_error(self) -> float:
        """The largest error of all blocks."""
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
    state: BlockDiagonalState,
    func_args: Sequence[PyTree],
    rng: Array,
    *,
    num_probes: int = 16,
    matrix: str | None = None,
    batch_size: Number | None = None,
) -> VerificationReport:
    """Compare a curvature estimate with exact products: how good is K-FAC for this model?

    For each block, random vectors that are zero elsewhere are multiplied by the estimate and by the
    exact matrix at these arguments. Estimates that are averages over several batches, or that come
    from a few samples, also differ for that reason.

    Arguments:
        estimator: The estimator.
        state: State of the estimator.
        func_args: Arguments of the function.
        rng: Random key for the vectors.
        num_probes: Number of vectors for each block. The relative precision of the errors is about
            `1 / sqrt(num_probes)`.
        matrix: Exact matrix to compare with: "fisher", "ggn" or "hessian". By default the matrix
            that the estimator estimates by default.
        batch_size: Number of examples, if it is not the length of the batch.

    Returns:
        A report with a row for each block.

    Raises:
        ValueError: If there is no such matrix, or `num_probes` is less than one.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 0.0]])
        >>> estimator = curvax.BlockDiagonalCurvature(model)
        >>> key = jax.random.key(0)
        >>> state = estimator.init(key, args, None, None)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
        ... )
        >>> curvax.verify_curvature(estimator, state, args, key).largest_error < 1e-5
        True
    """
    matrix = estimator.default_mat_type if matrix is None else matrix
    if matrix not in ("fisher", "ggn", "hessian") or num_probes < 1:
        raise ValueError(
            f"{where()}: matrix must be 'fisher', 'ggn' or 'hessian' and num_probes at least one, "
            f"got {matrix!r} and {num_probes}."
        )
    exact = ImplicitExactCurvature(
        estimator.func,
        estimator.params_index,
        default_batch_size_extractor if batch_size is None else lambda _: batch_size,
        batch_index=estimator.batch_argument,
    )
    multiply_exact = getattr(exact, f"multiply_{matrix}")

    def mean_of_probes(
        func_args: Sequence[PyTree], state: BlockDiagonalState
    ) -> tuple[list[_Norms], Array]:
        def of_probe(key: Array) -> tuple[list[_Norms], Array]:
            product = functools.partial(multiply_exact, func_args)
            return _norms_of_probe(estimator, state, product, key)

        norms = jax.lax.map(of_probe, jax.random.split(rng, num_probes))
        return jax.tree.map(lambda x: jnp.mean(x, 0), norms)

    return _report(estimator, matrix, *jax.jit(mean_of_probes)(tuple(func_args), state))


class _Norms(NamedTuple):
    """The products of a block, estimated and exact, with one random vector.

    Attributes:
        differences: Squared norm of their difference, for each parameter.
        sizes: Squared norm of the exact product, for each parameter.
        forms: The quadratic forms of the estimate and of the exact block.
    """

    differences: list[Array]
    sizes: list[Array]
    forms: list[Array]


def _norms_of_probe(
    estimator: BlockDiagonalCurvature,
    state: BlockDiagonalState,
    product: Callable[[PyTree], PyTree],
    key: Array,
) -> tuple[list[_Norms], Array]:
    """Multiply a random vector, block by block, by the estimate and by the exact matrix.

    Returns:
        The norms of each block, and the squared norm of the exact product with the entire vector.
    """
    leaves, tree = jax.tree.flatten(estimator.params_shapes)
    keys = jax.random.split(key, len(leaves))
    samples = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    vector = jax.tree.unflatten(tree, samples)
    parts = estimator.params_vector_to_blocks_vectors(vector)
    norms = []
    blocks = zip(estimator.blocks or (), state.blocks_states, strict=True)
    for index, (block, block_state) in enumerate(blocks):
        masked = [
            [x if k == index else jnp.zeros_like(x) for x in part] for k, part in enumerate(parts)
        ]
        column = product(estimator.blocks_vectors_to_params_vector(masked))
        exact = estimator.params_vector_to_blocks_vectors(column)[index]
        estimated = block.multiply(present(block_state), parts[index], 0.0, True, False)
        differences = [jnp.sum((a - b) ** 2) for a, b in zip(estimated, exact, strict=True)]
        forms = [_inner_product(parts[index], x) for x in (estimated, exact)]
        norms.append(_Norms(differences, [jnp.sum(b**2) for b in exact], forms))
    product_leaves = jax.tree.leaves(product(vector))
    return norms, _inner_product(product_leaves, product_leaves)


def _inner_product(xs: Sequence[Array], ys: Sequence[Array]) -> Array:
    products = (jnp.sum(x * y) for x, y in zip(xs, ys, strict=True))
    return sum(products, start=jnp.zeros(()))


def _report(
    estimator: BlockDiagonalCurvature, matrix: str, norms: Sequence[_Norms], total: Array
) -> VerificationReport:
    """Return the report, from the mean over all probes of the norms."""
    blocks = zip(estimator.params_names, estimator.blocks or (), norms, strict=True)
    rows = [_block_error(names, block, of_block) for names, block, of_block in blocks]
    inside = sum(float(size) for of_block in norms for size in of_block.sizes)
    outside = max(0.0, 1 - inside / float(total)) ** 0.5 if float(total) else 0.0
    return VerificationReport(matrix, tuple(rows), outside)


def _block_error(names: Sequence[str], block: CurvatureBlock, norms: _Norms) -> BlockError:
    differences, sizes, forms = (list(map(float, each)) for each in norms)
    errors = [_ratio(a, b) ** 0.5 for a, b in zip(differences, sizes, strict=True)]
    error = _ratio(sum(differences), sum(sizes)) ** 0.5
    return BlockError(tuple(names), type(block).__name__, error, tuple(errors), _ratio(*forms))


def _ratio(part: float, total: float) -> float:
    """Return the quotient; 0 for `0 / 0`, and infinity for any other division by zero."""
    if total:
        return part / total
    return 0.0 if not part else float("inf")
