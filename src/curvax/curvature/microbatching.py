"""Products that are sums over the examples of a batch, computed at once or in microbatches.

The inputs of the losses have rows that belong to examples. A sum over them is the sum over
microbatches if every microbatch has its proportion of the rows of every loss, which is checked.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from curvax._errors import where
from curvax._tree import Static
from curvax._types import PyTree
from curvax.curvature.batch import BatchArgument, axes_of, length_of
from curvax.curvature.loss_products import (
    LossMatrix,
    Operation,
    check_vectors,
    factor,
    factor_transpose,
    jacobian_transpose,
)
from curvax.layers.tracing.loss_derivatives import LossDerivatives
from curvax.layers.tracing.loss_map import Losses
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch

_WITH_VECTORS_OF_LOSSES: tuple[Operation, ...] = (factor, jacobian_transpose)
"""Products with vectors that have rows for each example."""


class SumOverExamples:
    """Computes products, in microbatches if a size or a memory budget is given.

    Arguments:
        model: The losses of the function and their derivatives.
        argument: The arguments that hold the batch.
        microbatch_size: Number of examples to process at a time; None for all.
        memory_budget: Memory that a product may use, in place of `microbatch_size`.
    """

    def __init__(
        self,
        model: LossDerivatives,
        argument: BatchArgument,
        microbatch_size: int | None,
        memory_budget: int | float | str | None,
    ) -> None:
        self._model, self._argument = model, argument
        self._at_once = microbatch_size is None and memory_budget is None
        self._in_microbatches = functools.partial(
            microbatch,
            argnums=(3, 4),
            microbatch_size=microbatch_size,
            memory_budget=memory_budget,
        )
        self._in_microbatches(self._of_microbatch)  # Validates the size and the budget.

    def __call__(
        self,
        operation: Operation,
        matrix: LossMatrix | None,
        func_args: Sequence[PyTree],
        vector: PyTree,
    ) -> PyTree:
        """Return the product for the entire batch."""
        batch = self._argument.of(func_args)
        if self._at_once:
            return operation(self._model, func_args, matrix, vector)[0]
        task = self._checked_task(operation, matrix, func_args, vector, length_of(batch))
        kind = AccumulationType.CONCAT if operation is factor_transpose else AccumulationType.SUM
        run = self._in_microbatches(
            self._of_microbatch, accumulator=kind, in_axes=[axes_of(batch), 0]
        )
        of_params, of_losses = ((), vector) if task.has_vectors_of_losses else (vector, ())
        return run(Static(task), self._argument.without(func_args), of_params, batch, of_losses)

    def _of_microbatch(
        self,
        static_task: Static["_Task"],
        other_args: PyTree,
        of_params: PyTree,
        batch: PyTree,
        of_losses: PyTree,
    ) -> PyTree:
        """Return the product for a microbatch, with a vector like the parameters or the losses."""
        task = static_task.value
        func_args = self._argument.replace(other_args, batch)
        vector = of_losses if task.has_vectors_of_losses else of_params
        product, losses = task.operation(self._model, func_args, task.matrix, vector)
        task.check(losses, length_of(batch))
        return product

    def _checked_task(
        self,
        operation: Operation,
        matrix: LossMatrix | None,
        func_args: Sequence[PyTree],
        vector: PyTree,
        length: int,
    ) -> "_Task":
        """Return the task; raise an error if it cannot be computed in microbatches."""

        def look(losses: Losses) -> tuple[int, ...]:
            if operation in _WITH_VECTORS_OF_LOSSES:
                check_vectors(losses, matrix, vector)
            return _num_rows(losses)

        rows = self._model.inspect(func_args, look)
        if operation in (*_WITH_VECTORS_OF_LOSSES, factor_transpose) and set(rows) != {length}:
            raise ValueError(
                f"{where()}: microbatches divide vectors of losses like the batch, so each loss "
                f"must have one row for each of the {length} examples, but the losses have {rows}. "
                f"For this product use an instance without microbatch_size and memory_budget."
            )
        return _Task(operation, matrix, length, rows)


class _Task(NamedTuple):
    """A product, with the number of examples of the batch and of rows of each loss.

    Attributes:
        operation: The product.
        matrix: The matrix of losses, if the product has one.
        length: Number of examples in the batch.
        rows: Number of rows of each loss, for the batch.
    """

    operation: Operation
    matrix: LossMatrix | None
    length: int
    rows: tuple[int, ...]

    @property
    def has_vectors_of_losses(self) -> bool:
        """Whether the product is with vectors that have rows for each example."""
        return self.operation in _WITH_VECTORS_OF_LOSSES

    def check(self, losses: Losses, length: int) -> None:
        """Check that a microbatch has its proportion of the rows of every loss."""
        rows = _num_rows(losses)
        if [n * self.length for n in rows] != [n * length for n in self.rows]:
            raise ValueError(
                f"{where()}: losses must be sums over examples to be computed in microbatches, but "
                f"they have {self.rows} rows for {self.length} examples, and {rows} for {length}. "
                f"Leave out microbatch_size and memory_budget, or say by batch_index which "
                f"arguments are the batch."
            )


def _num_rows(losses: Losses) -> tuple[int, ...]:
    return tuple(loss.parameter_dependants[0].shape[0] for loss in losses)
