"""`ScaledIdentity`: a block that is a multiple of the identity, whatever happens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import CurvatureBlock, MatrixPower, Refresh, Statistics
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class ScaledIdentity(CurvatureBlock):
    """A block that is a multiple of the identity.

    Arguments:
        layer_tag_eq: the equation of the layer's tag.
        name: what the block is called.
        scale: the multiple, a positive number.

    Raises:
        ValueError: if it is not positive.
    """

    def __init__(self, layer_tag_eq: Any, name: str, scale: ArrayLike = 1.0) -> None:
        super().__init__(layer_tag_eq, name)
        if isinstance(scale, float | int) and scale <= 0:
            raise ValueError(f"curvax.ScaledIdentity: the scale must be positive, got {scale}.")
        self._scale = scale

    def fixed_scale(self) -> ArrayLike:
        return self._scale

    def statistics(self, use: LayerUse, uses: Sequence[LayerUse], state: Any) -> Statistics:
        del use, uses, state
        return {}

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: Any) -> Sums:
        del sums, uses, state
        return Sums()

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del terms, uses, batch_size
        return ()

    def with_cache(self, state: Any, results: PyTree, wanted: Refresh) -> Any:
        del results, wanted
        return replace(state, cache=None)

    def _multiply_matpower(
        self, state: Any, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        del state
        factor = (1 + how.identity_weight) ** how.power
        return tuple(x * factor.astype(x.dtype) for x in vector)

    def _eigenvalues(self, state: Any, use_cached: bool) -> Array:
        del state, use_cached
        return jnp.ones((self.dim,), self.dtype)
