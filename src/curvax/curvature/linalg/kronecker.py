"""Kronecker products of two PSD matrices: damping, powers and eigenvalues.

The matrix `kron(inputs, outputs)` acts on an array `x` of shape (inputs, outputs) as
`inputs @ x @ outputs`. With a multiple of the identity added, it is no longer a Kronecker product.
The exact power adds the multiple to the eigenvalues. The approximate power (factored Tikhonov
damping) adds a multiple of the identity to each factor, in proportion to the factor's mean
eigenvalue: `pi` is the square root of their ratio. This needs no eigenvectors (Martens & Grosse
2015, "Optimizing neural networks with Kronecker-factored approximate curvature", section 6.3).

A `Side` is one factor: dense matrices, or diagonal ones where dense ones would be too large.
Several matrices, one for each layer of a stack or for each head, are along leading axes. A side
acts on arrays of shape (..., inputs, outputs): the first along the inputs, the second along the
outputs.
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.curvature.linalg.psd import clamp_eigenvalues, diagonal, per_matrix, spectral_power
from curvax.curvature.linalg.tasks import Eigenvectors, Power, run_matrix_tasks


@dataclass(frozen=True)
class Side(abc.ABC):
    """One factor of a Kronecker product: `size` by `size` matrices, `stack` of them."""

    size: int
    stack: tuple[int, ...] = ()

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that stores the matrices."""

    @property
    @abc.abstractmethod
    def work(self) -> float:
        """The approximate number of operations of a matrix power."""

    @abc.abstractmethod
    def of_rows(self, rows: Array) -> Array:
        """Return the sum of outer products of rows, of shape (..., rows, size)."""

    @abc.abstractmethod
    def of_diagonal(self, diagonal: Array) -> Array:
        """Return the representation of a diagonal matrix."""

    @abc.abstractmethod
    def diagonal(self, matrix: Array) -> Array:
        """Return the diagonal of each matrix."""

    def trace(self, matrix: Array) -> Array:
        """Return the trace of each matrix."""
        return jnp.sum(self.diagonal(matrix), axis=-1)

    def mean(self, matrix: Array) -> Array:
        """Return the mean eigenvalue of each matrix."""
        return self.trace(matrix) / max(self.size, 1)

    @abc.abstractmethod
    def power(
        self, matrix: Array, identity_weight: ArrayLike, power: float | int, scale: ArrayLike = 1
    ) -> Array | Power:
        """Return `(scale * matrix + identity_weight * identity) ** power`, or a task for it."""

    @abc.abstractmethod
    def eigen(self, matrix: Array) -> tuple[Array, None] | Eigenvectors:
        """Return eigenvalues and eigenvectors, or a task for them.

        None stands for the eigenvectors of diagonal matrices, which are the unit vectors.
        """

    @abc.abstractmethod
    def act_on_inputs(self, matrix: Array, x: Array) -> Array:
        """Return `matrix @ x`."""

    @abc.abstractmethod
    def act_on_outputs(self, x: Array, matrix: Array) -> Array:
        """Return `x @ matrix`."""


class DenseSide(Side):
    """A side of dense matrices."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, self.size, self.size)

    @property
    def work(self) -> float:
        return float(math.prod(self.stack)) * self.size**3

    def of_rows(self, rows: Array) -> Array:
        return jnp.matrix_transpose(rows) @ rows

    def of_diagonal(self, diagonal: Array) -> Array:
        identity = jnp.eye(self.size, dtype=diagonal.dtype)
        return diagonal[..., None] * jnp.broadcast_to(identity, (*diagonal.shape, self.size))

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


class DiagonalSide(Side):
    """A side of diagonal matrices, stored as their diagonals."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.stack, self.size)

    @property
    def work(self) -> float:
        return float(math.prod(self.stack)) * self.size

    def of_rows(self, rows: Array) -> Array:
        return jnp.sum(rows**2, axis=-2)

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


Eigen = dict[str, Array]
"""Eigenvalues and eigenvectors of both sides; only eigenvalues of a diagonal side."""


