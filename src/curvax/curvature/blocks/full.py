"""Blocks that keep the whole matrix."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    MatrixPower,
    Refresh,
    Statistics,
    power_key,
)
from curvax.curvature.blocks.example_gradients import (
    BatchGradientBlock,
    ChunkedExampleGradientBlock,
    ExampleGradientBlock,
    ScaleAndShiftBlock,
    gradient_statistics,
    gradient_terms,
)
from curvax.curvature.blocks.settings import get_default_eigen_decomposition_threshold
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.psd import (
    clamp_eigenvalues,
    diagonal,
    psd_eigh,
    psd_power,
    spectral_power,
)
from curvax.curvature.linalg.tasks import Eigenvectors, Power
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class Full(ExampleGradientBlock):
    """The whole curvature matrix of a layer: the mean of outer products of examples' gradients.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        eigen_decomposition_threshold: up to how many powers are cached one by one. Of more, the
            eigenvalues and eigenvectors are cached. None for
            `get_default_eigen_decomposition_threshold()`.
        allow_approximation: as in `Diagonal`.
    """

    class State(BlockState):
        """What a full block keeps.

        Attributes:
            cache: powers and eigenvalues, as they were when they were last asked for.
            matrix: a moving average of the matrix.
        """

        matrix: WeightedMovingAverage

    max_elements: int | None = None
    """How many elements of gradients of examples to hold at once; None for what is set."""

    def __init__(
        self,
        layer_tag_eq: Any,
        name: str,
        eigen_decomposition_threshold: int | None = None,
        *,
        allow_approximation: bool = False,
    ) -> None:
        super().__init__(layer_tag_eq, name, allow_approximation=allow_approximation)
        if eigen_decomposition_threshold is None:
            eigen_decomposition_threshold = get_default_eigen_decomposition_threshold()
        self._eigen_threshold = eigen_decomposition_threshold

    @property
    def cache_work(self) -> float:
        return float(self.dim) ** 3

    @property
    def multiply_work(self) -> float:
        return float(self.dim) ** 2

    def parameters_list_to_single_vector(self, parameters_shaped_list: Sequence[Array]) -> Array:
        """Arrays like the parameters, one after the other as in `state.matrix`, as one vector.

        Arguments:
            parameters_shaped_list: the arrays.

        Returns:
            The vector.

        Raises:
            ValueError: if they are not like the parameters.
        """
        self._check_vector(parameters_shaped_list)
        return self.flattened(parameters_shaped_list)

    def single_vector_to_parameters_list(self, vector: Array) -> tuple[Array, ...]:
        """What `parameters_list_to_single_vector` made one vector.

        Arguments:
            vector: the vector.

        Returns:
            Arrays like the parameters.

        Raises:
            ValueError: if it has another length.
        """
        if vector.shape != (self.dim,):
            raise ValueError(
                f"curvax: a vector for the block {self.name} has the shape {(self.dim,)}, got "
                f"{vector.shape}."
            )
        return self.unflattened(vector)

    def finiteness_probe(self, estimates: Sequence[Array]) -> Sequence[Array]:
        return [diagonal(matrix) for matrix in estimates]

    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        del state
        self.check_examples(uses)
        return gradient_statistics(
            use, uses, products_of_gradients, True, self.dtype, self.max_elements
        )

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        del state
        products = gradient_terms(sums, uses, products_of_gradients, on_whole=True)
        return Sums(of_cotangents=products)

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del uses
        return [terms.of_cotangents / batch_size]

    def to_dense_matrix(self, state: Any) -> Array:
        matrix = state.matrix.value
        return self.ravelled(matrix * jnp.asarray(self.scale(state, False)).astype(matrix.dtype))

    def is_cached(self, state: Any, power: float | int, exact_power: bool) -> bool:
        return "eigenvectors" in state.cache or super().is_cached(state, power, exact_power)

    def cache_requests(self, state: Any, wanted: Refresh) -> dict[str, Any]:
        scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        matrix, weight = state.matrix.value * scale, wanted.identity_weight
        if "eigenvectors" in state.cache or len(wanted.powers) > self._eigen_threshold:
            return {"eigenvectors": Eigenvectors(matrix)}
        requests: dict[str, Any] = {
            power_key(power): Power(matrix, weight, power) for power in wanted.powers
        }
        return requests | ({"eigenvalues": Eigenvectors(matrix)} if wanted.eigenvalues else {})

    def with_cache(self, state: Any, results: PyTree, wanted: Refresh) -> Any:
        del wanted
        if "eigenvectors" in results:  # Any power follows from these.
            values, vectors = results["eigenvectors"]
            return replace(state, cache={"eigenvalues": values, "eigenvectors": vectors})
        if "eigenvalues" in results:
            results = {**results, "eigenvalues": results["eigenvalues"][0]}
        return self._with_entries(state, results)

    def _initial_fields(self) -> dict[str, Any]:
        return {"matrix": WeightedMovingAverage.zeros_array((self.dim, self.dim), self.dtype)}

    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        # It is always exact.
        flat = self.flattened(vector)
        if not how.is_cached:
            matrix = psd_power(state.matrix.value, how.identity_weight, how.power)
        elif "eigenvectors" in state.cache:
            values, vectors = state.cache["eigenvalues"], state.cache["eigenvectors"]
            values = clamp_eigenvalues(values, how.identity_weight, how.power)
            powers = spectral_power(values + how.identity_weight.astype(values.dtype), how.power)
            return self.unflattened(vectors @ (powers * (flat @ vectors)))
        else:
            matrix = self._cached(state, power_key(how.power))
        return self.unflattened(matrix @ flat)

    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        return psd_eigh(state.matrix.value)[0]


class DenseFull(Full):
    """A `Full` block for dense layers."""


class Conv2DFull(ChunkedExampleGradientBlock, Full):
    """A `Full` block for convolutions.

    The gradients of single examples are computed, some at a time.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        max_elements_for_vmap: how many elements of such gradients to hold at once; None for
            `get_max_parallel_elements()`.
        allow_approximation: as in `Diagonal`.
    """


class ScaleAndShiftFull(ScaleAndShiftBlock, Full):
    """A `Full` block for layers that scale and shift."""


class NaiveFull(BatchGradientBlock, Full):
    """The matrix `g gᵀ / N`, where `g` is the sum of the gradients of all N examples.

    It needs to know nothing of the layer; see `NaiveDiagonal`.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        eigen_decomposition_threshold: as in `Full`.
    """

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        del state
        flat = self.flattened(self.total_gradient(sums, uses))
        return Sums(of_cotangents=jnp.outer(flat, flat))


def products_of_gradients(gradients: list[Array]) -> Array:
    """The sum of outer products of gradients, (number, *shape) for each parameter."""
    flat = jnp.concatenate([x.reshape(x.shape[0], -1) for x in gradients], axis=1)
    return flat.T @ flat
