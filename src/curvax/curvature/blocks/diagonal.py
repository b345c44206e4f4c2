"""Diagonal blocks, estimated from per-example gradients or from the gradient of the batch."""

from collections.abc import Sequence
from typing import cast

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
from curvax.curvature.linalg.norms import psd_norm
from curvax.curvature.linalg.psd import spectral_power
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class Diagonal(ExampleGradientBlock):
    """The diagonal of the curvature: the mean over examples of squared gradients.

    Equal to the diagonal of `Full`.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        allow_approximation: Whether to approximate per-example gradients where they are not known,
            instead of raising an error. If it is not known which positions (pixels or time steps)
            belong to one example, each position counts as one. Examples that interact are taken to
            be independent.

    Raises:
        ValueError: If per-example gradients are not known and `allow_approximation` is False.

    Examples:
        A diagonal block for one layer, whose parameters have the indices 0 and 1.

        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(params, x):
        ...     return curvax.register_squared_error_loss(x @ params["w"] + params["b"])
        >>> args = {"b": jnp.zeros(1), "w": jnp.ones((2, 1))}, jnp.ones((4, 2))
        >>> blocks = {(1, 0): curvax.Diagonal}
        >>> estimator = curvax.BlockDiagonalCurvature(model, index_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (Diagonal("['w'], ['b']", ((2, 1), (1,))),)
    """

    class State(BlockState):
        """The state of a diagonal block.

        Attributes:
            cache: Powers and eigenvalues, as of the last `update_cache`.
            diagonal_factors: A moving average for each parameter, of its shape.
        """

        diagonal_factors: tuple[WeightedMovingAverage, ...]

    max_elements: int | None = None
    """Maximum number of elements of per-example gradients to hold; None for the setting."""

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        del state
        self.check_examples(uses)
        return gradient_statistics(use, uses, _squares, False, self.dtype, self.max_elements)

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        del state
        return Sums(of_cotangents=gradient_terms(sums, uses, _squares, in_param_shapes=False))

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del uses
        return [x / batch_size for x in terms.of_cotangents]

    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        del results
        scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        diagonal = [x * scale for x in _diagonals(state)]
        weight = wanted.identity_weight
        entries: dict[str, PyTree] = {
            power_key(power): _powers(diagonal, weight, power) for power in wanted.powers
        }
        if wanted.eigenvalues:
            entries["eigenvalues"] = self.flattened(diagonal)
        return self._with_entries(state, entries)

    def _initial_fields(self) -> dict[str, PyTree]:
        zeros = [WeightedMovingAverage.zeros_array(s, self.dtype) for s in self.parameters_shapes]
        return {"diagonal_factors": tuple(zeros)}

    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        if how.is_cached:
            powers = self._cached(state, power_key(how.power))
        else:
            powers = _powers(_diagonals(state), how.identity_weight, how.power)
        return tuple(x * p for x, p in zip(vector, powers, strict=True))

    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        return self.flattened(_diagonals(state))

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        return psd_norm(self.flattened(_diagonals(state)), norm_type)


class DenseDiagonal(Diagonal):
    """The diagonal of the curvature of a dense layer.

    It is the mean over examples of squared gradients of weights and bias. Equal to `Diagonal`,
    under the name of its layers.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        allow_approximation: Whether to approximate per-example gradients where they are not known,
            instead of raising an error. If it is not known which positions (pixels or time steps)
            belong to one example, each position counts as one. Examples that interact are taken to
            be independent.

    Raises:
        ValueError: If per-example gradients are not known and `allow_approximation` is False.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     return curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> blocks, key = {"dense": curvax.DenseDiagonal}, jax.random.key(0)
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     estimator.init(key, args, None, None), 0.0, 1.0, 2, key, args, None, "ggn_exact"
        ... )
        >>> estimator.to_dense_matrix(state)  # The mean of the squared inputs.
        Array([[ 5.,  0.],
               [ 0., 10.]], dtype=float32)
    """


class Conv2DDiagonal(ChunkedExampleGradientBlock, Diagonal):
    """A `Diagonal` block for convolutions, with per-example gradients computed in chunks.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        max_elements_for_vmap: Maximum number of elements of per-example gradients to hold at once;
            None for `get_max_parallel_elements()`, by default 2**23.
        allow_approximation: Whether to approximate per-example gradients where they are not known,
            instead of raising an error. If it is not known which positions (pixels or time steps)
            belong to one example, each position counts as one. Examples that interact are taken to
            be independent.

    Raises:
        ValueError: If per-example gradients are not known and `allow_approximation` is False.

    Examples:
        >>> import functools
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
        >>> ctor = functools.partial(curvax.Conv2DDiagonal, max_elements_for_vmap=1000)
        >>> blocks = {"conv2d": ctor}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (Conv2DDiagonal("['w']", ((3, 3, 1, 2),)),)
        >>> estimator.blocks[0].max_elements_for_vmap
        1000
    """


class ScaleAndShiftDiagonal(ScaleAndShiftBlock, Diagonal):
    """A `Diagonal` block for scale-and-shift layers, as in layer normalisation.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        allow_approximation: Whether to approximate per-example gradients where they are not known,
            instead of raising an error. If it is not known which positions (pixels or time steps)
            belong to one example, each position counts as one. Examples that interact are taken to
            be independent.

    Raises:
        ValueError: If per-example gradients are not known and `allow_approximation` is False.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(params, x):
        ...     y = params["scale"] * x + params["shift"]
        ...     return curvax.register_squared_error_loss(y)
        >>> args = {"scale": jnp.ones(3), "shift": jnp.zeros(3)}, jnp.ones((4, 3))
        >>> blocks = {"scale_and_shift": curvax.ScaleAndShiftDiagonal}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (ScaleAndShiftDiagonal("['scale'], ['shift']", ((3,), (3,))),)
    """


class NaiveDiagonal(BatchGradientBlock, Diagonal):
    """The diagonal of `g gᵀ / N`, where g is the sum of the gradients of all N examples.

    It needs no per-example gradients and works for any layer. In every estimation mode targets are
    sampled or gradients have random signs, so products of gradients of different examples have mean
    zero: they add noise to the estimate, not bias.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        allow_approximation: Has no effect: no per-example gradients are needed.

    Examples:
        It is the default for parameters that belong to no known layer.

        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     return curvax.register_squared_error_loss(x @ jnp.exp(w))
        >>> estimator = curvax.BlockDiagonalCurvature(model)
        >>> estimator.finalize((jnp.ones((2, 1)), jnp.ones((4, 2))))
        >>> isinstance(estimator.blocks[0], curvax.NaiveDiagonal)
        True
        >>> estimator.blocks[0].remarks
        ('only the gradient of all examples together is known: estimates are noisy',)
    """

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        del state
        return Sums(of_cotangents=[x**2 for x in self.total_gradient(sums, uses)])


def _diagonals(state: BlockState) -> tuple[Array, ...]:
    return tuple(x.value for x in cast(Diagonal.State, state).diagonal_factors)


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
