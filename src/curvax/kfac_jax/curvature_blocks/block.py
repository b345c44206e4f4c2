"""kfac_jax's `CurvatureBlock`: a curvax block with kfac_jax's constructor, state and signatures.

kfac_jax 0.0.8 makes a block from the equation of a layer alone, and updates it from a
`LayerVjpData`. Two things differ from release to release: the form of the data
(`LayerEstimationData` has both), and the arguments of `update_curvature_matrix_estimate`:

    (state, estimation_data, ema_old, ema_new, batch_size, pmap_axis_name)      # until 0.0.5
    (state, estimation_data, ema_old, ema_new, batch_size)                      # 0.0.6
    (state, estimation_data, ema_old, ema_new, identity_weight, batch_size)     # 0.0.7 and 0.0.8

A block that overrides it with any of these is called with the arguments that it names, and may pass
any of these on to `super()`, by name or by position.
"""

# kfac_jax's states and updates differ from curvax's on purpose.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax._types import Array, PyTree
from curvax.curvature.blocks.base import (
    BlockState,
    CurvatureBlock as CoreBlock,
    Powers,
    TagEquation,
)
from curvax.curvature.blocks.data import EstimationData
from curvax.curvature.linalg.moving_average import WeightedMovingAverage as CoreAverage
from curvax.kfac_jax.curvature_blocks.estimation_data import LayerEstimationData, as_curvax_data
from curvax.kfac_jax.tracer import LayerVjpData
from curvax.kfac_jax.utils.staging import Finalizable
from curvax.kfac_jax.utils.states import State as KfacState, WeightedMovingAverage

Scalar = float | int
Update = TypeVar("Update", bound=Callable[..., Any])


class BlockStateBase(KfacState, BlockState):
    """The state of a block, with kfac_jax's methods.

    Attributes:
        cache: Powers and eigenvalues, as of the last `update_cache`.
    """

    def __init_subclass__(cls) -> None:
        """Leave it to `register_state_class` to make subclasses pytrees, as in kfac_jax."""


def to_real_set(number_or_sequence: Powers) -> set[Scalar]:
    """Return one number or several as a set; None is none.

    Examples:
        >>> to_real_set([-1, -0.5]) == {-1, -0.5}, to_real_set(2), to_real_set(None)
        (True, {2}, set())
    """
    if number_or_sequence is None:
        return set()
    if isinstance(number_or_sequence, Iterable):
        return set(number_or_sequence)
    return {number_or_sequence}


def takes_older_arguments(update: Update) -> Update:
    """Let a method with the arguments of 0.0.8 be called with those of older releases as well."""

    @functools.wraps(update)
    def wrapped(self: "CurvatureBlock", *args: Any, **kwargs: Any) -> BlockState:
        given = _arguments(args, kwargs)
        axis = given.pop("pmap_axis_name")
        state = update(self, **given)
        return state if axis is None else self.sync(state, axis)

    return wrapped  # pyright: ignore[reportReturnType]


