"""`CurvatureEstimator`: the interface of an estimate of the curvature matrix of all parameters."""

import abc
from collections.abc import Sequence
from typing import Generic, TypeVar

from jax.typing import ArrayLike

from curvax._types import Array, Fun, PyTree
from curvax.curvature.blocks.base import Powers
from curvax.curvature.estimation_modes import check_mode

IdentityWeight = ArrayLike | Sequence[ArrayLike]
"""The damping: one number, or one for each block."""

StateT = TypeVar("StateT")


class CurvatureEstimator(abc.ABC, Generic[StateT]):
    """An estimate of the curvature matrix of the losses that a function registers.

    This class is abstract: use `BlockDiagonalCurvature` or `ExplicitExactCurvature`. A subclass
    implements `dim`, `init`, `multiply_matpower`, `eigenvalues`, `update_curvature_matrix_estimate`
    and `update_cache`.

    The objective is the mean over the batch of the weighted sum of all registered losses. The state
    of an estimator holds the estimate, and a cache of matrix powers and eigenvalues that only
    `update_cache` recomputes. The state is a pytree. Its structure is constant, so that
    `jax.lax.scan` can carry it, unless `update_cache` computes an entry that was not listed in
    `init`.

    Arguments:
        func: The model function, which registers at least one loss.
        params_index: Index of the argument that holds the parameters.
        default_estimation_mode: Mode of `update_curvature_matrix_estimate` unless one is given.

    Attributes:
        func: The model function.
        params_index: Index of the argument that holds the parameters.
        default_estimation_mode: Mode of `update_curvature_matrix_estimate` unless one is given.

    Examples:
        >>> import curvax
        >>> estimator = curvax.BlockDiagonalCurvature(lambda w, x: None, 0, "ggn_exact")
        >>> isinstance(estimator, curvax.CurvatureEstimator), estimator.default_mat_type
        (True, 'ggn')
    """

    def __init__(
        self, func: Fun, params_index: int = 0, default_estimation_mode: str = "fisher_gradients"
    ) -> None:
        self.func = func
        self.params_index = params_index
        self.default_estimation_mode = check_mode(default_estimation_mode)

    @property
    def default_mat_type(self) -> str:
        """The matrix that the default mode estimates: "fisher" or "ggn"."""
        return self.default_estimation_mode.partition("_")[0]

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """The number of elements of all parameters."""

    @abc.abstractmethod
    def init(
        self,
        rng: Array,
        func_args: Sequence[PyTree],
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool = False,
    ) -> StateT:
        """Return the initial state, before any update.

        Arguments:
            rng: Random key, for representations with a random initial value.
            func_args: Arguments of the function, to trace it with.
            exact_powers_to_cache: Exact matrix powers that `update_cache` will compute: a number, a
                sequence of numbers, or None. Others can also be cached, but they change the
                structure of the state.
            approx_powers_to_cache: Approximate matrix powers that `update_cache` will compute.
            cache_eigenvalues: Whether `update_cache` will compute eigenvalues.

        Returns:
            The state.
        """

    @abc.abstractmethod
    def multiply_matpower(
        self,
        state: StateT,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        *,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by `(matrix + identity_weight * identity) ** power`.

        Arguments:
            state: State of the estimator.
            parameter_structured_vector: A pytree like the parameters.
            identity_weight: Multiple of the identity that is added to the matrix: one number, or
                one for each block.
            power: Any real number.
            exact_power: Whether to compute the power of this very matrix; otherwise that of a
                cheaper approximation.
            use_cached: Whether to use the result of the last `update_cache`, including the
                `identity_weight` it was given. The power 1 is computed if it is not cached.
            pmap_axis_name: Name of a mapped axis over which to distribute the work, or None.
            norm_to_scale_identity_weight_per_block: Name of a norm: "avg_diag", "1_norm",
                "2_norm" or "avg_fro". The identity weight of each block is then multiplied by this
                norm of the block. None to leave it as it is.

        Returns:
            A pytree like the parameters.
        """

    def multiply(
        self,
        state: StateT,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        *,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by `matrix + identity_weight * identity`.

        Equal to `multiply_matpower` with `power=1`.

        Arguments:
            state: State of the estimator.
            parameter_structured_vector: A pytree like the parameters.
            identity_weight: Multiple of the identity that is added to the matrix: one number, or
                one for each block.
            exact_power: Whether to multiply by this very matrix; otherwise by a cheaper
                approximation of it with the identity added.
            use_cached: Whether to use the result of the last `update_cache`, if it holds this
                power.
            pmap_axis_name: Name of a mapped axis over which to distribute the work, or None.
            norm_to_scale_identity_weight_per_block: Name of a norm: "avg_diag", "1_norm",
                "2_norm" or "avg_fro". The identity weight of each block is then multiplied by this
                norm of the block. None to leave it as it is.

        Returns:
            A pytree like the parameters.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, None, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
            ... )
            >>> estimator.multiply(state, jnp.ones((2, 1)), 1.0, True, False, None).round()
            Array([[3.],
                   [9.]], dtype=float32)
        """
        return self.multiply_matpower(
            state,
            parameter_structured_vector,
            identity_weight,
            1,
            exact_power,
            use_cached,
            pmap_axis_name,
            norm_to_scale_identity_weight_per_block=norm_to_scale_identity_weight_per_block,
        )

    def multiply_inverse(
        self,
        state: StateT,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        *,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by the inverse of `matrix + identity_weight * identity`.

        Equal to `multiply_matpower` with `power=-1`. Without damping, eigenvalues that rounding
        makes indistinguishable from zero are clamped to the smallest distinguishable one, so that
        the inverse of a singular matrix is large but finite.

        Arguments:
            state: State of the estimator.
            parameter_structured_vector: A pytree like the parameters, such as a gradient.
            identity_weight: Multiple of the identity that is added to the matrix, the damping: one
                number, or one for each block.
            exact_power: Whether to invert this very matrix; otherwise a cheaper approximation, such
                as factored damping (Martens & Grosse 2015, section 6.3).
            use_cached: Whether to use the inverse that the last `update_cache` computed, with the
                damping it was given.
            pmap_axis_name: Name of a mapped axis over which to distribute the work, or None.
            norm_to_scale_identity_weight_per_block: Name of a norm: "avg_diag", "1_norm",
                "2_norm" or "avg_fro". The identity weight of each block is then multiplied by this
                norm of the block. None to leave it as it is.

        Returns:
            A pytree like the parameters.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import curvax
            >>> def model(w, x):
            ...     curvax.register_normal_predictive_distribution(x @ w, variance=1.0)
            >>> args = jnp.ones((2, 1)), jnp.array([[2.0, 0.0], [0.0, 4.0]])
            >>> estimator = curvax.BlockDiagonalCurvature(model)
            >>> key = jax.random.key(0)
            >>> state = estimator.init(key, args, None, None)
            >>> state = estimator.update_curvature_matrix_estimate(
            ...     state, 0.0, 1.0, 2, key, args, None, "fisher_exact"
            ... )
            >>> gradient = jnp.array([[4.0], [10.0]])
            >>> estimator.multiply_inverse(state, gradient, 2.0, True, False, None).round()
            Array([[1.],
                   [1.]], dtype=float32)
        """
        return self.multiply_matpower(
            state,
            parameter_structured_vector,
            identity_weight,
            -1,
            exact_power,
            use_cached,
            pmap_axis_name,
            norm_to_scale_identity_weight_per_block=norm_to_scale_identity_weight_per_block,
        )

    @abc.abstractmethod
    def eigenvalues(self, state: StateT, use_cached: bool) -> Array:
        """Return the eigenvalues of the matrix, in no particular order.

        Arguments:
            state: State of the estimator.
            use_cached: Whether to use the result of the last `update_cache`.

        Returns:
            A vector with `dim` elements.
        """

    @abc.abstractmethod
    def update_curvature_matrix_estimate(
        self,
        state: StateT,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        pmap_axis_name: str | None,
        estimation_mode: str | None = None,
        *,
        identity_weight: ArrayLike = 0.0,
    ) -> StateT:
        """Update the moving averages with the curvature at these arguments.

        Arguments:
            state: State of the estimator.
            ema_old: The accumulated sum and its weight are multiplied by this.
            ema_new: Weight with which the new estimate is added; the average is sum / weight, so
                the first update counts fully whatever the weights.
            batch_size: Number of examples per device.
            rng: Random key, the same on all devices. Samples of an example depend on its index in
                the global batch.
            func_args: Arguments of the function.
            pmap_axis_name: Name of a mapped axis to average over, or None.
            estimation_mode: Matrix to estimate, and the method. None for `default_estimation_mode`.

                - `fisher_gradients`: the Fisher matrix, from gradients with targets that are
                  sampled from the predictive distribution.
                - `fisher_curvature_prop`: the Fisher matrix, by curvature propagation
                  (Martens, Sutskever & Swersky 2012): from one backward pass of `B s` for each
                  sample, with the factor B of the loss's Fisher matrix and random signs s.
                - `fisher_exact`: the Fisher matrix, with one backward pass for each output of an
                  example.
                - `fisher_empirical`: the empirical Fisher matrix, from gradients with the targets
                  of the batch; all losses must be registered with targets.
                - `fisher_empirical_direct`: the square of the gradient of the objective itself, by
                  `func_and_grad` or by `jax.grad` of the function; for blocks that are estimated
                  from the gradient of the batch, such as `NaiveDiagonal`.
                - `fisher_empirical_direct_synced`: the same, with the gradient averaged over
                  devices before it is squared.
                - `ggn_curvature_prop`, `ggn_exact`: the generalised Gauss-Newton matrix by the
                  same methods, for any kind of loss.
            identity_weight: The damping, for user-supplied blocks whose estimate depends on it.

        Returns:
            The updated state.
        """

    @abc.abstractmethod
    def update_cache(
        self,
        state: StateT,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
        *,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> StateT:
        """Compute powers and eigenvalues of the current estimate and cache them.

        Arguments:
            state: State of the estimator.
            identity_weight: Multiple of the identity that is added to the matrix: one number, or
                one for each block.
            exact_powers: Exact matrix powers to cache: a number, a sequence of numbers, or None.
            approx_powers: Approximate matrix powers to cache.
            eigenvalues: Whether to also cache the eigenvalues.
            pmap_axis_name: Name of a mapped axis over which to distribute the work, or None.
            norm_to_scale_identity_weight_per_block: Name of a norm: "avg_diag", "1_norm",
                "2_norm" or "avg_fro". The identity weight of each block is then multiplied by this
                norm of the block. None to leave it as it is.

        Returns:
            The state with a new cache. Entries that were not listed in `init` are added.
        """
