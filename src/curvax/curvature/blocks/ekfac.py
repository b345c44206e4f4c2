"""Eigenvalue-corrected blocks (EKFAC): diagonal in the eigenbasis of the Kronecker factors.

George, Laurent, Bouthillier, Ballas & Vincent (2018), "Fast approximate natural gradient descent in
a Kronecker-factored eigenbasis", arXiv:1806.03884.

In the basis of the eigenvectors of both factors, K-FAC's matrix is diagonal, but with a suboptimal
diagonal. EKFAC replaces it by the mean over examples of their squared gradients in that basis,
which is the best one: no other diagonal in that basis is closer to the curvature in the Frobenius
norm. `update_cache` computes the basis. Until the next cache update, the diagonal is estimated in
that basis.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    MatrixPower,
    Refresh,
    Statistics,
)
from curvax.curvature.blocks.example_gradients import (
    Quadratic,
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
    """The base of both classes."""

    class State(TwoKroneckerFactored.State):
        """The state of an eigenvalue-corrected block.

        Attributes:
            cache: Eigenvalues, as of the last `update_cache`.
            inputs_factor: A moving average of the factor of the inputs.
            outputs_factor: A moving average of the factor of the outputs.
            basis: The eigenvectors of both factors, as of the last `update_cache`.
            eigenvalues: A moving average of the diagonal in that basis, (..., inputs, outputs).
        """

        basis: dict[str, PyTree]
        eigenvalues: WeightedMovingAverage

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*super().remarks, *remarks_on_examples(self._equation.uses))

    def needs_examples(self, uses: Sequence[LayerUse]) -> bool:
        del uses
        return True

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        squares = self._squares(_state(state).basis)
        of_gradients = gradient_statistics(
            use, uses, squares, in_param_shapes=True, dtype=self.dtype
        )
        return {**super().statistics(use, uses, state), **of_gradients}

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        factors = super().terms(sums, uses, state)
        squares = self._squares(_state(state).basis)
        corrected = gradient_terms(sums, uses, squares, in_param_shapes=True)
        return Sums(factors.of_inputs, (factors.of_cotangents, corrected))

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        outputs, corrected = terms.of_cotangents
        factors = super().estimate(Sums(terms.of_inputs, outputs), uses, batch_size)
        return *factors, corrected / (batch_size * self.num_averaged_positions)

    def cache_requests(self, state: BlockState, wanted: Refresh) -> dict[str, PyTree]:
        eigen = self._kronecker.eigen_tasks(*self._values(state))
        return {"eigen": eigen} if wanted.powers else {}

    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        state = _state(state)
        if wanted.powers:
            eigen = self._kronecker.eigen_of(results["eigen"])
            # In a new basis, the diagonal starts as that of the Kronecker product.
            diagonal = self._kronecker.eigenvalues(eigen) * state.eigenvalues.weight
            average = replace(state.eigenvalues, raw_value=diagonal)
            state = replace(state, basis=_vectors(eigen), eigenvalues=average)
        values = {"eigenvalues": state.eigenvalues.value.reshape(-1)} if wanted.eigenvalues else {}
        return self._with_entries(state, values)

    def _initial_fields(self) -> dict[str, PyTree]:
        inputs, outputs = self._kronecker.inputs, self._kronecker.outputs
        basis = {
            f"{name}_vectors": jnp.broadcast_to(jnp.eye(side.size, dtype=self.dtype), side.shape)
            for name, side in (("inputs", inputs), ("outputs", outputs))
            if isinstance(side, DenseSide)
        }
        shape = (*inputs.stack, inputs.size, outputs.size)
        values = WeightedMovingAverage.zeros_array(shape, self.dtype)
        return {**super()._initial_fields(), "basis": basis, "eigenvalues": values}

    def _squares(self, basis: Eigen) -> Quadratic:
        def squares(gradients: list[Array]) -> Array:
            matrices = jax.vmap(self.as_matrices)(gradients)
            return jnp.sum(to_basis(basis, matrices) ** 2, 0)

        return squares

    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        state = _state(state)
        values = state.eigenvalues.value + how.identity_weight.astype(self.dtype)
        powers = spectral_power(values, how.power, axes=(-2, -1))
        x = to_basis(state.basis, self.as_matrices(vector))
        return self.of_matrices(from_basis(state.basis, powers * x))

    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        return _state(state).eigenvalues.value.reshape(-1)

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        return CurvatureBlock._norm(self, state, norm_type)  # Not that of the Kronecker product.


def _state(state: BlockState | None) -> _EigenvalueCorrected.State:
    return cast(_EigenvalueCorrected.State, state)


def _vectors(eigen: Eigen) -> Eigen:
    return {name: x for name, x in eigen.items() if name.endswith("_vectors")}


class DenseEKFAC(_EigenvalueCorrected, DenseTwoKroneckerFactored):
    """An eigenvalue-corrected Kronecker-factored block (EKFAC) for dense layers.

    The block is diagonal in the eigenbasis of the Kronecker factors as of the last `update_cache`.
    All of its powers are exact. It needs per-example gradients.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        weight_sharing: "expand" or "reduce", as in Eschenhagen et al. (2023), for layers that are
            applied at several positions (pixels or time steps) of an example. "expand" takes
            positions to be independent; "reduce" averages inputs and sums cotangents over the
            positions of an example first.
        max_factor_size: Maximum width of a dense factor. A wider one is kept as its diagonal.

    Examples:
        The diagonal is estimated in the basis of the last cache update.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     return curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> blocks, key = {"dense": curvax.DenseEKFAC}, jax.random.key(0)
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> state = estimator.init(key, args, -1, None)
        >>> for _ in range(2):
        ...     state = estimator.update_cache(state, 1e-3, -1, None, False, None)
        ...     state = estimator.update_curvature_matrix_estimate(
        ...         state, 0.0, 1.0, 2, key, args, None, "ggn_exact"
        ...     )
        >>> estimator.to_dense_matrix(state).round(2)
        Array([[ 5.,  7.],
               [ 7., 10.]], dtype=float32)
    """


class Conv2DEKFAC(_EigenvalueCorrected, ConvTwoKroneckerFactored):
    """An eigenvalue-corrected Kronecker-factored block (EKFAC) for convolutions.

    The block is diagonal in the eigenbasis of the Kronecker factors as of the last `update_cache`.
    All of its powers are exact. It needs per-example gradients.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        weight_sharing: "expand" or "reduce", as in Eschenhagen et al. (2023), for layers that are
            applied at several positions (pixels or time steps) of an example. "expand" takes
            positions to be independent; "reduce" averages inputs and sums cotangents over the
            positions of an example first.
        max_factor_size: Maximum width of a dense factor. A wider one is kept as its diagonal.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax import lax
        >>> import curvax
        >>> def model(params, images):
        ...     layout = ("NHWC", "HWIO", "NHWC")
        ...     y = lax.conv_general_dilated(
        ...         images, params["w"], (1, 1), "SAME", dimension_numbers=layout
        ...     )
        ...     return curvax.register_squared_error_loss(jnp.mean(y, axis=(1, 2)))
        >>> args = {"w": jnp.ones((3, 3, 1, 2))}, jnp.ones((4, 8, 8, 1))
        >>> blocks = {"conv2d": curvax.Conv2DEKFAC}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (Conv2DEKFAC("['w']", ((3, 3, 1, 2),)),)
    """
