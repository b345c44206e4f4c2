"""Products that are sums over the examples of a batch, of all at once or of microbatches in turn.

What the losses of a model depend on has rows that belong to examples. Sums over them come out the
same from microbatches if each has its share of the rows of every loss, which is checked.
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

_OF_LOSSES: tuple[Operation, ...] = (factor, jacobian_transpose)
"""Products with vectors that have a part for each example."""


class SumOverExamples:
    """Computes products, in microbatches if a size or a budget is given."""

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
        self._in_microbatches(self._part)  # A wrong size or budget is an error here.

    def __call__(
        self,
        operation: Operation,
        matrix: LossMatrix | None,
        func_args: Sequence[PyTree],
        vector: PyTree,
    ) -> PyTree:
        """The product of the whole batch."""
        batch = self._argument.of(func_args)
        if self._at_once:
            return operation(self._model, func_args, matrix, vector)[0]
        task = self._task(operation, matrix, func_args, vector, length_of(batch))
        kind = AccumulationType.CONCAT if operation is factor_transpose else AccumulationType.SUM
        run = self._in_microbatches(self._part, accumulator=kind, in_axes=[axes_of(batch), 0])
        whole, split = ((), vector) if operation in _OF_LOSSES else (vector, ())
        return run(Static(task), self._argument.without(func_args), whole, batch, split)

    def _part(
        self, task: Static["_Task"], others: PyTree, vector: PyTree, batch: PyTree, split: PyTree
    ) -> PyTree:
        """The product of a microbatch, and a vector, or one that is split like the batch."""
        given = task.value
        func_args = self._argument.replace(others, batch)
        vector = split if given.operation in _OF_LOSSES else vector
        product, losses = given.operation(self._model, func_args, given.matrix, vector)
        given.check(losses, length_of(batch))
        return product

    def _task(
        self,
        operation: Operation,
        matrix: LossMatrix | None,
        func_args: Sequence[PyTree],
        vector: PyTree,
        length: int,
    ) -> "_Task":
        """What is to be done, if it can be done in microbatches."""

        def look(losses: Losses) -> tuple[int, ...]:
            if operation in _OF_LOSSES:
                check_vectors(losses, matrix, vector)
            return _rows(losses)

        rows = self._model.inspect(func_args, look)
        if operation in (*_OF_LOSSES, factor_transpose) and set(rows) != {length}:
            raise ValueError(
                f"{where()}: in microbatches, vectors of losses are split like the batch, so each "
                f"loss must have one row for each of the {length} examples, but the losses have "
                f"{rows}. For this product use an instance without microbatch_size and "
                f"memory_budget."
            )
        return _Task(operation, matrix, length, rows)


class _Task(NamedTuple):
    """What to compute, the length of the whole batch, and how many rows the losses have for it."""

    operation: Operation
    matrix: LossMatrix | None
    length: int
    rows: tuple[int, ...]

    def check(self, losses: Losses, length: int) -> None:
        """Each microbatch must have its share of all losses, or their sum is something else."""
        found = _rows(losses)
        if [n * self.length for n in found] != [n * length for n in self.rows]:
            raise ValueError(
                f"{where()}: losses must be sums over examples to be computed in microbatches, but "
                f"for {self.length} examples they have {self.rows} rows, and for {length} they "
                f"have {found}. Leave microbatch_size and memory_budget out, or say by "
                f"batch_index which arguments are the batch."
            )


def _rows(losses: Losses) -> tuple[int, ...]:
    return tuple(loss.parameter_dependants[0].shape[0] for loss in losses)
