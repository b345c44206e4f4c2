"""kfac_jax's `optimizer`: `Optimizer` with its arguments, defaults and forms of arguments."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, SupportsInt, TypeAlias, no_type_check

import jax
from jax.typing import ArrayLike

from curvax._types import Array as Array, PyTree
from curvax.kfac_jax.curvature_estimator.block_diagonal import (
    BlockDiagonalCurvature as BlockDiagonalCurvature,
)
from curvax.kfac_jax.estimator_adapter import EstimatorAdapter, estimator_ctor
from curvax.kfac_jax.stacked_devices import StackedDevices
from curvax.kfac_jax.utils.staging import WithStagedMethods
from curvax.kfac_jax.utils.states import State
from curvax.kfac_jax.utils.trees import default_batch_size_extractor
from curvax.kfac_jax.utils.types import (
    Batch as Batch,
    Numeric as Numeric,
    Params as Params,
    PRNGKey as PRNGKey,
    Scalar as Scalar,
    ScheduleType as ScheduleType,
)
from curvax.optimizer.config import OptimizerConfig
from curvax.optimizer.data_parallel import Devices
from curvax.optimizer.optimizer import Optimizer as _Optimizer
from curvax.optimizer.state import OptimizerState as _OptimizerState, Stats, norm, norms
from curvax.optimizer.step import KFAC
from curvax.optimizer.value_function import Evaluation

FuncState: TypeAlias = Any
FuncAux: TypeAlias = dict[str, PyTree]
FuncArgsVariants: TypeAlias = tuple[PyTree, ...]
"""The arguments of the function: parameters, state, random key and batch, as far as it has them."""
FuncOutputs: TypeAlias = Array | tuple[Array, Any]
"""The value of the function: the loss; or the loss, and state or `aux`, or a pair of both."""
ValueFunc: TypeAlias = Callable[..., FuncOutputs]
ValueAndGradFunc: TypeAlias = Callable[..., tuple[FuncOutputs, PyTree]]
ReturnEither: TypeAlias = tuple[Any, ...]
"""The result of a step: parameters, state, and state of the function if any, and statistics."""
QuadModelParams: TypeAlias = tuple[Array, Array, Array, Array]

HAIKU_BIASES = "b,bias"
"""Names of the biases of Haiku's layers, for `regularized_parameters_path_exclusions`."""

HAIKU_BIASES_AND_NORMS = "b,bias,scale,offset"
"""The same with the parameters of normalisation layers."""


def make_func_args(
    params: PyTree,
    func_state: FuncState | None,
    rng: PRNGKey | None,
    batch: PyTree,
    has_state: bool,
    has_rng: bool,
) -> FuncArgsVariants:
    """Return the arguments of the function, in their order.

    Args:
        params: The parameters.
        func_state: The state of the function, if it has one.
        rng: A random key, if the function takes one.
        batch: The batch.
        has_state: Whether the function has a state.
        has_rng: Whether the function takes a random key.

    Returns:
        The parameters, the state and the random key if the function has them, and the batch.

    Examples:
        >>> from curvax.kfac_jax import optimizer
        >>> optimizer.make_func_args("params", None, "rng", "batch", False, True)
        ('params', 'rng', 'batch')
    """
    state = (func_state,) if has_state else ()
    key = (rng,) if has_rng else ()
    return (params, *state, *key, batch)


def extract_func_outputs(
    raw_outputs: Any, has_aux: bool, has_state: bool
) -> tuple[Array, FuncState | None, FuncAux | None]:
    """Return loss, state of the function and `aux`, from what the function returns.

    Args:
        raw_outputs: The value of the function: the loss; or a pair of the loss and the state, or
            `aux`, or a pair of both.
        has_aux: Whether the function returns `aux`.
        has_state: Whether the function has a state.

    Returns:
        The loss, the state and `aux`; None for what it does not return.

    Examples:
        >>> from curvax.kfac_jax import optimizer
        >>> optimizer.extract_func_outputs((0.5, {"accuracy": 1.0}), True, False)
        (0.5, None, {'accuracy': 1.0})
    """
    if not has_aux and not has_state:
        return raw_outputs, None, None
    loss, other = raw_outputs
    if has_aux and has_state:
        func_state, aux = other
        return loss, func_state, aux
    return (loss, other, None) if has_state else (loss, None, other)


