"""The sides of a Kronecker product: matrices that are dense, or diagonal where they would be wide.

A side says what its arrays look like and does to them what a block needs. Several matrices, one
for each layer of a stack or for each head, are along axes in front. What a side is applied to has
the shape (..., inputs, outputs): the first side acts along the inputs, the second on the outputs.
"""

import abc
import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.linalg._psd import diagonal, per_matrix, spectral_power
from curvax.linalg._symmetric import symmetric_product
from curvax.linalg._together import Eigenvectors, Power

__all__ = ["DenseSide", "DiagonalSide", "Side"]


@dataclass(frozen=True)
class Side(abc.ABC):
    """One factor of a Kronecker product: `size` by `size` matrices, `stack` of them."""

    size: int
    stack: tuple[int, ...] = ()

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that holds it."""

    @property
    @abc.abstractmethod
    def work(self) -> float:
        """About how many operations a power of it takes."""

    @abc.abstractmethod
    def of_rows(self, rows: Array) -> Array:
        """The sum of outer products of rows (..., number, size)."""

    @abc.abstractmethod
    def of_dense(self, matrix: Array) -> Array:
        """This side of a dense matrix."""

    @abc.abstractmethod
    def of_diagonal(self, diagonal: Array) -> Array:
        """This side of a diagonal matrix."""

    @abc.abstractmethod
    def diagonal(self, matrix: Array) -> Array:
        """The diagonal of each matrix."""

    def trace(self, matrix: Array) -> Array:
        """The trace of each matrix."""
        return jnp.sum(self.diagonal(matrix), axis=-1)

    def mean(self, matrix: Array) -> Array:
        """The mean of the eigenvalues of each matrix."""
        return self.trace(matrix) / max(self.size, 1)

    @abc.abstractmethod
    def power(
        self, matrix: Array, identity_weight: ArrayLike, power: float | int, scale: ArrayLike = 1
    ) -> Array | Power:
        """`(scale * matrix + identity_weight * identity) ** power`, or the task of computing it."""

    @abc.abstractmethod
    def eigen(self, matrix: Array) -> tuple[Array, None] | Eigenvectors:
        """Eigenvalues, and None where eigenvectors are the unit vectors; or the task."""

    @abc.abstractmethod
    def act_on_inputs(self, matrix: Array, x: Array) -> Array:
        """`matrix @ x`."""

    @abc.abstractmethod
    def act_on_outputs(self, x: Array, matrix: Array) -> Array:
        """`x @ matrix`."""

    @abc.abstractmethod
    def dense(self, matrix: Array) -> Array:
        """The matrices themselves."""


class DenseSide(Side):
    """A side of dense matrices."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, self.size, self.size)

    @property
    def work(self) -> float:
        return float(math.prod(self.stack)) * self.size**3

    def of_rows(self, rows: Array) -> Array:
        return symmetric_product(rows)

    def of_dense(self, matrix: Array) -> Array:
        return matrix

    def of_diagonal(self, diagonal: Array) -> Array:
        return _of_diagonal(diagonal)

    def diagonal(self, matrix: Array) -> Array:
        return diagonal(matrix)

    def power(
        self, matrix: Array, identity_weight: ArrayLike, power: float | int, scale: ArrayLike = 1
    ) -> Power:
        return Power(matrix, identity_weight, power, scale)

    def eigen(self, matrix: Array) -> Eigenvectors:
        return Eigenvectors(matrix)

    def act_on_inputs(self, matrix: Array, x: Array) -> Array:
        return matrix @ x

    def act_on_outputs(self, x: Array, matrix: Array) -> Array:
        return x @ matrix

    def dense(self, matrix: Array) -> Array:
        return matrix


class DiagonalSide(Side):
    """A side of diagonal matrices, held as their diagonals."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, self.size)

    @property
    def work(self) -> float:
        return float(math.prod(self.stack)) * self.size

    def of_rows(self, rows: Array) -> Array:
        return jnp.sum(rows**2, axis=-2)

    def of_dense(self, matrix: Array) -> Array:
        return diagonal(matrix)

    def of_diagonal(self, diagonal: Array) -> Array:
        return diagonal

    def diagonal(self, matrix: Array) -> Array:
        return matrix

    def power(
        self, matrix: Array, identity_weight: ArrayLike, power: float | int, scale: ArrayLike = 1
    ) -> Array:
        matrix = per_matrix(scale, 1, matrix.dtype) * matrix
        return spectral_power(matrix + per_matrix(identity_weight, 1, matrix.dtype), power)

    def eigen(self, matrix: Array) -> tuple[Array, None]:
        return matrix, None

    def act_on_inputs(self, matrix: Array, x: Array) -> Array:
        return matrix[..., :, None] * x

    def act_on_outputs(self, x: Array, matrix: Array) -> Array:
        return x * matrix[..., None, :]

    def dense(self, matrix: Array) -> Array:
        return _of_diagonal(matrix)


def _of_diagonal(diagonal: Array) -> Array:
    """Matrices with these diagonals."""
    shape = (*diagonal.shape, diagonal.shape[-1])
    identity = jnp.eye(diagonal.shape[-1], dtype=diagonal.dtype)
    return diagonal[..., None] * jnp.broadcast_to(identity, shape)