@dataclass(frozen=True)
class Kronecker:
    """Computations with `kron(inputs, outputs)`."""

    inputs: Side
    outputs: Side

    def power(
        self,
        inputs: Array,
        outputs: Array,
        identity_weight: ArrayLike,
        power: float | int,
        scales: tuple[ArrayLike, ArrayLike] = (1, 1),
    ) -> tuple[Array | Power, Array | Power]:
        """Return the power of each damped factor, or tasks for them, for `run_matrix_tasks`.

        Arguments:
            inputs: The first factor.
            outputs: The second factor.
            identity_weight: Multiple of the identity that is added to the product: one number, or
                one for each matrix. Its square root is added to the factors, times `pi` and
                divided by `pi`.
            power: Any real number.
            scales: Numbers by which the factors are multiplied first.
        """
        of_inputs, of_outputs = (jnp.asarray(x).astype(inputs.dtype) for x in scales)
        means = [
            of_inputs * self.inputs.mean(inputs),
            of_outputs * self.outputs.mean(outputs),
        ]
        are_zero = (means[0] <= 0) | (means[1] <= 0)
        first, last = (jnp.where(are_zero, 1, mean) for mean in means)
        pi = jnp.sqrt(first) / jnp.sqrt(last)
        root = jnp.sqrt(jnp.asarray(identity_weight).astype(pi.dtype))
        return (
            self.inputs.power(inputs, root * pi, power, of_inputs),
            self.outputs.power(outputs, root / pi, power, of_outputs),
        )

    def multiply(self, inputs: Array, outputs: Array, x: Array) -> Array:
        """Return `inputs @ x @ outputs`."""
        return self.outputs.act_on_outputs(self.inputs.act_on_inputs(inputs, x), outputs)

    def eigen_tasks(self, inputs: Array, outputs: Array) -> list[tuple[Array, None] | Eigenvectors]:
        """Return tasks for the eigenvalues and eigenvectors of both factors."""
        return [self.inputs.eigen(inputs), self.outputs.eigen(outputs)]

    def eigen_of(self, results: Sequence[tuple[Array, Array | None]]) -> Eigen:
        """Return the eigenvalues and eigenvectors of both factors, from the results of tasks."""
        eigen: Eigen = {}
        for name, (values, vectors) in zip(("inputs", "outputs"), results, strict=True):
            eigen[f"{name}_values"] = values
            if vectors is not None:
                eigen[f"{name}_vectors"] = vectors
        return eigen

    def eigen(self, inputs: Array, outputs: Array) -> Eigen:
        """Compute the eigenvalues and eigenvectors of both factors."""
        return self.eigen_of(run_matrix_tasks(self.eigen_tasks(inputs, outputs)))

    def eigenvalues(self, eigen: Eigen) -> Array:
        """Return the eigenvalues of the product, of shape (..., inputs, outputs)."""
        return eigen["inputs_values"][..., :, None] * eigen["outputs_values"][..., None, :]

    def multiply_power(
        self, eigen: Eigen, x: Array, identity_weight: ArrayLike, power: float | int
    ) -> Array:
        """Multiply `x` by `(kron(inputs, outputs) + identity_weight * identity) ** power`."""
        weight = per_matrix(identity_weight, 2, x.dtype)
        sides = {
            name: clamp_eigenvalues(eigen[name], identity_weight, power)
            for name in ("inputs_values", "outputs_values")
        }
        values = spectral_power(self.eigenvalues(sides) + weight, power, axes=(-2, -1))
        return from_basis(eigen, values * to_basis(eigen, x))


def to_basis(eigen: Eigen, x: Array) -> Array:
    """Return the coordinates of `x` in the basis of eigenvectors."""
    if "inputs_vectors" in eigen:
        x = jnp.matrix_transpose(eigen["inputs_vectors"]) @ x
    return x @ eigen["outputs_vectors"] if "outputs_vectors" in eigen else x


def from_basis(eigen: Eigen, x: Array) -> Array:
    """Inverse of `to_basis`."""
    if "inputs_vectors" in eigen:
        x = eigen["inputs_vectors"] @ x
    return x @ jnp.matrix_transpose(eigen["outputs_vectors"]) if "outputs_vectors" in eigen else x