def convert_value_and_grad_to_value_func(
    value_and_grad_func: ValueAndGradFunc, has_aux: bool = False
) -> ValueFunc:
    """Return a function that returns only the loss.

    Args:
        value_and_grad_func: Returns the loss and its gradient, as `jax.value_and_grad` does.
        has_aux: Whether it returns a pair with the loss in place of the loss.

    Examples:
        >>> import jax
        >>> from curvax.kfac_jax import optimizer
        >>> loss = optimizer.convert_value_and_grad_to_value_func(jax.value_and_grad(lambda x: x))
        >>> float(loss(2.0))
        2.0
    """
    clean = convert_value_and_grad_to_clean_value_and_grad(value_and_grad_func, has_aux)
    return lambda *args, **kwargs: clean(*args, **kwargs)[0]


def convert_value_and_grad_to_clean_value_and_grad(
    value_and_grad_func: ValueAndGradFunc, has_aux: bool = False
) -> Callable[..., tuple[Array, PyTree]]:
    """Return a function that returns only the loss and its gradient.

    Args:
        value_and_grad_func: Returns the loss and its gradient, as `jax.value_and_grad` does.
        has_aux: Whether it returns a pair with the loss in place of the loss.
    """

    def clean(*args: Any, **kwargs: Any) -> tuple[Array, PyTree]:
        result: Any = value_and_grad_func(*args, **kwargs)
        value, grads = result
        return (value[0] if has_aux else value), grads

    return clean


# Not checked at run time: `jax.tree.map` builds states of shardings, shapes, None.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OptimizerState(_OptimizerState, State):
    """The state of `Optimizer` between steps.

    Equal to `curvax.Optimizer.State`, with the methods of kfac_jax's states. With
    `multi_device=True` its arrays have a leading axis of devices.
    """


@dataclass(frozen=True)
class _Steps(KFAC):
    """Steps of K-FAC with the statistics of kfac_jax."""

    @property
    def burnin_decay(self) -> Numeric:
        """Burn-in is an average of its batches, all with the same weight."""
        return 1.0

    def step(
        self,
        params: PyTree,
        state: _OptimizerState,
        rng: Array,
        batch: PyTree,
        func_state: PyTree = None,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
    ) -> tuple[PyTree, _OptimizerState, PyTree, Stats]:
        """Return parameters, state and state of the function after a step, and its statistics."""
        given = learning_rate, momentum, damping
        params, after, func_state, stats = super().step(
            params, state, rng, batch, func_state, *given
        )
        if self.config.use_step_rejection:
            stats["step_rejected"] = after.rejected > state.rejected
        # kfac_jax reports the norm of the parameters after the step.
        if self.statistics.norms:
            stats["param_norm"] = norm(params)
        if self.statistics.per_param_norms:
            stats["param_norms"] = norms(params)
        return params, after, func_state, self._renamed(stats)

    def _renamed(self, stats: Stats) -> Stats:
        """Return statistics under the names of kfac_jax."""
        stats["step"] += 1
        stats.setdefault("precon_damping", stats["damping"])
        if self.config.norm_constraint is None:
            stats["scaled_grad_norm_sq"] = None
        if self.statistics.registered_loss:
            registered, loss = stats.pop("registered_loss"), stats["loss"]
            stats["loss_registered"] = registered
            stats["loss_registered_reldiff"] = (registered - loss) / loss
        for name in ("param", "grad", "precon_grad", "update"):
            for path, value in stats.pop(f"{name}_norms", {}).items():
                stats[f"{name}_norm({_joined(path)})"] = value
        return stats

    def _reduced_state_and_aux(
        self, local: Evaluation, func_args: Sequence[PyTree]
    ) -> tuple[PyTree, PyTree]:
        """Average `aux` over devices; each keeps its own state of the function."""
        del func_args
        return local.func_state, jax.tree.map(self._mean, local.aux)


def _joined(path: str) -> str:
    """Return a path such as `['layer']['w']` as `layer/w`."""
    return "/".join(re.findall(r"[^\[\]'.]+", path))


