"""Products that are sums over the examples of a batch, of all at once or of microbatches in turn.

What the losses of a model depend on has rows that belong to examples. Sums over them come out the
same from microbatches if each has its share of the rows of every loss, which is checked.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvax._errors import where
from curvax._tree import Static
from curvax._types import Array, PyTree
from curvax.curvature.batch_size import is_of_examples
from curvax.curvature.loss_products import (
    LossMatrix,
    Operation,
    check_vectors,
    factor,
    factor_transpose,
    jacobian_transpose,
)
from curvax.layers.tracing.loss_derivatives import LossDerivatives, Losses
from curvax.layers.tracing.loss_map import LossMap
from curvax.maps.accumulators import AccumulationType
from curvax.maps.microbatch import microbatch

__all__ = [
    "BatchArgument",
    "SumOverExamples",
    "axes_of",
    "by_example",
    "check_separate",
    "length_of",
]


_OF_LOSSES: tuple[Operation, ...] = (factor, jacobian_transpose)
"""Products with vectors that have a part for each example."""


@dataclass(frozen=True)
class BatchArgument:
    """Which arguments of a function are its batch: one, several, or the last that is no other."""

    params_index: int
    index: int | Sequence[int] | None

    def of(self, func_args: Any) -> PyTree:
        """The batch among the arguments; a tuple of those that are named, or of none."""
        if not isinstance(func_args, tuple | list):
            raise TypeError(
                f"{where()}: the arguments of the function are given as one sequence, such as "
                f"(params, batch), got {type(func_args).__name__}."
            )
        found = tuple(func_args[i] for i in self._places(len(func_args)))
        return found if isinstance(self.index, Sequence) or not found else found[0]

    def replace(self, func_args: Sequence[PyTree], batch: PyTree) -> tuple[PyTree, ...]:
        """The arguments with another batch."""
        places = self._places(len(func_args))
        several = isinstance(self.index, Sequence) or not places
        given = dict(zip(places, batch if several else (batch,), strict=True))
        return tuple(given.get(i, x) for i, x in enumerate(func_args))

    def without(self, func_args: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """The arguments with nothing in the place of the batch."""
        places = self._places(len(func_args))
        return tuple(() if i in places else x for i, x in enumerate(func_args))

    def _places(self, count: int) -> list[int]:
        params, asked = self.params_index, self.index
        if not -count <= params < count:
            raise ValueError(
                f"{where()}: the parameters are argument {params}, but the function was given "
                f"{count} arguments."
            )
        if asked is None:
            return [i for i in range(count) if i != params % count][-1:]
        places = list(asked) if isinstance(asked, Sequence) else [asked]
        if any(not -count <= i < count or (i - params) % count == 0 for i in places):
            raise ValueError(
                f"{where()}: batch_index={asked!r} must say which of the {count} arguments are "
                f"the batch, and not name the parameters, which are argument {params}."
            )
        return [i % count for i in places]


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


def length_of(batch: PyTree) -> int:
    """The number of examples of a batch."""
    lengths = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if is_of_examples(leaf)]
    return lengths[0] if lengths else 0


def axes_of(batch: PyTree) -> PyTree:
    """Along which axis each leaf of a batch is split: the first, or none."""
    return jax.tree.map(lambda leaf: 0 if is_of_examples(leaf) else None, batch)


def check_separate(at: LossMap) -> None:
    """What is computed for one example does not depend on others."""
    operation = at.processed.interaction
    if operation is not None:
        raise ValueError(
            f"{where()}: the examples of a batch interact, by `{operation}` (as with batch "
            f"normalisation in training), so that a batch is not the sum of its microbatches. "
            f"Leave microbatch_size and memory_budget out, or say examples_interact=True to take "
            f"each microbatch for a batch (in curvax.Optimizer: "
            f"auto_register_kwargs={{'examples_interact': True}})."
        )


def by_example(x: Array, length: int) -> Array:
    """What has a row for each of a loss, as (examples, rows of each, ...)."""
    if not length or x.shape[0] % length:
        raise ValueError(
            f"{where()}: in microbatches each example has as many rows of every loss, but there "
            f"are {x.shape[0]} rows for {length} examples. Leave microbatch_size and memory_budget "
            f"out, or, in an estimator, say by batch_index which arguments are the batch."
        )
    return jnp.moveaxis(x.reshape(-1, length, *x.shape[1:]), 1, 0)
