"""Kronecker products of two PSD matrices: damping, powers and eigenvalues.

The matrix `kron(inputs, outputs)` acts on an array `x` of the shape (inputs, outputs) as
`inputs @ x @ outputs`. A multiple of the identity that is added to it has no such form. Exactly,
it is added to the eigenvalues. Approximately, it is split between both factors, so that each
gets the more of it the larger it is on average (`pi` is the ratio of their scales); this needs no
eigenvectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array
from curvax.linalg._psd import per_matrix, spectral_power, told_from_zero
from curvax.linalg._sides import Side
from curvax.linalg._together import Power, computed

__all__ = ["Eigen", "Kronecker", "from_basis", "to_basis"]

Eigen = dict[str, Array]
"""Eigenvalues and eigenvectors of both sides; of a diagonal side only the values."""


@dataclass(frozen=True)
class Kronecker:
    """How to compute with `kron(inputs, outputs)`."""

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
        """A power of both factors, times their scales, with the identity split by `pi`.

        They may be tasks that are yet to be `computed`.
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
        """`inputs @ x @ outputs`."""
        return self.outputs.act_on_outputs(self.inputs.act_on_inputs(inputs, x), outputs)

    def eigen_tasks(self, inputs: Array, outputs: Array) -> list[Any]:
        """What is to be `computed` for the eigenvalues and eigenvectors of both factors."""
        return [self.inputs.eigen(inputs), self.outputs.eigen(outputs)]

    def eigen_of(self, found: Sequence[tuple[Array, Array | None]]) -> Eigen:
        """The eigenvalues and eigenvectors of both factors, from what was computed."""
        eigen: Eigen = {}
        for name, (values, vectors) in zip(("inputs", "outputs"), found, strict=True):
            eigen[f"{name}_values"] = values
            if vectors is not None:
                eigen[f"{name}_vectors"] = vectors
        return eigen

    def eigen(self, inputs: Array, outputs: Array) -> Eigen:
        """The eigenvalues and eigenvectors of both factors."""
        return self.eigen_of(computed(self.eigen_tasks(inputs, outputs)))

    def eigenvalues(self, eigen: Eigen) -> Array:
        """All eigenvalues of the product, in the shape (..., inputs, outputs)."""
        return eigen["inputs_values"][..., :, None] * eigen["outputs_values"][..., None, :]

    def multiply_power(
        self, eigen: Eigen, x: Array, identity_weight: ArrayLike, power: float | int
    ) -> Array:
        """`(kron(inputs, outputs) + identity_weight * identity) ** power` times `x`."""
        weight = per_matrix(identity_weight, 2, x.dtype)
        sides = {
            name: told_from_zero(eigen[name], identity_weight, power)
            for name in ("inputs_values", "outputs_values")
        }
        values = spectral_power(self.eigenvalues(sides) + weight, power, axes=(-2, -1))
        return from_basis(eigen, values * to_basis(eigen, x))


def to_basis(eigen: Eigen, x: Array) -> Array:
    """`x` in the basis of eigenvectors."""
    if "inputs_vectors" in eigen:
        x = jnp.matrix_transpose(eigen["inputs_vectors"]) @ x
    return x @ eigen["outputs_vectors"] if "outputs_vectors" in eigen else x


def from_basis(eigen: Eigen, x: Array) -> Array:
    """What `to_basis` made of it, back."""
    if "inputs_vectors" in eigen:
        x = eigen["inputs_vectors"] @ x
    return x @ jnp.matrix_transpose(eigen["outputs_vectors"]) if "outputs_vectors" in eigen else x
