"""Eigenvalue-corrected blocks (EKFAC): diagonal in the eigenbasis of a Kronecker-factored one.

The method is due to George et al. (2018), arXiv:1806.03884.

In the basis of the eigenvectors of both factors, K-FAC's matrix is diagonal, but its diagonal is
not the best one. Here it is the mean over examples of their squared gradients in that basis, which
is: no other diagonal is closer to the curvature (in the Frobenius norm). The basis is computed when
the cache is updated; from then on until the next time, the diagonal is estimated in it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import MatrixPower, Refresh, Statistics
from curvax.curvature.blocks.example_gradients import (
    gradient_statistics,
    gradient_terms,
    remarks_on_examples,
)
from curvax.curvature.blocks.kronecker import (
    ConvTwoKroneckerFactored,
    DenseTwoKroneckerFactored,
    TwoKroneckerFactored,
)
from curvax.curvature.linalg.kronecker import DenseSide, Eigen, from_basis, to_basis
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.psd import spectral_power
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class _EigenvalueCorrected(TwoKroneckerFactored):
    """What both classes share."""

    class State(TwoKroneckerFactored.State):
        """What an eigenvalue-corrected block keeps.

        Attributes:
            cache: eigenvalues, as they were when last asked for.
            inputs_factor: a moving average of the factor of the inputs.
            outputs_factor: a moving average of the factor of the outputs.
            basis: the eigenvectors of both, as they were when the cache was updated.
            eigenvalues: a moving average of the diagonal in that basis, (..., inputs, outputs).
        """

        basis: dict[str, Any]
        eigenvalues: WeightedMovingAverage

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*super().remarks, *remarks_on_examples(self._equation.uses))

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        del uses
        return True

    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        squares = self._squares(state.basis)
        own = gradient_statistics(use, uses, squares, on_whole=True, dtype=self.dtype)
        return {**super().statistics(use, uses, state), **own}

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        factors = super().terms(sums, uses, state)
        corrected = gradient_terms(sums, uses, self._squares(state.basis), on_whole=True)
        return Sums(factors.of_inputs, (factors.of_cotangents, corrected))

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        outputs, corrected = terms.of_cotangents
        factors = super().estimate(Sums(terms.of_inputs, outputs), uses, batch_size)
        return *factors, corrected / (batch_size * self.num_averaged_positions)

    def cache_requests(self, state: Any, wanted: Refresh) -> dict[str, Any]:
        eigen = self._kronecker.eigen_tasks(*self._values(state))
        return {"eigen": eigen} if wanted.powers else {}

    def with_cache(self, state: Any, results: PyTree, wanted: Refresh) -> Any:
        if wanted.powers:
            eigen = self._kronecker.eigen_of(results["eigen"])
            # In a new basis, the diagonal is that of the factors until it is estimated again.
            diagonal = self._kronecker.eigenvalues(eigen) * state.eigenvalues.weight
            average = replace(state.eigenvalues, raw_value=diagonal)
            state = replace(state, basis=_vectors(eigen), eigenvalues=average)
        values = {"eigenvalues": state.eigenvalues.value.reshape(-1)} if wanted.eigenvalues else {}
        return self._with_entries(state, values)

    def _initial_fields(self) -> dict[str, Any]:
        inputs, outputs = self._kronecker.inputs, self._kronecker.outputs
        basis = {
            f"{name}_vectors": jnp.broadcast_to(jnp.eye(side.size, dtype=self.dtype), side.shape)
            for name, side in (("inputs", inputs), ("outputs", outputs))
            if isinstance(side, DenseSide)
        }
        shape = (*inputs.stack, inputs.size, outputs.size)
        values = WeightedMovingAverage.zeros_array(shape, self.dtype)
        return {**super()._initial_fields(), "basis": basis, "eigenvalues": values}

    def _squares(self, basis: Eigen) -> Any:
        def squares(gradients: list[Array]) -> Array:
            matrices = jax.vmap(self.as_matrices)(gradients)
            return jnp.sum(to_basis(basis, matrices) ** 2, 0)

        return squares

    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        # It is always exact, and the basis is always that of the cache.
        values = state.eigenvalues.value + how.identity_weight.astype(self.dtype)
        powers = spectral_power(values, how.power, axes=(-2, -1))
        x = to_basis(state.basis, self.as_matrices(vector))
        return self.of_matrices(from_basis(state.basis, powers * x))

    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        return state.eigenvalues.value.reshape(-1)


def _vectors(eigen: Eigen) -> Eigen:
    return {name: x for name, x in eigen.items() if name.endswith("_vectors")}


class DenseEKFAC(_EigenvalueCorrected, DenseTwoKroneckerFactored):
    """An eigenvalue-corrected Kronecker-factored block for dense layers.

    It is diagonal in the eigenbasis of the Kronecker factors, as of the last `update_cache`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", for the factors.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """


class Conv2DEKFAC(_EigenvalueCorrected, ConvTwoKroneckerFactored):
    """An eigenvalue-corrected Kronecker-factored block for convolutions; see `DenseEKFAC`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        weight_sharing: "expand" or "reduce", for the factors.
        max_factor_size: a factor that is wider is kept as its diagonal.
    """
