"""Powers and eigendecompositions of many matrices, requested first and then computed together.

A task describes a computation on a matrix, or on several along leading axes. On one device each
task runs by itself. On several devices, matrices are assigned to devices so as to balance the work,
and the results are gathered on all devices.

Matrices of one size form a stack, and each device loops over the rows of it that are assigned to
it. So all devices run the same program, whose size does not grow with their number.
"""

import abc
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

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

Result = Array | tuple[Array, Array]
"""A matrix power, or eigenvalues and eigenvectors."""


class MatrixTask(abc.ABC):
    """A computation on one or several matrices."""

    @abc.abstractmethod
    def alone(self) -> Result:
        """Compute the result of this task alone."""

    @abc.abstractmethod
    def zeros(self) -> Result:
        """Return zeros like the result."""

    @property
    @abc.abstractmethod
    def kind(self) -> Hashable:
        """A key: tasks with the same key can share a stack."""

    @abc.abstractmethod
    def rows(self) -> Rows:
        """Return the operands of `each`, with a row for each matrix."""

    @abc.abstractmethod
    def each(self, *row: Array) -> Result:
        """Compute the result for one matrix."""

    @abc.abstractmethod
    def of_rows(self, rows: Result) -> Result:
        """Return the result of the task, from those of its matrices along a leading axis."""


@dataclass(frozen=True)
class Power(MatrixTask):
    """The task of computing `(scale * matrix + identity_weight * identity) ** power`."""

    matrix: Array
    identity_weight: ArrayLike
    power: float | int
    scale: ArrayLike = 1

    def alone(self) -> Array:
        return psd_power(self.matrix, self.identity_weight, self.power, self.scale)

    def zeros(self) -> Array:
        return jnp.zeros_like(self.matrix)

    @property
    def kind(self) -> Hashable:
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

    def of_rows(self, rows: Result) -> Array:
        assert not isinstance(rows, tuple)
        size = self.matrix.shape[-1]
        return rows[:, :size, :size].reshape(self.matrix.shape)


@dataclass(frozen=True)
class Eigenvectors(MatrixTask):
    """The task of computing eigenvalues, clamped to be non-negative, and eigenvectors."""

    matrix: Array

    def alone(self) -> tuple[Array, Array]:
        return psd_eigh(self.matrix)

    def zeros(self) -> tuple[Array, Array]:
        return jnp.zeros_like(self.matrix[..., 0]), jnp.zeros_like(self.matrix)

    @property
    def kind(self) -> Hashable:
        return Eigenvectors, self.matrix.shape[-1], self.matrix.dtype

    def rows(self) -> Rows:
        return (_flat(self.matrix),)

    def each(self, *row: Array) -> tuple[Array, Array]:
        return psd_eigh(*row)

    def of_rows(self, rows: Result) -> tuple[Array, Array]:
        values, vectors = rows
        return values.reshape(self.matrix.shape[:-1]), vectors.reshape(self.matrix.shape)


def run_matrix_tasks(requests: PyTree, axis_name: str | None = None) -> PyTree:
    """Return a pytree with every task replaced by its result; other leaves are returned unchanged.

    Arguments:
        requests: A pytree of tasks, the same on all devices.
        axis_name: Name of a mapped axis of devices to assign the tasks to, or None. With it, there
            is no reverse-mode derivative.

    Returns:
        The results, on all devices.
    """
    tasks, tree = jax.tree.flatten(requests)
    results = list(tasks)
    tasks_of_kind: dict[Hashable, list[int]] = {}
    for index, task in enumerate(tasks):
        if isinstance(task, MatrixTask):
            if axis_name is None or not _is_worth_distributing(task):
                results[index] = task.alone()
            else:
                tasks_of_kind.setdefault(task.kind, []).append(index)
    if axis_name is not None and tasks_of_kind:
        groups = list(tasks_of_kind.values())
        stacks = [_Stack.of([tasks[index] for index in group]) for group in groups]
        for group, found in zip(groups, _run_on_devices(stacks, axis_name), strict=True):
            for index, result in zip(group, found, strict=True):
                results[index] = result
    return tree.unflatten(results)


@dataclass(frozen=True)
class _Stack:
    """All matrices of tasks of one kind.

    Attributes:
        tasks: The tasks.
        rows: The operands of all matrices.
        lengths: Number of matrices of each task.
    """

    tasks: Sequence[MatrixTask]
    rows: Rows
    lengths: Sequence[int]

    @classmethod
    def of(cls, tasks: Sequence[MatrixTask]) -> "_Stack":
        rows_of_tasks = [task.rows() for task in tasks]
        rows = tuple(jnp.concatenate(parts) for parts in zip(*rows_of_tasks, strict=True))
        return cls(tasks, rows, [rows[0].shape[0] for rows in rows_of_tasks])

    @property
    def work(self) -> list[float]:
        """The approximate number of operations for each matrix."""
        matrices = self.rows[0]
        return [float(matrices.shape[-1]) ** 3] * matrices.shape[0]

    def each(self, index: Array) -> Result:
        """Compute the result for the matrix of an index."""
        take = lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False)
        return self.tasks[0].each(*map(take, self.rows))

    def zeros(self) -> Result:
        """Return zeros like the results of all matrices."""
        shapes = jax.eval_shape(self.each, jnp.zeros((), jnp.int32))
        count = sum(self.lengths)
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)

    def by_task(self, rows: Result) -> list[Result]:
        """Return the results of the tasks, from those of all matrices."""
        edges = np.cumsum([0, *self.lengths])
        part = lambda start, end: jax.tree.map(lambda x: x[start:end], rows)
        parts = [part(*ends) for ends in itertools.pairwise(edges)]
        return [task.of_rows(rows) for task, rows in zip(self.tasks, parts, strict=True)]


def _run_on_devices(stacks: Sequence[_Stack], axis_name: str) -> list[list[Result]]:
    """Return the results of the tasks of all stacks, each matrix computed on one device."""
    count, device = lax.axis_size(axis_name), lax.axis_index(axis_name)
    owners = iter(assign([work for stack in stacks for work in stack.work], count))
    local = []
    for stack in stacks:
        owner_of_row = [next(owners) for _ in stack.work]
        rows_of_device = [
            [row for row, owner in enumerate(owner_of_row) if owner == index]
            for index in range(count)
        ]
        local.append(own_rows(stack.each, rows_of_device, device, stack.zeros()))
    # Rows that other devices compute are zero here, so the sum gathers them.
    gathered = lax.psum(local, axis_name)
    return [stack.by_task(rows) for stack, rows in zip(stacks, gathered, strict=True)]


def _is_worth_distributing(task: MatrixTask) -> bool:
    """Return whether a task takes longer than communicating its result."""
    return not (isinstance(task, Power) and (task.power == 1 or task.matrix.size == 0))


def _flat(matrix: Array) -> Array:
    """Merge the leading axes into one."""
    return matrix.reshape(-1, *matrix.shape[-2:])
