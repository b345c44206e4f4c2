"""Powers and eigenvectors of many matrices, which are requested first and then computed together.

A task says what is wanted of a matrix, or of several along leading axes. On one device each task is
computed by itself. On several, all matrices are assigned to devices, so that each has about as much
to do, and results are gathered on all.

Matrices of one size form a stack. Each device runs one loop over its own rows of it: so all devices
run the same program, and it does not grow with their number.
"""

import abc
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from curvax._cpu import pad_to_tiles
from curvax._types import Array, PyTree
from curvax.curvature.linalg.psd import (
    add_identity,
    checked_inverse,
    per_matrix,
    psd_eigh,
    psd_power,
    spectral_of,
)
from curvax.devices.task_assignment import assign, own_rows

Rows = tuple[Array, ...]
"""Arrays with a row for each matrix."""


class MatrixTask(abc.ABC):
    """Something to compute of matrices."""

    @abc.abstractmethod
    def alone(self) -> Any:
        """Compute the result at once."""

    @abc.abstractmethod
    def zeros(self) -> Any:
        """Return zeros like the result."""

    @property
    @abc.abstractmethod
    def kind(self) -> Any:
        """Return a key: tasks with the same one can be rows of one stack."""

    @abc.abstractmethod
    def rows(self) -> Rows:
        """Return the operands of `each`, with a row for each matrix."""

    @abc.abstractmethod
    def each(self, *row: Array) -> Any:
        """Compute the result for one matrix."""

    @abc.abstractmethod
    def of_rows(self, found: Any) -> Any:
        """Put the result together from those of its matrices."""


@dataclass(frozen=True)
class Power(MatrixTask):
    """`(scale * matrix + identity_weight * identity) ** power`."""

    matrix: Array
    identity_weight: ArrayLike
    power: float | int
    scale: ArrayLike = 1

    def alone(self) -> Array:
        return psd_power(self.matrix, self.identity_weight, self.power, self.scale)

    def zeros(self) -> Array:
        return jnp.zeros_like(self.matrix)

    @property
    def kind(self) -> Any:
        size = jax.eval_shape(lambda: self.rows()[0]).shape[-1]
        return Power, self.power, size, self.matrix.dtype

    def rows(self) -> Rows:
        flat = _flat(self.matrix)
        weight, scale = (
            jnp.broadcast_to(jnp.asarray(x).astype(flat.dtype), self.matrix.shape[:-2]).reshape(-1)
            for x in (self.identity_weight, self.scale)
        )
        scaled = per_matrix(scale, 2, flat.dtype) * flat
        return (pad_to_tiles(add_identity(scaled, weight)) if self.power == -1 else scaled), weight

    def each(self, *row: Array) -> Array:
        matrix, weight = row
        if self.power == -1:
            return checked_inverse(matrix, weight)
        return spectral_of(matrix, weight, jnp.ones_like(weight), power=self.power)

    def of_rows(self, found: Array) -> Array:
        size = self.matrix.shape[-1]
        return found[:, :size, :size].reshape(self.matrix.shape)


@dataclass(frozen=True)
class Eigenvectors(MatrixTask):
    """Eigenvalues, none of them negative, and eigenvectors, as columns."""

    matrix: Array

    def alone(self) -> tuple[Array, Array]:
        return psd_eigh(self.matrix)

    def zeros(self) -> tuple[Array, Array]:
        return jnp.zeros_like(self.matrix[..., 0]), jnp.zeros_like(self.matrix)

    @property
    def kind(self) -> Any:
        return Eigenvectors, self.matrix.shape[-1], self.matrix.dtype

    def rows(self) -> Rows:
        return (_flat(self.matrix),)

    def each(self, *row: Array) -> tuple[Array, Array]:
        return psd_eigh(*row)

    def of_rows(self, found: tuple[Array, Array]) -> tuple[Array, Array]:
        values, vectors = found
        return values.reshape(self.matrix.shape[:-1]), vectors.reshape(self.matrix.shape)


def run_matrix_tasks(requests: PyTree, axis_name: str | None = None) -> Any:
    """Run a pytree of tasks and return that of their results. What is no task is its own result.

    Arguments:
        requests: what to compute.
        axis_name: the name of a mapped axis of devices to assign the tasks to, if there is one. All
            of them have the same tasks. There is no reverse derivative then.
    """
    tasks, tree = jax.tree.flatten(requests)
    results = list(tasks)
    kinds: dict[Any, list[int]] = {}
    for number, task in enumerate(tasks):
        if isinstance(task, MatrixTask):
            if axis_name is None or not _is_worth_sharing(task):
                results[number] = task.alone()
            else:
                kinds.setdefault(task.kind, []).append(number)
    if axis_name is not None and kinds:
        stacks = [_Stack.of([tasks[number] for number in own]) for own in kinds.values()]
        for own, found in zip(kinds.values(), _shared_out(stacks, axis_name), strict=True):
            for number, result in zip(own, found, strict=True):
                results[number] = result
    return tree.unflatten(results)


@dataclass(frozen=True)
class _Stack:
    """All matrices of tasks of one kind."""

    tasks: Sequence[MatrixTask]
    rows: Rows
    lengths: Sequence[int]
    """How many matrices each task has."""

    @classmethod
    def of(cls, tasks: Sequence[MatrixTask]) -> "_Stack":
        each = [task.rows() for task in tasks]
        rows = tuple(jnp.concatenate(parts) for parts in zip(*each, strict=True))
        return cls(tasks, rows, [own[0].shape[0] for own in each])

    @property
    def work(self) -> list[float]:
        """About how much there is to do for each matrix."""
        matrices = self.rows[0]
        return [float(matrices.shape[-1]) ** 3] * matrices.shape[0]

    def each(self, number: Array) -> Any:
        """The result for one of the matrices."""
        take = lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False)
        return self.tasks[0].each(*map(take, self.rows))

    def split(self, found: Any) -> list[Any]:
        """The results of the tasks, from those of all matrices."""
        edges = np.cumsum([0, *self.lengths])
        part = lambda start, end: jax.tree.map(lambda x: x[start:end], found)
        parts = [part(*ends) for ends in itertools.pairwise(edges)]
        return [task.of_rows(own) for task, own in zip(self.tasks, parts, strict=True)]


def _shared_out(stacks: Sequence[_Stack], axis_name: str) -> list[list[Any]]:
    """The results of the tasks of all stacks, each matrix computed on one device."""
    count, device = lax.axis_size(axis_name), lax.axis_index(axis_name)
    owners = iter(assign([work for stack in stacks for work in stack.work], count))
    found = []
    for stack in stacks:
        own = [next(owners) for _ in stack.work]
        numbers = [[k for k, owner in enumerate(own) if owner == who] for who in range(count)]
        found.append(own_rows(stack.each, numbers, device, _zeros(stack)))
    return [stack.split(own) for stack, own in zip(stacks, lax.psum(found, axis_name), strict=True)]


def _zeros(stack: _Stack) -> Any:
    """What is yet to be found of all matrices of a stack."""
    shapes = jax.eval_shape(stack.each, jnp.zeros((), jnp.int32))
    number = sum(stack.lengths)
    return jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), shapes)


def _is_worth_sharing(task: MatrixTask) -> bool:
    """Return whether a task takes so long that sending its result to all devices pays."""
    return not (isinstance(task, Power) and (task.power == 1 or task.matrix.size == 0))


def _flat(matrix: Array) -> Array:
    """Return matrices along a single leading axis."""
    return matrix.reshape(-1, *matrix.shape[-2:])
