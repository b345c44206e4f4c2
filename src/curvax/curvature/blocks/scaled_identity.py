"""`ScaledIdentity`: a block that is a fixed multiple of the identity."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock,
    MatrixPower,
    Refresh,
    Statistics,
    TagEquation,
)
from curvax.curvature.linalg.norms import psd_norm
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class ScaledIdentity(CurvatureBlock):
    """A fixed multiple of the identity.

    With it, the optimizer takes scaled gradient steps for the parameters of a layer.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        scale: The multiple, a positive number.

    Raises:
        ValueError: If the scale is not positive.

    Examples:
        >>> import functools
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     return curvax.register_squared_error_loss(x @ w)
        >>> args = jnp.ones((2, 1)), jnp.ones((4, 2))
        >>> blocks = {"dense": functools.partial(curvax.ScaledIdentity, scale=3.0)}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.to_dense_matrix(estimator.init(jax.random.key(0), args, None, None))
        Array([[3., 0.],
               [0., 3.]], dtype=float32)
    """

    def __init__(self, layer_tag_eq: TagEquation, name: str, scale: ArrayLike = 1.0) -> None:
        super().__init__(layer_tag_eq, name)
        if isinstance(scale, float | int) and scale <= 0:
            raise ValueError(f"curvax.ScaledIdentity: the scale must be positive, got {scale}.")
        self._scale = scale

    def fixed_scale(self) -> ArrayLike:
        return self._scale

    @property
    def uses_gradient_only(self) -> bool:
        return True

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        del use, uses, state
        return {}

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        del sums, uses, state
        return Sums()

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del terms, uses, batch_size
        return ()

    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        del results, wanted
        return replace(state, cache=None)

    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        del state
        factor = (1 + how.identity_weight) ** how.power
        return tuple(x * factor.astype(x.dtype) for x in vector)

    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        del state, use_cached
        return jnp.ones((self.dim,), self.dtype)

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        del state
        return psd_norm(jnp.ones((), self.dtype), norm_type)
