"""Blocks that keep only the diagonal."""

from collections.abc import Sequence
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
from curvax.curvature.linalg.moving_average import WeightedMovingAverage
from curvax.curvature.linalg.psd import spectral_power
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class Diagonal(ExampleGradientBlock):
    """The diagonal of the curvature: the mean over examples of their squared gradients.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        allow_approximation: whether to make do where the gradients of single examples are not
            known: because it is not known which positions belong to one (each then counts as one),
            or because examples interact (they are then taken to be independent). Otherwise that is
            an error.
    """

    class State(BlockState):
        """What a diagonal block keeps.

        Attributes:
            cache: powers and eigenvalues, as they were when they were last asked for.
            diagonal_factors: a moving average for each parameter, of its shape.
        """

        diagonal_factors: tuple[WeightedMovingAverage, ...]

    max_elements: int | None = None
    """How many elements of gradients of examples to hold at once; None for what is set."""

    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        del state
        self.check_examples(uses)
        return gradient_statistics(use, uses, _squares, False, self.dtype, self.max_elements)

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        del state
        return Sums(of_cotangents=gradient_terms(sums, uses, _squares, on_whole=False))

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del uses
        return [x / batch_size for x in terms.of_cotangents]

    def with_cache(self, state: Any, results: PyTree, wanted: Refresh) -> Any:
        del results
        scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        diagonal = [d.value * scale for d in state.diagonal_factors]
        weight = wanted.identity_weight
        entries: dict[str, Any] = {
            power_key(power): _powers(diagonal, weight, power) for power in wanted.powers
        }
        if wanted.eigenvalues:
            entries["eigenvalues"] = self.flattened(diagonal)
        return self._with_entries(state, entries)

    def _initial_fields(self) -> dict[str, Any]:
        zeros = [WeightedMovingAverage.zeros_array(s, self.dtype) for s in self.parameters_shapes]
        return {"diagonal_factors": tuple(zeros)}

    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        # It is always exact.
        if how.is_cached:
            powers = self._cached(state, power_key(how.power))
        else:
            powers = _powers(
                [d.value for d in state.diagonal_factors], how.identity_weight, how.power
            )
        return tuple(x * p for x, p in zip(vector, powers, strict=True))

    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        return self.flattened([d.value for d in state.diagonal_factors])


class DenseDiagonal(Diagonal):
    """A `Diagonal` block for dense layers."""


class Conv2DDiagonal(ChunkedExampleGradientBlock, Diagonal):
    """A `Diagonal` block for convolutions.

    The gradients of single examples are computed, some at a time.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        max_elements_for_vmap: how many elements of such gradients to hold at once; None for
            `get_max_parallel_elements()`.
        allow_approximation: as in `Diagonal`.
    """


class ScaleAndShiftDiagonal(ScaleAndShiftBlock, Diagonal):
    """A `Diagonal` block for layers that scale and shift."""


class NaiveDiagonal(BatchGradientBlock, Diagonal):
    """The diagonal of `g gᵀ / N`, where `g` is the sum of the gradients of all N examples.

    It needs to know nothing of the layer. Products of gradients of different examples are zero on
    average, as far as estimation modes have random signs or targets, and are noise here.
    """

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        del state
        return Sums(of_cotangents=[x**2 for x in self.total_gradient(sums, uses)])


def _squares(gradients: list[Array]) -> list[Array]:
    return [jnp.sum(x**2, 0) for x in gradients]


def _powers(
    diagonal: Sequence[Array], identity_weight: Array, power: float | int
) -> tuple[Array, ...]:
    flat = jnp.concatenate([x.reshape(-1) for x in diagonal])
    powers = spectral_power(flat + identity_weight.astype(flat.dtype), power)
    sizes = [x.size for x in diagonal]
    parts = jnp.split(powers, [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)])
    return tuple(p.reshape(x.shape) for p, x in zip(parts, diagonal, strict=True))
