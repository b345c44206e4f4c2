"""kfac_jax's `CurvatureEstimator`: the interface of an estimate of a curvature matrix."""

import abc
from collections.abc import Sequence
from typing import Generic, TypeVar

from jax.typing import ArrayLike

from curvax._types import Array, Fun, PyTree
from curvax.curvature.blocks.base import Powers
from curvax.curvature.estimation_modes import DIRECT_MODES, MODES
from curvax.curvature.estimator import IdentityWeight
from curvax.curvature.implicit import ImplicitExactCurvature, Number
from curvax.kfac_jax.utils.staging import Finalizable

StateType = TypeVar("StateType")


class CurvatureEstimator(Finalizable, abc.ABC, Generic[StateType]):
    """An estimate of the curvature matrix of the losses that a function registers.

    Equal to `curvax.CurvatureEstimator` except for the names and the order of arguments.

    Args:
        func: The model function, which registers at least one loss.
        func_and_grad: A function that returns the value of `func` and its gradient, for the modes
            `fisher_empirical_direct` and `fisher_empirical_direct_synced`.
        params_index: Index of the argument that holds the parameters.
        batch_index: Index of the argument that holds the batch.
        default_estimation_mode: Mode of `update_curvature_matrix_estimate` unless one is given.
    """

    def __init__(
        self,
        func: Fun | None = None,
        func_and_grad: Fun | None = None,
        params_index: int = 0,
        batch_index: int = 1,
        default_estimation_mode: str = "ggn_curvature_prop",
    ) -> None:
        super().__init__()
        if func is None and func_and_grad is None:
            raise ValueError("At least one of `func` and `func_and_grad` must be given.")
        if default_estimation_mode not in self.valid_estimation_modes:
            raise ValueError(
                f"Unrecognised default_estimation_mode {default_estimation_mode!r}. Known are "
                f"{', '.join(self.valid_estimation_modes)}."
            )
        self.func = func
        self.func_and_grad = func_and_grad
        self.params_index = params_index
        self.batch_index = batch_index
        self.default_estimation_mode = default_estimation_mode

    @property
    def valid_estimation_modes(self) -> tuple[str, ...]:
        """The modes that `update_curvature_matrix_estimate` accepts."""
        return (*MODES, *DIRECT_MODES)

    @property
    def default_mat_type(self) -> str:
        """The matrix that the default mode estimates: "fisher" or "ggn"."""
        return self.default_estimation_mode.partition("_")[0]

    def compute_func_from_registered(
        self, func_args: Sequence[PyTree], batch_size: Number
    ) -> Array:
        """Return the sum of all registered losses, divided by the batch size."""
        func = function_of(self.func, self.func_and_grad)
        exact = ImplicitExactCurvature(func, self.params_index, lambda _: batch_size)
        return exact.mean_loss(func_args)

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
    ) -> StateType:
        """Return the initial state."""

    @abc.abstractmethod
    def sync(self, state: StateType, pmap_axis_name: str | None) -> StateType:
        """Return the state averaged over the devices of a mapped axis."""

    @abc.abstractmethod
    def multiply_matpower(
        self,
        state: StateType,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        power: float | int,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by `(matrix + identity_weight * identity) ** power`."""

    def multiply(
        self,
        state: StateType,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by `matrix + identity_weight * identity`."""
        return self.multiply_matpower(
            state,
            parameter_structured_vector,
            identity_weight,
            1,
            exact_power,
            use_cached,
            pmap_axis_name,
            norm_to_scale_identity_weight_per_block,
        )

    def multiply_inverse(
        self,
        state: StateType,
        parameter_structured_vector: PyTree,
        identity_weight: IdentityWeight,
        exact_power: bool,
        use_cached: bool,
        pmap_axis_name: str | None,
        norm_to_scale_identity_weight_per_block: str | None = None,
    ) -> PyTree:
        """Multiply a vector by the inverse of `matrix + identity_weight * identity`."""
        return self.multiply_matpower(
            state,
            parameter_structured_vector,
            identity_weight,
            -1,
            exact_power,
            use_cached,
            pmap_axis_name,
            norm_to_scale_identity_weight_per_block,
        )

    @abc.abstractmethod
    def eigenvalues(self, state: StateType, use_cached: bool) -> Array:
        """Return the eigenvalues of the matrix, in no particular order."""

    @abc.abstractmethod
    def update_curvature_matrix_estimate(
        self,
        state: StateType,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        identity_weight: ArrayLike,
        batch_size: ArrayLike,
        rng: Array,
        func_args: Sequence[PyTree],
        estimation_mode: str | None = None,
        pmap_axis_name: str | None = None,
    ) -> StateType:
        """Update the moving averages with the curvature at these arguments."""

    @abc.abstractmethod
    def update_cache(
        self,
        state: StateType,
        identity_weight: IdentityWeight,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
        pmap_axis_name: str | None,
    ) -> StateType:
        """Compute powers and eigenvalues of the current estimate and cache them."""

    @abc.abstractmethod
    def to_dense_matrix(self, state: StateType) -> Array:
        """Return the matrix, dense."""


def function_of(func: Fun | None, func_and_grad: Fun | None) -> Fun:
    """Return the function; the value of `func_and_grad` where only that is given."""
    if func is not None:
        return func
    assert func_and_grad is not None
    # `jax.value_and_grad` keeps the function that it differentiates.
    inside = getattr(func_and_grad, "__wrapped__", None)
    return inside if inside is not None else lambda *args: func_and_grad(*args)[0]
