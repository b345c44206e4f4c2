"""K-FAC as optax gradient transformations: pure functions that chain with others.

The method is that of Martens & Grosse (2015), "Optimizing neural networks with Kronecker-factored
approximate curvature".

Parameters that `optax.masked` hides are not parameters for K-FAC either. But the loss depends on
them, so they are passed as a separate argument.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from curvax import _jax
from curvax._cpu import all_finite, run_if
from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.optimizer.config import (
    KFACConfig,
    Number,
    OptimizerConfig,
    PreconditionerConfig,
    Schedule,
)
from curvax.optimizer.data_parallel import without_shardings
from curvax.optimizer.preconditioner import EstimatorState, Preconditioner
from curvax.optimizer.state import OptimizerState, scalar_dtype, select
from curvax.optimizer.step import KFAC
from curvax.optimizer.value_function import Evaluation, ValueFunction

if TYPE_CHECKING:
    import optax  # An optional dependency.


class KFACState(NamedTuple):
    """The state of `kfac`.

    Attributes:
        optimizer: The state of the optimizer.
        rng: The data of a random key.
    """

    optimizer: OptimizerState
    rng: Array


class ScaleByKFACState(NamedTuple):
    """The state of `scale_by_kfac`.

    Attributes:
        estimator_state: The state of the curvature estimator.
        step_counter: The number of steps so far.
        skipped: The number of steps whose gradient or preconditioned gradient was not finite.
        is_stale: Whether the next step updates curvature and inverses regardless of their periods.
        rng: The data of a random key.
    """

    estimator_state: EstimatorState
    step_counter: Array
    skipped: Array
    is_stale: Array
    rng: Array


def kfac(
    loss_fn: Fun,
    example_batch: PyTree,
    learning_rate: Number | Schedule | None = None,
    momentum: Number | Schedule | None = 0.9,
    damping: Number | Schedule | None = 1e-3,
    *,
    example_params: PyTree = None,
    axis_name: str | None = None,
    seed: int = 0,
    **options: Any,
) -> "optax.GradientTransformationExtraArgs":
    """Return the K-FAC optimizer as an optax gradient transformation.

    Equal to `Optimizer(jax.value_and_grad(loss_fn), …)`, except that estimation modes that sample
    use other random numbers, and that the caller computes the gradient and applies the update.

    The transformation is pure, and works inside `jax.jit`, `jax.lax.scan` and `jax.shard_map`. Its
    `update` takes the batch as `batch=`, and optionally the loss, if it is known already, as
    `value=`.

    Arguments:
        loss_fn: A function of the parameters and a batch, which registers a loss and returns the
            mean over the batch.
        example_batch: A batch, or the shapes of one, to trace the function with.
        learning_rate: A number or a schedule, a function of the index of the step, 0 for the first
            one. None only with `use_adaptive_learning_rate=True`.
        momentum: A number or a schedule. None only with `use_adaptive_momentum=True`.
        damping: A number or a schedule. None only with `use_adaptive_damping=True`.
        example_params: All parameters, for `optax.masked(kfac(…), mask)`. Then `update` also
            needs all of them, as `full_params=`.
        axis_name: Name of a mesh axis, if `update` is called inside a `shard_map` that shards the
            batch along it. The gradient that `update` is given must be averaged over it already.
        seed: Seed of the random numbers of estimation modes that sample.
        options: Further options. Each has the name, the meaning and, unless noted, the default of
            the argument of `Optimizer`:

            - Curvature and its inverse: `l2_reg` (zero by default), `estimation_mode`,
              `curvature_ema`, `curvature_update_period`, `inverse_update_period`,
              `stagger_inverses`, `use_exact_inverses`, `precon_power`, `num_estimator_samples`,
              `should_vmap_estimator_samples`, `norm_to_scale_identity_weight_per_block`.
            - Adaptive values: `use_adaptive_learning_rate`, `use_adaptive_momentum`,
              `use_adaptive_damping` with `initial_damping`, `use_initial_damping_calibration`,
              `min_damping`, `max_damping`,
              `damping_adaptation_interval`, `damping_adaptation_decay`, `damping_lower_threshold`,
              `damping_upper_threshold`, `include_damping_in_quad_change`,
              `always_use_exact_qmodel_for_damping_adjustment`, `exact_quad_model_matrix_type`;
              and `precon_damping_mult` or `precon_damping_schedule`.
            - Steps: `norm_constraint`, `use_step_rejection`, `reject_damping_increase_factor`,
              `num_burnin_steps` (zero by default), `batch_process_func`, `batch_size_extractor`.
            - Layers: `register_only_generic`, `strict_registration`, `patterns_to_skip`,
              `use_automatic_registration`, `auto_register_kwargs`, `layer_tag_to_block_ctor`,
              `custom_estimator_ctor`, `regularized_parameters_path_exclusions`.
            - Memory and devices: `microbatch_size` or `memory_budget`, `distributed_inverses`,
              `distributed_precon_apply`.

    Returns:
        The transformation. Its `update(gradient, state, params, batch=batch)` returns updates for
        `optax.apply_updates`, and the next state.

    Raises:
        ImportError: If optax is not installed.
        TypeError: If an option is not one of a gradient transformation.
        ValueError: If options contradict each other.

    Examples:
        >>> import curvax, jax, jax.numpy as jnp, optax
        >>> def loss(w, batch):
        ...     x, y = batch
        ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
        >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
        >>> kfac = curvax.kfac(loss, batch, 1.0, 0.0, 1e-6, estimation_mode="ggn_exact")
        >>> state = kfac.init(params)
        >>> gradient = jax.grad(loss)(params, batch)
        >>> updates, state = jax.jit(kfac.update)(gradient, state, params, batch=batch)
        >>> params = optax.apply_updates(params, updates)
        >>> bool(loss(params, batch) < 1e-3)  # A quadratic loss, solved in one step.
        True
    """
    optax = _optax()
    values = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
    config = _kfac_config(values, options)
    numbers = {name: value for name, value in values.items() if not callable(value)}
    given = {name: value for name, value in numbers.items() if getattr(config, name) is None}

    def build(value_and_grad: Fun, func_args: Sequence[PyTree]) -> KFAC:
        function = ValueFunction(value_and_grad, False, False, False, **config.sizes)
        return KFAC.for_function(config, function, func_args, axis=axis_name)

    loss = _MaskedLoss(loss_fn, example_batch, config.batch_process_func, axis_name, build)

    def init(params: PyTree) -> KFACState:
        rng, init_rng = jax.random.split(jax.random.key(seed))
        func_args = loss.arguments(params, example_params, example_batch)
        init_rng, _ = jax.random.split(init_rng)
        state = loss.traced(func_args).initial_state(func_args, init_rng)
        return KFACState(state, jax.random.key_data(rng))

    def update(
        updates: PyTree,
        state: KFACState,
        params: PyTree = None,
        *,
        batch: PyTree = None,
        value: ArrayLike | None = None,
        full_params: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, KFACState]:
        del extra
        rng, step_rng = jax.random.split(jax.random.wrap_key_data(state.rng))
        func_args = loss.arguments(params, full_params, batch)
        core = loss.traced(func_args)

        def burnin(state: OptimizerState, key: Array) -> OptimizerState:
            return core.update_curvature(state, func_args, jax.random.split(key)[0])

        before = core.burn_in(burnin, state.optimizer, step_rng)
        if value is None and config.needs_loss:
            value = core.loss(func_args)
        loss_value = jnp.asarray(0.0 if value is None else value, scalar_dtype(updates))
        evaluation = Evaluation(loss_value, None, None, updates)
        if config.use_initial_damping_calibration:
            named = [given.get(name) for name in ("learning_rate", "momentum")]
            calibrate = lambda state: core.with_calibrated_damping(
                state, evaluation, func_args, step_rng, *named
            )
            before = run_if(before.step_counter == 0, calibrate, before)
        hyperparameters = core.hyperparameters(before, **given)
        change, after, _ = core.update(before, evaluation, func_args, step_rng, hyperparameters)
        return change, KFACState(after, jax.random.key_data(rng))

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_kfac(
    loss_fn: Fun,
    example_batch: PyTree,
    damping: Number | Schedule = 1e-3,
    *,
    example_params: PyTree = None,
    axis_name: str | None = None,
    seed: int = 0,
    **options: Any,
) -> "optax.GradientTransformationExtraArgs":
    """Return an optax gradient transformation that preconditions gradients by K-FAC.

    Equal to the product of the gradient and the inverse of
    `curvature + (damping + l2_reg) * identity`, where the curvature is an exponential moving
    average over batches. It does nothing else: chain it with momentum, a learning rate, clipping or
    weight decay. A non-finite gradient becomes zero, and its batch is left out of the average; a
    gradient that becomes non-finite by preconditioning also becomes zero.

    Arguments:
        loss_fn: A function of the parameters and a batch, which registers a loss and returns the
            mean over the batch.
        example_batch: A batch, or the shapes of one, to trace the function with.
        damping: A number or a schedule, a function of the index of the step, 0 for the first one.
        example_params: All parameters, for `optax.masked(scale_by_kfac(…), mask)`. Then `update`
            also needs all of them, as `full_params=`.
        axis_name: Name of a mesh axis, if `update` is called inside a `shard_map` that shards the
            batch along it. The gradient that `update` is given must be averaged over it already.
        seed: Seed of the random numbers of estimation modes that sample.
        options: Options of the curvature and its inverse. Each has the name, the meaning and,
            unless noted, the default of the argument of `Optimizer`:

            - Estimate and inverse: `l2_reg` (zero by default), `estimation_mode`, `curvature_ema`,
              `curvature_update_period`, `inverse_update_period`, `stagger_inverses`,
              `use_exact_inverses`, `precon_power`, `num_estimator_samples`,
              `should_vmap_estimator_samples`, `norm_to_scale_identity_weight_per_block`,
              `batch_size_extractor`.
            - Layers: `register_only_generic`, `strict_registration`, `patterns_to_skip`,
              `use_automatic_registration`, `auto_register_kwargs`, `layer_tag_to_block_ctor`,
              `custom_estimator_ctor`, `regularized_parameters_path_exclusions`.
            - Memory and devices: `microbatch_size` or `memory_budget`, `distributed_inverses`,
              `distributed_precon_apply`.

    Returns:
        The transformation. Its `update(gradient, state, params, batch=batch)` returns the
        preconditioned gradient and the next state.

    Raises:
        ImportError: If optax is not installed.
        TypeError: If an option is not about the curvature.
        ValueError: If options contradict each other.

    Examples:
        >>> import curvax, jax, jax.numpy as jnp, optax
        >>> def loss(w, batch):
        ...     x, y = batch
        ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
        >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
        >>> chain = optax.chain(
        ...     optax.clip_by_global_norm(1.0),
        ...     curvax.scale_by_kfac(loss, batch, damping=1e-3),
        ...     optax.trace(0.9),
        ...     optax.scale_by_learning_rate(0.1),
        ... )
        >>> state = chain.init(params)
        >>> gradient = jax.grad(loss)(params, batch)
        >>> updates, state = jax.jit(chain.update)(gradient, state, params, batch=batch)
        >>> bool(loss(optax.apply_updates(params, updates), batch) < loss(params, batch))
        True
    """
    optax = _optax()
    _check_known(options, PreconditionerConfig)
    config = PreconditionerConfig(**options)

    def build(value_and_grad: Fun, func_args: Sequence[PyTree]) -> Preconditioner:
        func = ValueFunction(value_and_grad, False, False, False).for_estimator(None, func_args)
        return Preconditioner.for_function(config, func, func_args, axis_name)

    loss = _MaskedLoss(loss_fn, example_batch, None, axis_name, build)

    def init(params: PyTree) -> ScaleByKFACState:
        rng, init_rng = jax.random.split(jax.random.key(seed))
        func_args = loss.arguments(params, example_params, example_batch)
        state = loss.traced(func_args).init(init_rng, func_args)
        count, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        is_stale = jnp.ones((), bool)
        return ScaleByKFACState(state, count, skipped, is_stale, jax.random.key_data(rng))

    def update(
        updates: PyTree,
        state: ScaleByKFACState,
        params: PyTree = None,
        *,
        batch: PyTree = None,
        full_params: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, ScaleByKFACState]:
        del extra
        rng, step_rng = jax.random.split(jax.random.wrap_key_data(state.rng))
        func_args = loss.arguments(params, full_params, batch)
        preconditioner = loss.traced(func_args)
        count, is_stale = state.step_counter, state.is_stale
        value = jnp.asarray(damping(count) if callable(damping) else damping, scalar_dtype(updates))
        is_finite = all_finite(updates)
        curvature = preconditioner.update_curvature_if_due(
            state.estimator_state, count, is_stale, func_args, step_rng, is_finite, value
        )
        curvature = preconditioner.update_inverses_if_due(curvature, count, is_stale, value)
        scaled = preconditioner.apply(curvature, updates, value)
        is_finite &= all_finite(scaled)
        scaled = select(is_finite, scaled, jax.tree.map(jnp.zeros_like, scaled))
        one = jnp.ones((), jnp.int32)
        skipped = state.skipped + jnp.where(is_finite, 0, one)
        after = (curvature, count + one, skipped, ~is_finite, jax.random.key_data(rng))
        return scaled, ScaleByKFACState(*after)

    return optax.GradientTransformationExtraArgs(init, update)


def _kfac_config(
    values: Mapping[str, Number | Schedule | None], options: dict[str, Any]
) -> KFACConfig:
    """Return the configuration of `kfac`, with those values that are schedules."""
    named: dict[str, Any] = {"num_burnin_steps": 0, **options}
    if values["learning_rate"] is not None and options.get("use_adaptive_learning_rate"):
        raise ValueError(
            f"{where()}: learning_rate and use_adaptive_learning_rate=True contradict each other; "
            f"give one of them."
        )
    for name, value in values.items():
        if f"{name}_schedule" in options:
            raise TypeError(f"{where()}: give the schedule as {name}=, not as {name}_schedule=.")
        is_adaptive = options.get(f"use_adaptive_{name}")
        if value is None and not is_adaptive:
            raise ValueError(f"{where()}: give {name}, or use_adaptive_{name}=True.")
        if callable(value):
            named[f"{name}_schedule"] = value
    other = sorted((_names(OptimizerConfig) - _names(KFACConfig)) & options.keys())
    if other:
        raise TypeError(
            f"{where()}: these options of Optimizer mean nothing here: {', '.join(other)}. There "
            f"are no statistics, and the caller compiles; devices are named by axis_name."
        )
    _check_known(options, KFACConfig)
    return KFACConfig(**named)


def _names(config: type[PreconditionerConfig]) -> set[str]:
    return {option.name for option in fields(config)}


def _check_known(options: dict[str, Any], config: type[PreconditionerConfig]) -> None:
    known = _names(config)
    unknown = sorted(options.keys() - known)
    if not unknown:
        return
    if config is PreconditionerConfig:
        raise TypeError(
            f"{where()}: not about the curvature: {', '.join(unknown)}. Chain other "
            f"transformations for that, or use curvax.kfac. The options are "
            f"{', '.join(sorted(known))}."
        )
    raise TypeError(
        f"{where()}: no such options: {', '.join(unknown)}. There are {', '.join(sorted(known))}."
    )


T = TypeVar("T")


class _MaskedLoss(Generic[T]):
    """A loss of parameters and a batch, some of whose parameters a mask may hide.

    It is traced as a function of three arguments: the visible parameters, all parameters if some
    are hidden, and the batch. `build(value_and_grad, func_args)` is called once, to trace it.
    """

    def __init__(
        self,
        loss_fn: Fun,
        example_batch: PyTree,
        batch_process_func: Callable[[PyTree], PyTree] | None,
        axis_name: str | None,
        build: Callable[[Fun, Sequence[PyTree]], T],
    ) -> None:
        if example_batch is None:
            raise ValueError(
                f"{where()}: example_batch must be a batch, or the shapes of one, to trace the "
                f"function with; got None."
            )

        def loss(params: PyTree, full_params: PyTree, batch: PyTree) -> Array:
            return loss_fn(_merge(params, full_params), batch)

        self._value_and_grad = jax.value_and_grad(loss)
        self._example_batch, self._batch_process_func = example_batch, batch_process_func
        self._axis_name, self._build = axis_name, build
        self._traced: T | None = None

    def traced(self, func_args: Sequence[PyTree]) -> T:
        """Return what `build` returned for such parameters and the example batch."""
        if self._traced is None:
            func_args = (*func_args[:2], self._process(self._example_batch))
            if self._axis_name is not None and not _jax.is_bound(self._axis_name):
                func_args = without_shardings(func_args)
            self._traced = self._build(self._value_and_grad, func_args)
        return self._traced

    def arguments(self, params: PyTree, full_params: PyTree, batch: PyTree) -> tuple[PyTree, ...]:
        """Return the arguments of the traced function: `(params, full_params, batch)`.

        The batch is that after `batch_process_func`; `full_params` is `()` unless a mask hides
        parameters. Raises if something is missing.
        """
        if params is None:
            raise ValueError(
                f"{where()}: update needs the parameters: update(gradient, state, params, "
                f"batch=batch)."
            )
        is_masked = _is_masked(params)
        if is_masked and full_params is None:
            raise ValueError(
                f"{where()}: optax.masked hides some parameters, but the loss still needs them. "
                f"Pass all parameters as example_params= to the constructor and as full_params= "
                f"to update."
            )
        if batch is None:
            raise ValueError(
                f"{where()}: update needs the batch: update(gradient, state, params, "
                f"batch=batch). In a chain, optax passes it on."
            )
        return params, full_params if is_masked else (), self._process(batch)

    def _process(self, batch: PyTree) -> PyTree:
        """Apply `batch_process_func` to a batch, or abstractly to the shapes of one."""
        if self._batch_process_func is None:
            return batch
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
            return jax.eval_shape(self._batch_process_func, batch)
        return self._batch_process_func(batch)


def _merge(params: PyTree, full_params: PyTree) -> PyTree:
    """Return all parameters, the hidden ones from `full_params`."""
    if not _is_masked(params):
        return params
    pick = lambda p, full: full if _is_hidden(p) else p
    return jax.tree.map(pick, params, full_params, is_leaf=_is_hidden)


def _is_masked(params: PyTree) -> bool:
    return any(map(_is_hidden, jax.tree.leaves(params, is_leaf=_is_hidden)))


def _is_hidden(x: PyTree) -> bool:
    return isinstance(x, _optax().MaskedNode)


def _optax() -> ModuleType:
    """Import optax, which is optional."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"{where()} needs optax: pip install 'curvax[optax]'.") from error
    return optax
