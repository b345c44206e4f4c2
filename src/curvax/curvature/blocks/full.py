"""Full blocks: the dense curvature matrix of a layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, Float, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    MatrixPower,
    Refresh,
    Statistics,
    TagEquation,
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
from curvax.curvature.linalg.norms import psd_norm
from curvax.curvature.linalg.psd import (
    clamp_eigenvalues,
    diagonal,
    psd_eigh,
    psd_power,
    spectral_power,
)
from curvax.curvature.linalg.tasks import Eigenvectors, MatrixTask, Power
from curvax.layers.tracing.statistics import Sums
from curvax.layers.use import LayerUse


class Full(ExampleGradientBlock):
    """The dense curvature matrix of a layer: the mean over examples of `g gᵀ`.

    Here g is the gradient of one example's loss with respect to the parameters of the layer, for
    sampled or given targets, by the `estimation_mode`. The modes "exact" and "curvature_prop"
    replace it by vectors whose outer products sum to the curvature of the example, exactly or in
    expectation. The matrix has `dim**2` elements, where `dim` is the number of elements of the
    parameters.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one. If more
            are requested, the block caches eigenvalues and eigenvectors instead. None for
            `get_default_eigen_decomposition_threshold()`.
        allow_approximation: Whether to approximate per-example gradients where they are not known,
            instead of raising an error. If it is not known which positions (pixels or time steps)
            belong to one example, each position counts as one. Examples that interact are taken to
            be independent.

    Raises:
        ValueError: If per-example gradients are not known and `allow_approximation` is False.

    Examples:
        Full blocks for all dense layers, cached as eigenvectors.

        >>> import functools
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(params, x):
        ...     return curvax.register_squared_error_loss(x @ params["w"] + params["b"])
        >>> args = {"b": jnp.zeros(1), "w": jnp.ones((2, 1))}, jnp.ones((4, 2))
        >>> blocks = {"dense": functools.partial(curvax.Full, eigen_decomposition_threshold=1)}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (Full("['w'], ['b']", ((2, 1), (1,))),)
    """

    class State(BlockState):
        """The state of a full block.

        Attributes:
            cache: Powers and eigenvalues, or eigenvalues and eigenvectors, as of the last
                `update_cache`.
            matrix: A moving average of the matrix.
        """

        matrix: WeightedMovingAverage

    max_elements: int | None = None
    """Maximum number of elements of per-example gradients to hold; None for the setting."""

    def __init__(
        self,
        layer_tag_eq: TagEquation,
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
        """Concatenate arrays like the parameters into one vector, in the order of `state.matrix`.

        Arguments:
            parameters_shaped_list: Arrays like the parameters.

        Returns:
            A vector of length `dim`.

        Raises:
            ValueError: If they are not like the parameters.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> model = lambda w, x: curvax.register_squared_error_loss(x @ w)
            >>> blocks = {"dense": curvax.DenseFull}
            >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
            >>> estimator.finalize((jnp.ones((2, 2)), jnp.ones((4, 2))))
            >>> estimator.blocks[0].parameters_list_to_single_vector([jnp.ones((2, 2))])
            Array([1., 1., 1., 1.], dtype=float32)
        """
        self._check_vector(parameters_shaped_list)
        return self.flattened(parameters_shaped_list)

    def single_vector_to_parameters_list(self, vector: Array) -> tuple[Array, ...]:
        """Inverse of `parameters_list_to_single_vector`.

        Arguments:
            vector: A vector of length `dim`.

        Returns:
            Arrays like the parameters.

        Raises:
            ValueError: If the vector has another length.

        Examples:
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> model = lambda w, x: curvax.register_squared_error_loss(x @ w)
            >>> blocks = {"dense": curvax.DenseFull}
            >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
            >>> estimator.finalize((jnp.ones((2, 2)), jnp.ones((4, 2))))
            >>> (w,) = estimator.blocks[0].single_vector_to_parameters_list(jnp.arange(4.0))
            >>> w
            Array([[0., 1.],
                   [2., 3.]], dtype=float32)
        """
        if vector.shape != (self.dim,):
            raise ValueError(
                f"curvax: a vector for the block {self.name} has the shape {(self.dim,)}, got "
                f"{vector.shape}."
            )
        return self.unflattened(vector)

    def finiteness_probe(self, estimates: Sequence[Array]) -> Sequence[Array]:
        return [diagonal(matrix) for matrix in estimates]

    def statistics(
        self, use: LayerUse, uses: Sequence[LayerUse], state: BlockState | None
    ) -> Statistics:
        del state
        self.check_examples(uses)
        return gradient_statistics(
            use, uses, products_of_gradients, True, self.dtype, self.max_elements
        )

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        del state
        products = gradient_terms(sums, uses, products_of_gradients, in_param_shapes=True)
        return Sums(of_cotangents=products)

    def estimate(
        self, terms: Sums, uses: Sequence[LayerUse], batch_size: ArrayLike
    ) -> Sequence[Array]:
        del uses
        return [terms.of_cotangents / batch_size]

    def to_dense_matrix(self, state: BlockState) -> Float[Array, "n n"]:
        matrix = _matrix(state)
        return self.ravelled(matrix * jnp.asarray(self.scale(state, False)).astype(matrix.dtype))

    def is_cached(self, state: BlockState, power: float | int, exact_power: bool) -> bool:
        return "eigenvectors" in (state.cache or {}) or super().is_cached(state, power, exact_power)

    def cache_requests(self, state: BlockState, wanted: Refresh) -> dict[str, MatrixTask]:
        scale = jnp.asarray(self.state_dependent_scale(state), self.dtype)
        matrix, weight = _matrix(state) * scale, wanted.identity_weight
        if "eigenvectors" in (state.cache or {}) or len(wanted.powers) > self._eigen_threshold:
            return {"eigenvectors": Eigenvectors(matrix)}
        requests: dict[str, MatrixTask] = {
            power_key(power): Power(matrix, weight, power) for power in wanted.powers
        }
        return requests | ({"eigenvalues": Eigenvectors(matrix)} if wanted.eigenvalues else {})

    def with_cache(self, state: BlockState, results: PyTree, wanted: Refresh) -> BlockState:
        del wanted
        if "eigenvectors" in results:  # Any power follows from them.
            values, vectors = results["eigenvectors"]
            return replace(state, cache={"eigenvalues": values, "eigenvectors": vectors})
        if "eigenvalues" in results:
            results = {**results, "eigenvalues": results["eigenvalues"][0]}
        return self._with_entries(state, results)

    def _initial_fields(self) -> dict[str, PyTree]:
        return {"matrix": WeightedMovingAverage.zeros_array((self.dim, self.dim), self.dtype)}

    def _multiply_matpower(
        self, state: BlockState, vector: tuple[Array, ...], how: MatrixPower
    ) -> tuple[Array, ...]:
        flat, cache = self.flattened(vector), state.cache or {}
        if not how.is_cached:
            matrix = psd_power(_matrix(state), how.identity_weight, how.power)
        elif "eigenvectors" in cache:
            values, vectors = cache["eigenvalues"], cache["eigenvectors"]
            values = clamp_eigenvalues(values, how.identity_weight, how.power)
            powers = spectral_power(values + how.identity_weight.astype(values.dtype), how.power)
            return self.unflattened(vectors @ (powers * (flat @ vectors)))
        else:
            matrix = self._cached(state, power_key(how.power))
        return self.unflattened(matrix @ flat)

    def _eigenvalues(self, state: BlockState, use_cached: bool) -> Array:
        if use_cached:
            return self._cached(state, "eigenvalues")
        return psd_eigh(_matrix(state))[0]

    def _norm(self, state: BlockState, norm_type: str) -> Array:
        return psd_norm(_matrix(state), norm_type)


class DenseFull(Full):
    """The dense curvature matrix of a dense layer: the mean over examples of `g gᵀ`.

    Equal to `Full`, under the name of its layers. Here g is the gradient of one example's loss with
    respect to weights and bias. The matrix has `dim**2` elements, where `dim` is the number of
    elements of both.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one. If more
            are requested, the block caches eigenvalues and eigenvectors instead. None for
            `get_default_eigen_decomposition_threshold()`.
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
        >>> blocks, key = {"dense": curvax.DenseFull}, jax.random.key(0)
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     estimator.init(key, args, None, None), 0.0, 1.0, 2, key, args, None, "ggn_exact"
        ... )
        >>> estimator.to_dense_matrix(state)  # The second moment of the inputs.
        Array([[ 5.,  7.],
               [ 7., 10.]], dtype=float32)
    """


class Conv2DFull(ChunkedExampleGradientBlock, Full):
    """The dense curvature matrix of a convolution: the mean over examples of `g gᵀ`.

    Equal to `Full`, except that the size of the chunks in which per-example gradients are computed
    is an argument, and that the `eigen_decomposition_threshold` is the default one. Here g is the
    gradient of one example's loss with respect to kernel and bias. The matrix has `dim**2`
    elements, where `dim` is the number of elements of both.

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
        >>> blocks = {"conv2d": curvax.Conv2DFull}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (Conv2DFull("['w']", ((3, 3, 1, 2),)),)
        >>> estimator.blocks[0].dim
        18
    """


class ScaleAndShiftFull(ScaleAndShiftBlock, Full):
    """A `Full` block for scale-and-shift layers, as in layer normalisation.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one. If more
            are requested, the block caches eigenvalues and eigenvectors instead. None for
            `get_default_eigen_decomposition_threshold()`.
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
        >>> blocks = {"scale_and_shift": curvax.ScaleAndShiftFull}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize(args)
        >>> estimator.blocks
        (ScaleAndShiftFull("['scale'], ['shift']", ((3,), (3,))),)
    """


class NaiveFull(BatchGradientBlock, Full):
    """The matrix `g gᵀ / N`, where g is the sum of the gradients of all N examples.

    It needs no per-example gradients and works for any layer. In every estimation mode targets are
    sampled or gradients have random signs, so products of gradients of different examples have mean
    zero: they add noise to the estimate, not bias.

    Arguments:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator. Do not construct
            blocks yourself: put the class, or a `functools.partial` of it, into
            `layer_tag_to_block_ctor`.
        name: Name of the block, for error messages. Passed by the estimator.
        eigen_decomposition_threshold: Maximum number of powers that are cached one by one. If more
            are requested, the block caches eigenvalues and eigenvectors instead. None for
            `get_default_eigen_decomposition_threshold()`.
        allow_approximation: Has no effect: no per-example gradients are needed.

    Examples:
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def model(w, x):
        ...     return curvax.register_squared_error_loss(x @ jnp.exp(w))
        >>> blocks = {"generic": curvax.NaiveFull}
        >>> estimator = curvax.BlockDiagonalCurvature(model, layer_tag_to_block_ctor=blocks)
        >>> estimator.finalize((jnp.ones((2, 1)), jnp.ones((4, 2))))
        >>> estimator.blocks
        (NaiveFull('', ((2, 1),)),)
    """

    def terms(self, sums: Sums, uses: Sequence[LayerUse], state: BlockState | None) -> Sums:
        del state
        flat = self.flattened(self.total_gradient(sums, uses))
        return Sums(of_cotangents=jnp.outer(flat, flat))


def _matrix(state: BlockState) -> Array:
    return cast(Full.State, state).matrix.value


def products_of_gradients(gradients: list[Array]) -> Array:
    """Return the sum over examples of `g gᵀ`, from (examples, *shape) for each parameter."""
    flat = jnp.concatenate([x.reshape(x.shape[0], -1) for x in gradients], axis=1)
    return flat.T @ flat
