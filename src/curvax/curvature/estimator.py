"""`CurvatureEstimator`: what every estimate of a whole curvature matrix can do."""

import abc
from collections.abc import Sequence
from typing import Any

from jax.typing import ArrayLike

from curvax._types import Array, Fun, PyTree
from curvax.curvature.blocks.base import Powers
from curvax.curvature.estimation_modes import check_mode

IdentityWeight = ArrayLike | Sequence[ArrayLike]


class CurvatureEstimator(abc.ABC):
    """An estimate of the curvature matrix of the losses that a function registers.

    The objective is the mean over the batch of all registered losses, times their weights. The
    state of an estimator has the estimate itself, and values that are computed from it only when
    `update_cache` is called. It is a pytree whose structure stays the same, so that a loop can
    carry it, unless `update_cache` is asked for what `init` was not told of.

    Arguments:
        func: the model function, which registers at least one loss.
        params_index: which of its arguments are the parameters.
        default_estimation_mode: the mode of `update_curvature_matrix_estimate` if none is given.

    Attributes:
        func: as given.
        params_index: as given.
        default_estimation_mode: as given.
    """

    def __init__(
        self, func: Fun, params_index: int = 0, default_estimation_mode: str = "fisher_gradients"
    ) -> None:
        self.func = func
        self.params_index = params_index
        self.default_estimation_mode = check_mode(default_estimation_mode)

    @property
    def default_mat_type(self) -> str:
        """The matrix that is estimated by default: "fisher" or "ggn"."""
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
    ) -> Any:
        """The state of an estimator that has seen nothing yet.

        Arguments:
            rng: a key, for whatever begins at random.
            func_args: arguments of the function, to trace it with.
            exact_powers_to_cache: which exact powers `update_cache` will be asked for, one number
                or several. Others are cached, too, in a state of another structure.
            approx_powers_to_cache: which approximate ones.
            cache_eigenvalues: whether it will be asked for eigenvalues.

        Returns:
            The state.
        """

    @abc.abstractmethod
    def multiply_matpower(
        self,
        state: Any,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
    ) -> PyTree:
        """`(matrix + identity_weight * identity) ** power` times a vector.

        Arguments:
            state: the state of the estimator.
            parameter_structured_vector: a pytree like the parameters.
            identity_weight: what is added to the diagonal: a number, or one for each block.
            power: any real number.
            exact_power: whether the power is that of this matrix, and not that of an approximation
                that is cheaper.
            use_cached: whether to use what `update_cache` computed last. That may have another
                `identity_weight` in it. The first power is computed if it is not cached.
            pmap_axis_name: the name of a mapped axis, if there is one, to share the work out.

        Returns:
            A pytree like the parameters.
        """

    def multiply(
        self,
        state: Any,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
    ) -> PyTree:
        """`matrix + identity_weight * identity` times a vector; see `multiply_matpower`."""
        return self.multiply_matpower(
            state,
            parameter_structured_vector,
            identity_weight,
            1,
            exact_power,
            use_cached,
            pmap_axis_name,
        )

    def multiply_inverse(
        self,
        state: Any,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
    ) -> PyTree:
        """The inverse of `matrix + identity_weight * identity` times a vector.

        Eigenvalues that cannot be told from zero count as the smallest that can: without any
        `identity_weight`, the inverse of a singular matrix is large, and not infinite.
        """
        return self.multiply_matpower(
            state,
            parameter_structured_vector,
            identity_weight,
            -1,
            exact_power,
            use_cached,
            pmap_axis_name,
        )

    @abc.abstractmethod
    def eigenvalues(self, state: Any, use_cached: bool) -> Array:
        """The eigenvalues of the matrix, in no order.

        Arguments:
            state: the state of the estimator.
            use_cached: whether to use what `update_cache` computed last.

        Returns:
            As many numbers as the parameters have elements.
        """

    @abc.abstractmethod
    def update_curvature_matrix_estimate(
        self,
        state: Any,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        pmap_axis_name: str | None,
        estimation_mode: str | None = None,
    ) -> Any:
        """Update the estimate with the curvature at some arguments.

        Arguments:
            state: the state of the estimator.
            ema_old: what the estimate so far is multiplied with.
            ema_new: the weight of the new one. The estimate is divided by the sum of weights.
            batch_size: the number of examples (of this device).
            rng: a key for whatever is random; one for all devices, which draw for each example by
                its number in the whole batch.
            func_args: the arguments of the function.
            pmap_axis_name: the name of a mapped axis to average over, if there is one.
            estimation_mode: what to estimate, and how. None for `default_estimation_mode`.

                - `fisher_gradients`: the Fisher matrix, from gradients for targets that are drawn
                  from what the model predicts.
                - `fisher_curvature_prop`: the Fisher matrix, from random signs.
                - `fisher_exact`: the Fisher matrix, from all outputs in turn. As many backward
                  passes as an example has outputs.
                - `fisher_empirical`: gradients for the targets as they are. The losses need such.
                - `ggn_curvature_prop`, `ggn_exact`: the same for the generalised Gauss-Newton
                  matrix, for losses of any kind.

        Returns:
            The state with the new estimate.
        """

    @abc.abstractmethod
    def update_cache(
        self,
        state: Any,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
    ) -> Any:
        """Compute powers and eigenvalues of the estimate as it is now, to be used from now on.

        Arguments:
            state: the state of the estimator.
            identity_weight: what is added to the diagonal: a number, or one for each block.
            exact_powers: which exact powers.
            approx_powers: which approximate ones.
            eigenvalues: whether the eigenvalues too.
            pmap_axis_name: the name of a mapped axis, if there is one, to share the work out.

        Returns:
            The state with these. What was not in its cache before is a further entry.
        """