class Optimizer(_Optimizer, WithStagedMethods):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The K-FAC optimizer, with the arguments and defaults of kfac_jax 0.0.8.

    Equal to `curvax.Optimizer`, whose documentation describes all arguments, except for this:

    - `regularized_parameters_path_exclusions` is a string, names separated by commas, such as
      `HAIKU_BIASES`. A parameter is not regularised if a part of its path is one of them.
    - The estimation mode is "ggn_curvature_prop" by default.
    - `reject_damping_increase_factor` is 1 by default: a rejected step does not change the damping.
    - Schedules may take a second argument `data_seen`, the number of examples so far.
    - With `multi_device=True`, all arrays that `init` and `step` take and return have a leading
      axis of local devices, as `utils.replicate_all_local_devices` makes it: parameters and state
      with equal rows, the batch with the examples of each device, and the random key with different
      rows. Learning rate, momentum and damping may have it. The function runs on the rows of one
      device, under a mapped axis called `pmap_axis_name`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax.kfac_jax as kfac_jax
        >>> from curvax.kfac_jax import optimizer, utils
        >>> import curvax
        >>> def loss(w, batch):
        ...     x, y = batch
        ...     curvax.register_squared_error_loss(x @ w, y)
        ...     return jnp.mean((x @ w - y) ** 2)
        >>> kfac = optimizer.Optimizer(jax.value_and_grad(loss), l2_reg=0.0, multi_device=True)
        >>> params = utils.replicate_all_local_devices(jnp.zeros((4, 1)))
        >>> devices = jax.local_device_count()
        >>> batch = jnp.ones((devices, 2, 4)), jnp.ones((devices, 2, 1))
        >>> key = utils.make_different_rng_key_on_all_devices(jax.random.key(0))
        >>> state = kfac.init(params, key, batch)
        >>> values = utils.replicate_all_local_devices(
        ...     {"learning_rate": 0.1, "momentum": 0.9, "damping": 1e-3}
        ... )
        >>> params, state, stats = kfac.step(params, state, key, batch=batch, **values)
        >>> utils.get_first(params).shape, params.shape == (devices, 4, 1)
        ((4, 1), True)
    """

    State: ClassVar[type[_OptimizerState]] = OptimizerState

    _core_type: ClassVar[type[KFAC]] = _Steps

    def __init__(
        self,
        value_and_grad_func: ValueAndGradFunc,
        l2_reg: Numeric,
        regularized_parameters_path_exclusions: str = "",
        value_func_has_aux: bool = False,
        value_func_has_state: bool = False,
        value_func_has_rng: bool = False,
        value_func_for_estimator: ValueFunc | None = None,
        use_adaptive_learning_rate: bool = False,
        learning_rate_schedule: ScheduleType | None = None,
        use_adaptive_momentum: bool = False,
        momentum_schedule: ScheduleType | None = None,
        use_adaptive_damping: bool = False,
        damping_schedule: ScheduleType | None = None,
        initial_damping: Numeric | None = None,
        use_initial_damping_calibration: bool = False,
        min_damping: Numeric = 1e-8,
        max_damping: Numeric = float("inf"),
        include_damping_in_quad_change: bool = False,
        damping_adaptation_interval: int = 5,
        damping_adaptation_decay: Numeric = 0.9,
        damping_lower_threshold: Numeric = 0.25,
        damping_upper_threshold: Numeric = 0.75,
        always_use_exact_qmodel_for_damping_adjustment: bool = False,
        precon_damping_mult: Numeric = 1.0,
        precon_damping_schedule: ScheduleType | None = None,
        use_step_rejection: bool = False,
        reject_damping_increase_factor: float = 1.0,
        norm_constraint: Numeric | None = None,
        num_burnin_steps: int = 10,
        estimation_mode: str | None = None,
        custom_estimator_ctor: Callable[..., BlockDiagonalCurvature] | None = None,
        curvature_ema: Numeric = 0.95,
        curvature_update_period: int = 1,
        inverse_update_period: int = 5,
        use_exact_inverses: bool = False,
        batch_process_func: Callable[[Any], Any] | None = None,
        register_only_generic: bool = False,
        patterns_to_skip: Sequence[str] = (),
        use_automatic_registration: bool = True,
        auto_register_kwargs: dict[str, Any] | None = None,
        layer_tag_to_block_ctor: dict[str, Callable[..., Any]] | None = None,
        multi_device: bool = False,
        debug: bool = False,
        invalid_metric_value: Numeric = float("nan"),
        batch_size_extractor: Callable[[Any], Numeric] = default_batch_size_extractor,
        pmap_axis_name: str = "kfac_axis",
        forbid_setting_attributes_after_finalize: bool = True,
        modifiable_attribute_exceptions: Sequence[str] = (),
        include_norms_in_stats: bool = False,
        include_per_param_norms_in_stats: bool = False,
        include_registered_loss_in_stats: bool = False,
        distributed_precon_apply: bool = True,
        distributed_inverses: bool = True,
        num_estimator_samples: int = 1,
        should_vmap_estimator_samples: bool = False,
        norm_to_scale_identity_weight_per_block: str | None = None,
        precon_power: Scalar = -1.0,
        exact_quad_model_matrix_type: str | None = None,
    ) -> None:
        WithStagedMethods.__init__(self, multi_device, pmap_axis_name, debug)
        _Optimizer.__init__(
            self,
            value_and_grad_func,
            l2_reg,
            value_func_has_aux,
            value_func_has_state,
            value_func_has_rng,
            use_adaptive_learning_rate,
            learning_rate_schedule,
            use_adaptive_momentum,
            momentum_schedule,
            use_adaptive_damping,
            damping_schedule,
            initial_damping,
            min_damping,
            max_damping,
            include_damping_in_quad_change,
            damping_adaptation_interval,
            damping_adaptation_decay,
            damping_lower_threshold,
            damping_upper_threshold,
            always_use_exact_qmodel_for_damping_adjustment,
            norm_constraint,
            num_burnin_steps,
            estimation_mode or "ggn_curvature_prop",
            curvature_ema,
            inverse_update_period,
            use_exact_inverses,
            batch_process_func,
            register_only_generic,
            patterns_to_skip,
            auto_register_kwargs,
            layer_tag_to_block_ctor,
            multi_device,
            debug,
            batch_size_extractor,
            pmap_axis_name,
            forbid_setting_attributes_after_finalize,
            modifiable_attribute_exceptions,
            include_norms_in_stats,
            include_per_param_norms_in_stats,
            distributed_precon_apply,
            distributed_inverses,
            curvature_update_period=curvature_update_period,
            num_estimator_samples=num_estimator_samples,
            use_step_rejection=use_step_rejection,
            reject_damping_increase_factor=reject_damping_increase_factor,
            precon_power=precon_power,
            value_func_for_estimator=value_func_for_estimator,
            include_registered_loss_in_stats=include_registered_loss_in_stats,
            regularized_parameters_path_exclusions=_patterns(
                regularized_parameters_path_exclusions
            ),
            use_initial_damping_calibration=(
                use_initial_damping_calibration and use_adaptive_damping
            ),
            precon_damping_mult=precon_damping_mult,
            precon_damping_schedule=precon_damping_schedule,
            exact_quad_model_matrix_type=exact_quad_model_matrix_type,
            custom_estimator_ctor=estimator_ctor(custom_estimator_ctor),
            use_automatic_registration=use_automatic_registration,
            should_vmap_estimator_samples=should_vmap_estimator_samples,
            norm_to_scale_identity_weight_per_block=norm_to_scale_identity_weight_per_block,
            invalid_metric_value=invalid_metric_value,
        )

    @property
    def multi_device(self) -> bool:
        """Whether arrays have a leading axis of devices."""
        return self._config.multi_device

    @property
    def pmap_axis_name(self) -> str | None:
        """The name of the axis of devices."""
        return self._config.pmap_axis_name

    @property
    def debug(self) -> bool:
        """Whether nothing is compiled."""
        return self._config.debug

    @property
    def finalized(self) -> bool:
        """Whether the function is traced."""
        return self._core is not None

    @property
    def estimator(self) -> Any:
        """The curvature estimator, once the function is traced."""
        estimator = self._traced.preconditioner.estimator
        return estimator.adapted if isinstance(estimator, EstimatorAdapter) else estimator

    def _check_step(self, step_counter: SupportsInt, global_step_int: int | None) -> int:
        """Return the number of steps; `global_step_int` may be that of another count."""
        del global_step_int
        return int(step_counter)

    def _make_devices(self, config: OptimizerConfig, axis: str) -> Devices:
        """Return the local devices, for arguments with a leading axis of them."""
        return StackedDevices(axis)

    def init(
        self, params: PyTree, rng: PRNGKey, batch: PyTree, func_state: FuncState | None = None
    ) -> OptimizerState:
        """Return the state before the first step.

        Args:
            params: The parameters.
            rng: A random key.
            batch: A batch, to trace the function with.
            func_state: The state of the function, if it has one.
        """
        state = super().init(params, rng, batch, func_state)
        return OptimizerState(**{field.name: getattr(state, field.name) for field in fields(state)})


def _patterns(names: str) -> tuple[str, ...]:
    """Return regular expressions for the paths one of whose parts is one of some names."""
    listed = [re.escape(name) for name in names.split(",") if name]
    return tuple(rf"\['?{name}'?\]|\.{name}\b" for name in listed)