_FIRST = ("state", "estimation_data", "ema_old", "ema_new")


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an update by name, whichever release they are for."""
    rest = tuple(args[len(_FIRST) :])
    if len(rest) == 2 and (rest[1] is None or isinstance(rest[1], str)):
        names = ("batch_size", "pmap_axis_name")
    elif len(rest) == 1 and "batch_size" not in kwargs:
        names = ("batch_size",)
    else:
        names = ("identity_weight", "batch_size", "pmap_axis_name")
    positional = dict(zip((*_FIRST, *names), args, strict=False))
    given = {"identity_weight": 0.0, "pmap_axis_name": None, **positional, **kwargs}
    twice = positional.keys() & kwargs.keys()
    missing = {*_FIRST, "batch_size"} - given.keys()
    unknown = given.keys() - {*_FIRST, "identity_weight", "batch_size", "pmap_axis_name"}
    if twice or missing or unknown or len(args) > len(_FIRST) + len(names):
        raise TypeError(
            f"update_curvature_matrix_estimate takes {', '.join(_FIRST)}, identity_weight and "
            f"batch_size, but got {len(args)} arguments by position and {sorted(kwargs)} by name."
        )
    return given


class CurvatureBlock(Finalizable, CoreBlock):
    """The curvature of the parameters of one layer; the base class of all blocks.

    Equal to `curvax.CurvatureBlock` except for kfac_jax's constructor, its `State` and the
    arguments of `update_curvature_matrix_estimate`. To write a block, subclass one of the others.

    Args:
        layer_tag_eq: The equation of the layer's tag. Passed by the estimator.

    Examples:
        A dense block that counts each position of an example as an example, written as for 0.0.8.

        >>> import dataclasses
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax.kfac_jax as kfac_jax
        >>> from curvax.kfac_jax import curvature_blocks, curvature_estimator
        >>> class Repeated(curvature_blocks.DenseTwoKroneckerFactored):
        ...     def fixed_scale(self):
        ...         (shape,) = self.inputs_shapes
        ...         return float(shape[1])
        ...
        ...     def update_curvature_matrix_estimate(
        ...         self, state, estimation_data, ema_old, ema_new, identity_weight, batch_size
        ...     ):
        ...         (x,) = estimation_data.primals.inputs
        ...         (g,) = estimation_data.tangents.outputs
        ...         merge = lambda array: (array.reshape(-1, array.shape[-1]),)
        ...         replace = dataclasses.replace
        ...         data = replace(
        ...             estimation_data,
        ...             primals=replace(estimation_data.primals, inputs=merge(x)),
        ...             tangents=replace(estimation_data.tangents, outputs=merge(g)),
        ...         )
        ...         return super().update_curvature_matrix_estimate(
        ...             state, data, ema_old, ema_new, identity_weight, x.shape[0] * x.shape[1]
        ...         )
        >>> import curvax
        >>> def model(w, x):
        ...     y = jnp.sum(x @ w, axis=1)
        ...     return curvax.register_normal_predictive_distribution(y, variance=1.0)
        >>> args = jnp.ones((2, 1)), jnp.ones((4, 3, 2))
        >>> estimator = curvature_estimator.BlockDiagonalCurvature(
        ...     model, layer_tag_to_block_ctor={"dense": Repeated}
        ... )
        >>> key = jax.random.key(0)
        >>> state = estimator.init(key, args, None, None)
        >>> state = estimator.update_curvature_matrix_estimate(
        ...     state, 0.0, 1.0, 0.0, 4, key, args, "ggn_exact"
        ... )
        >>> estimator.to_dense_matrix(state)
        Array([[3., 3.],
               [3., 3.]], dtype=float32)
    """

    State: ClassVar[type[BlockState]] = BlockStateBase

    needs_data: ClassVar[bool] = False
    """Whether the estimate is computed from all inputs and cotangents at once, not from sums."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = CurvatureBlock
        update = cls.update_curvature_matrix_estimate
        overrides = update is not own.update_curvature_matrix_estimate
        cls.has_own_update = overrides or cls.needs_data
        caches = (cls.update_cache, cls._update_cache)
        cls.has_own_cache = caches != (own.update_cache, own._update_cache)

    def __init__(self, layer_tag_eq: TagEquation, **kwargs: Any) -> None:
        name = getattr(layer_tag_eq, "name", "")
        super().__init__(layer_tag_eq=layer_tag_eq, name=name, **kwargs)

    def init(
        self,
        rng: Array,
        exact_powers_to_cache: Powers,
        approx_powers_to_cache: Powers,
        cache_eigenvalues: bool,
    ) -> BlockState:
        """Return the initial state, with empty averages, by `_init`."""
        exact, approx = to_real_set(exact_powers_to_cache), to_real_set(approx_powers_to_cache)
        return self._init(
            rng=rng,
            exact_powers_to_cache=exact,
            approx_powers_to_cache=approx,
            cache_eigenvalues=cache_eigenvalues,
        )

    def _init(
        self,
        rng: Array,
        exact_powers_to_cache: set[Scalar],
        approx_powers_to_cache: set[Scalar],
        cache_eigenvalues: bool,
    ) -> BlockState:
        """Return the initial state; for subclasses with states of their own."""
        powers = sorted(exact_powers_to_cache), sorted(approx_powers_to_cache)
        return super().init(rng, *powers, cache_eigenvalues)

    def sync(self, state: BlockState, pmap_axis_name: str | None) -> BlockState:
        """Return the state with its moving averages averaged over the devices of a mapped axis."""
        synced = jax.tree.map(lambda x: x, state)
        for average in self.averages(synced):
            average.sync(pmap_axis_name)
        return synced

    def undamped_diagonal(self, state: BlockState) -> tuple[Array, ...]:
        """Return the diagonal of the matrix, as arrays like the parameters."""
        diagonals = self._undamped_diagonal(state)
        scale = jnp.asarray(self.scale(state, False))
        return tuple(x * scale.astype(x.dtype) for x in diagonals)

    def _undamped_diagonal(self, state: BlockState) -> tuple[Array, ...]:
        """Compute `undamped_diagonal` without the scale."""
        raise NotImplementedError(f"{type(self).__name__} does not implement undamped_diagonal.")

    def update_cache(
        self,
        state: BlockState,
        identity_weight: ArrayLike,
        exact_powers: Powers,
        approx_powers: Powers,
        eigenvalues: bool,
    ) -> BlockState:
        """Compute powers and eigenvalues and put them into the cache, by `_update_cache`."""
        return self._update_cache(
            state=jax.tree.map(lambda x: x, state),
            identity_weight=identity_weight / self.fixed_scale(),
            exact_powers=to_real_set(exact_powers),
            approx_powers=to_real_set(approx_powers),
            eigenvalues=eigenvalues,
        )

    def _update_cache(
        self,
        state: BlockState,
        identity_weight: ArrayLike,
        exact_powers: set[Scalar],
        approx_powers: set[Scalar],
        eigenvalues: bool,
    ) -> BlockState:
        """Update the cache without the fixed scale; for subclasses with caches of their own."""
        weight = identity_weight * self.fixed_scale()
        powers = sorted(exact_powers), sorted(approx_powers)
        return super().update_cache(state, weight, *powers, eigenvalues)

    @takes_older_arguments
    def update_curvature_matrix_estimate(
        self,
        state: BlockState,
        estimation_data: LayerVjpData[Array] | Mapping[str, PyTree],
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        identity_weight: ArrayLike,
        batch_size: ArrayLike,
    ) -> BlockState:
        """Update the estimate from the inputs and cotangents of the layer.

        Args:
            state: State of the block.
            estimation_data: The inputs of the layer and the cotangents of its outputs, as they were
                passed or changed. Arrays of another shape are read as (examples, features).
            ema_old: Factor of the current estimate.
            ema_new: Weight of the new estimate.
            identity_weight: The damping, for estimates that depend on it; most do not.
            batch_size: Number of examples.

        Returns:
            The state with the new estimate.
        """
        del identity_weight
        return self._update_estimate(
            state, as_curvax_data(estimation_data), ema_old, ema_new, batch_size
        )

    def _update_estimate(
        self,
        state: BlockState,
        data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        batch_size: ArrayLike,
    ) -> BlockState:
        """Update the estimate from curvax's form of the data."""
        if self.sums_batch and "params_tangents" in data:
            weights = ema_old, ema_new, 0.0, batch_size, None
            return super().update_from_gradient(state, data, *weights)
        update = CoreBlock.update_curvature_matrix_estimate
        return update(self, state, data, ema_old, ema_new, batch_size, None)

    def update_from_data(
        self,
        state: BlockState,
        estimation_data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        identity_weight: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> BlockState:
        """Call `update_curvature_matrix_estimate` with the arguments that it takes."""
        update = self.update_curvature_matrix_estimate
        first = state, LayerEstimationData.of(estimation_data), ema_old, ema_new
        rest: dict[str, Any] = {
            "identity_weight": identity_weight,
            "batch_size": batch_size,
            "pmap_axis_name": pmap_axis_name,
        }
        names = inspect.signature(update).parameters
        if "batch_size" in names:
            updated = update(*first, **{name: x for name, x in rest.items() if name in names})
        else:
            updated = update(*first, identity_weight, batch_size)
        # Averages are averages over devices, whether or not the method synchronises them itself.
        return updated if pmap_axis_name is None else self.sync(updated, pmap_axis_name)

    def update_from_gradient(
        self,
        state: BlockState,
        estimation_data: EstimationData,
        ema_old: ArrayLike,
        ema_new: ArrayLike,
        identity_weight: ArrayLike,
        batch_size: ArrayLike,
        pmap_axis_name: str | None,
    ) -> BlockState:
        """Update the estimate from the gradient of the batch, or by the user's update."""
        weights = ema_old, ema_new, identity_weight, batch_size, pmap_axis_name
        if self.has_own_update:
            return self.update_from_data(state, estimation_data, *weights)
        return super().update_from_gradient(state, estimation_data, *weights)

    def _initial_fields(self) -> dict[str, PyTree]:
        """Return the fields of the initial state, with kfac_jax's class of moving averages."""
        fields = super()._initial_fields()
        return jax.tree.map(_as_kfac_average, fields, is_leaf=_is_average)


def _is_average(x: PyTree) -> bool:
    return isinstance(x, CoreAverage)


def _as_kfac_average(x: PyTree) -> PyTree:
    return WeightedMovingAverage.zeros_like(x.raw_value) if _is_average(x) else x
