"""`Optimizer`: the stateful shell around the pure functions of K-FAC.

It holds the configuration, traces the user-supplied function at the first call, compiles the pure
functions of `KFAC`, donates buffers and tracks the step count. The mathematics is in `step.py`,
after Martens & Grosse (2015), "Optimizing neural networks with Kronecker-factored approximate
curvature".
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, SupportsInt, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.curvature.batch import default_batch_size_extractor
from curvax.curvature.block_diagonal import BlockCtor, BlockDiagonalCurvature
from curvax.curvature.state_sharding import (
    ShardedCurvature,
    ShardedState,
    check_rows,
    num_shards,
    split_state,
    state_specs,
    whole_state,
)
from curvax.devices.mesh_axis import to_host
from curvax.optimizer.config import (
    MicrobatchSizes,
    Number,
    OptimizerConfig,
    Schedule,
    as_scalar,
    check_given,
)
from curvax.optimizer.damping import damping_decay_factor, is_damping_due
from curvax.optimizer.data_parallel import DataParallel, Devices
from curvax.optimizer.fit import Callback, NoMoreBatches, fit
from curvax.optimizer.preconditioner import EstimatorState, l2_matrix
from curvax.optimizer.programs import Programs, check_alive, is_traced
from curvax.optimizer.quadratic_model import QuadraticModel
from curvax.optimizer.state import (
    OptimizerState,
    StepResult,
    StepResultWithFuncState,
    scalar_dtype,
    step_result,
)
from curvax.optimizer.step import KFAC, Statistics, burnin_key
from curvax.optimizer.value_function import ValueFunction

_OPTIONS = {option.name for option in fields(OptimizerConfig)}
_REPLACED = ("params", "state", "func_state")

T = TypeVar("T")


class Optimizer:
    """The K-FAC optimizer: steps along the gradient, preconditioned by an estimated curvature.

    With the gradient g and the estimated curvature C of the losses that the function registers,

        direction = (C + (damping + l2_reg) * identity) ** -1 @ g
        update = -learning_rate * direction + momentum * last_update
        params = params + update

    Losses are registered in `value_func_for_estimator` if that is given; else in the function that
    `jax.value_and_grad` was applied to; else in `value_and_grad_func` itself, as with a
    `jax.custom_jvp` whose JVP rule registers a loss.

    A step with a non-finite loss, gradient or update is skipped: parameters and the state of the
    function stay as they are, and the damping increases for the following steps. If the loss or the
    gradient is not finite, the curvature also stays as it is; otherwise the momentum is reset to
    zero.

    `step` returns a dictionary of statistics:

    - `step`, `batch_size`, `data_seen`, `loss`, `learning_rate`, `momentum`, `damping`.
    - `new_loss`, the loss after the step; `quad_model_change`, the change of the loss that the
      quadratic model predicts; `rho`, the ratio of the change to the predicted one. They are NaN,
      or `invalid_metric_value`, in steps that do not need them.
    - `scaled_grad_norm_sq`, the squared norm of `learning_rate * direction` in the metric of the
      estimate, before any constraint.
    - `skipped`, the number of steps skipped so far.
    - `precon_damping`, the damping in the preconditioner, if an option makes it a different one.
    - `aux` if the function returns it; `rejected` with `use_step_rejection`.
    - On request `registered_loss`, `param_norm`, `grad_norm`, `precon_grad_norm`, `update_norm`,
      and, by parameter, `param_norms` and so on.

    The arguments are attributes. They can be set until the function is traced, and afterwards if
    that is allowed; then it is traced and compiled again.

    Arguments:
        value_and_grad_func: Returns the loss and its gradient, as `jax.value_and_grad(loss)` does:
            `(out, grads) = value_and_grad_func(params, func_state, rng, batch)`, where `out` is
            `(loss, func_state, aux)`, or the loss alone. The next options say which of them the
            function has.
        l2_reg: Weight of a regulariser `l2_reg / 2 * sum(params**2)` that the loss includes. It is
            added to the curvature, but not to the loss.
        value_func_has_aux: Whether the function returns `aux`.
        value_func_has_state: Whether the function takes and returns `func_state`.
        value_func_has_rng: Whether the function takes `rng`.
        use_adaptive_learning_rate: Whether each step uses the learning rate that minimises a
            quadratic model of the loss with the exact curvature. For batches that hardly differ.
        learning_rate_schedule: A function of the index of the step, 0 for the first one. Without a
            schedule or an adaptive learning rate, pass the learning rate to `step`.
        use_adaptive_momentum: Whether each step uses the momentum that minimises that model.
        momentum_schedule: A function of the index of the step, 0 for the first one. Without a
            schedule or an adaptive momentum, pass the momentum to `step`.
        use_adaptive_damping: Whether to adapt the damping by the Levenberg-Marquardt rule, which
            compares the change of the loss with the change that a quadratic model predicts.
        damping_schedule: A function of the index of the step, 0 for the first one. Without a
            schedule or an adaptive damping, pass the damping to `step`.
        initial_damping: Initial value of the adaptive damping.
        min_damping: Lower bound on the adaptive damping.
        max_damping: Upper bound on the adaptive damping.
        include_damping_in_quad_change: Whether the predicted change includes the damping term.
        damping_adaptation_interval: Number of steps between damping updates.
        damping_adaptation_decay: Decay of the adaptive damping per step: an update multiplies or
            divides the damping by `damping_adaptation_decay ** damping_adaptation_interval`.
        damping_lower_threshold: Ratio of the change of the loss to the predicted one below which
            the damping increases.
        damping_upper_threshold: Ratio above which the damping decreases.
        always_use_exact_qmodel_for_damping_adjustment: Whether the predicted change uses the exact
            curvature even if neither learning rate nor momentum is adaptive.
        norm_constraint: Upper bound on the squared norm of `learning_rate * direction` in the
            metric of the estimate. Longer directions are scaled down.
        num_burnin_steps: Number of curvature updates before the first step.
        estimation_mode: Which curvature to estimate, and how. `"fisher_gradients"`: the Fisher
            matrix, from gradients for targets sampled from the model's predictions.
            `"fisher_curvature_prop"` and `"ggn_curvature_prop"`: the Fisher or the generalised
            Gauss-Newton matrix, from random signs. `"fisher_exact"` and `"ggn_exact"`: without
            sampling, by as many backward passes as an example has outputs. `"fisher_empirical"`:
            gradients for the given targets.
        curvature_ema: Decay of the moving average of the curvature at each update.
        inverse_update_period: Number of steps between updates of the inverses.
        use_exact_inverses: Whether to add the damping to the curvature of a layer instead of to its
            Kronecker factors. This needs eigendecompositions; a change of the damping then has
            effect at once.
        batch_process_func: Applied to each batch before it is used.
        register_only_generic: Whether to treat all parameters as generic ones.
        patterns_to_skip: Names of the kinds of layers that are not detected: those of
            `DEFAULT_GRAPH_PATTERNS`, such as "dense_with_bias", "conv2d_no_bias" or
            "scale_and_shift_broadcast_1", and "embedding", "conv_with_bias" and "conv_no_bias".
        auto_register_kwargs: Further arguments of `auto_register_tags`
            (`allow_multiple_registrations`, `graph_matcher_rules`, `graph_patterns`,
            `through_custom_derivatives`, `allow_unused_params`), and `examples_interact` of
            `BlockDiagonalCurvature`: whether to allow microbatches for a function whose examples
            interact, as with batch normalisation.
        layer_tag_to_block_ctor: Classes of curvature blocks by layer tag ("dense_tag" or "dense"),
            in place of the default ones.
        multi_device: Whether to shard batches over devices: all of them, or those of `mesh`.
        debug: Whether to run without compiling, on one device.
        batch_size_extractor: A function from a batch to its number of examples; by default the
            length of the leading axis of its arrays, which must agree.
        pmap_axis_name: Name of the mesh axis along which batches are sharded: one of `mesh`, if it
            has several; or that of a `jax.shard_map` or `jax.pmap` around `step`.
        forbid_setting_attributes_after_finalize: Whether attributes can no longer be set once the
            function is traced.
        modifiable_attribute_exceptions: Names of attributes that can be set even then.
        include_norms_in_stats: Whether statistics include norms.
        include_per_param_norms_in_stats: Whether statistics include norms by parameter.
        distributed_precon_apply: Whether products with inverses are distributed over devices.
        distributed_inverses: Whether the computation of inverses is distributed over devices.
        curvature_update_period: Number of steps between updates of the curvature.
        num_estimator_samples: Number of samples per curvature update, in modes that sample.
        use_step_rejection: Whether to reject a step that increases the loss of its batch. Then the
            damping increases, be it given, scheduled or adaptive, and the momentum is reset to
            zero.
        reject_damping_increase_factor: Factor of that increase, and of that after a skipped step. A
            given or scheduled damping returns to its value over the following steps, by a factor of
            `damping_adaptation_decay` each.
        precon_power: Power of the curvature, in place of -1.
        value_func_for_estimator: A function like the one inside `value_and_grad_func`, which
            registers the losses.
        include_registered_loss_in_stats: Whether statistics include the mean of the registered
            losses.
        regularized_parameters_path_exclusions: Regular expressions. A parameter whose path, such as
            `['layer']['bias']`, matches one of them is not regularised. The preconditioner leaves
            the regulariser out only for layers all of whose parameters match.
        strict_registration: Whether to raise if a parameter is outside the known kinds of layers.
        microbatch_size: Number of examples per microbatch, for gradient and curvature. In `aux`,
            real numbers are then averaged, integers summed, and per-example rows concatenated. All
            microbatches get the same `rng`.
        memory_budget: Memory that a step may add to what is in use: its results, except for those
            in donated buffers, its temporaries, and the scratch memory of libraries; bytes as an
            integer or a string such as "2GiB", or a fraction of the available memory. The
            microbatch size is chosen accordingly. In burn-in, on several devices, and inside a
            traced function, the budget applies to gradient and curvature separately.
        stagger_inverses: Whether each step updates the inverses of some of the layers, so that all
            steps take about the same time.
        donate_buffers: Whether `step` donates the buffers of parameters and states.
        mesh: The devices, with an axis called `pmap_axis_name` or a single axis. It implies
            `multi_device`. Parameters may be sharded along other axes.
        shard_state: Whether to shard the Kronecker factors over devices instead of replicating
            them. Pairs of factors of equal shape are distributed, so the memory per device
            decreases with the number of devices up to the number of such pairs.
        use_initial_damping_calibration: Whether to apply the rule of the adaptive damping to the
            first step, after burn-in, until it would keep the damping. That is its initial value.
        precon_damping_mult: Factor of the damping in the preconditioner. The quadratic model has
            the damping without it.
        precon_damping_schedule: The damping in the preconditioner as a function of the index of the
            step, 0 for the first one, independently of that of the quadratic model.
        exact_quad_model_matrix_type: The curvature of the exact quadratic model, `"fisher"` or
            `"ggn"`; None for the matrix of the estimation mode.
        custom_estimator_ctor: Makes the curvature estimator, in place of `BlockDiagonalCurvature`,
            whose arguments it is called with; a subclass of it, for example.
        use_automatic_registration: Whether to detect layers that the function does not tag itself.
            If not, it must tag a layer for each parameter.
        should_vmap_estimator_samples: Whether to compute the samples of a curvature update at the
            same time instead of one after the other.
        norm_to_scale_identity_weight_per_block: Name of a norm of each block by which its damping
            is multiplied: "avg_diag", "1_norm", "2_norm" or "avg_fro".
        invalid_metric_value: The value of statistics in steps that do not compute them; None for
            NaN.

    Raises:
        ValueError: If arguments contradict each other.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import curvax
        >>> def loss(w, batch):
        ...     x, y = batch
        ...     prediction = curvax.register_squared_error_loss(x @ w, y)
        ...     return jnp.mean((prediction - y) ** 2)
        >>> batch = jnp.eye(4), jnp.ones((4, 1))
        >>> optimizer = curvax.Optimizer(
        ...     jax.value_and_grad(loss), l2_reg=0.0, estimation_mode="ggn_exact"
        ... )
        >>> params = jnp.zeros((4, 1))
        >>> state = optimizer.init(params, jax.random.key(0), batch)
        >>> values = dict(learning_rate=1.0, momentum=0.0, damping=1e-6)
        >>> params, state, stats = optimizer.step(
        ...     params, state, jax.random.key(1), batch=batch, **values
        ... )
        >>> bool(loss(params, batch) < 1e-3)
        True
    """

    State: ClassVar[type[OptimizerState]] = OptimizerState

    _core_type: ClassVar[type[KFAC]] = KFAC
    _config: OptimizerConfig
    _core: KFAC | None = None

    def __init__(
        self,
        value_and_grad_func: Fun,
        l2_reg: Number,
        value_func_has_aux: bool = False,
        value_func_has_state: bool = False,
        value_func_has_rng: bool = False,
        use_adaptive_learning_rate: bool = False,
        learning_rate_schedule: Schedule | None = None,
        use_adaptive_momentum: bool = False,
        momentum_schedule: Schedule | None = None,
        use_adaptive_damping: bool = False,
        damping_schedule: Schedule | None = None,
        initial_damping: Number | None = None,
        min_damping: Number = 1e-8,
        max_damping: Number = float("inf"),
        include_damping_in_quad_change: bool = False,
        damping_adaptation_interval: int = 5,
        damping_adaptation_decay: Number = 0.9,
        damping_lower_threshold: Number = 0.25,
        damping_upper_threshold: Number = 0.75,
        always_use_exact_qmodel_for_damping_adjustment: bool = False,
        norm_constraint: Number | None = None,
        num_burnin_steps: int = 10,
        estimation_mode: str = "fisher_gradients",
        curvature_ema: Number = 0.95,
        inverse_update_period: int = 5,
        use_exact_inverses: bool = False,
        batch_process_func: Callable[[PyTree], PyTree] | None = None,
        register_only_generic: bool = False,
        patterns_to_skip: Sequence[str] = (),
        auto_register_kwargs: Mapping[str, Any] | None = None,
        layer_tag_to_block_ctor: Mapping[str, BlockCtor] | None = None,
        multi_device: bool = False,
        debug: bool = False,
        batch_size_extractor: Callable[[PyTree], Number] = default_batch_size_extractor,
        pmap_axis_name: str = "kfac_axis",
        forbid_setting_attributes_after_finalize: bool = True,
        modifiable_attribute_exceptions: Sequence[str] = (),
        include_norms_in_stats: bool = False,
        include_per_param_norms_in_stats: bool = False,
        distributed_precon_apply: bool = True,
        distributed_inverses: bool = True,
        *,
        curvature_update_period: int = 1,
        num_estimator_samples: int = 1,
        use_step_rejection: bool = False,
        reject_damping_increase_factor: Number = 2.0,
        precon_power: float | int = -1,
        value_func_for_estimator: Fun | None = None,
        include_registered_loss_in_stats: bool = False,
        regularized_parameters_path_exclusions: Sequence[str] = (),
        strict_registration: bool = False,
        microbatch_size: int | None = None,
        memory_budget: int | float | str | None = None,
        stagger_inverses: bool = False,
        donate_buffers: bool = True,
        mesh: Mesh | None = None,
        shard_state: bool = False,
        use_initial_damping_calibration: bool = False,
        precon_damping_mult: Number = 1.0,
        precon_damping_schedule: Schedule | None = None,
        exact_quad_model_matrix_type: str | None = None,
        custom_estimator_ctor: Callable[..., BlockDiagonalCurvature] | None = None,
        use_automatic_registration: bool = True,
        should_vmap_estimator_samples: bool = False,
        norm_to_scale_identity_weight_per_block: str | None = None,
        invalid_metric_value: Number | None = None,
    ) -> None:
        config = OptimizerConfig(
            value_and_grad_func=value_and_grad_func,
            l2_reg=l2_reg,
            value_func_has_aux=value_func_has_aux,
            value_func_has_state=value_func_has_state,
            value_func_has_rng=value_func_has_rng,
            use_adaptive_learning_rate=use_adaptive_learning_rate,
            learning_rate_schedule=learning_rate_schedule,
            use_adaptive_momentum=use_adaptive_momentum,
            momentum_schedule=momentum_schedule,
            use_adaptive_damping=use_adaptive_damping,
            damping_schedule=damping_schedule,
            initial_damping=initial_damping,
            min_damping=min_damping,
            max_damping=max_damping,
            include_damping_in_quad_change=include_damping_in_quad_change,
            damping_adaptation_interval=damping_adaptation_interval,
            damping_adaptation_decay=damping_adaptation_decay,
            damping_lower_threshold=damping_lower_threshold,
            damping_upper_threshold=damping_upper_threshold,
            always_use_exact_qmodel_for_damping_adjustment=always_use_exact_qmodel_for_damping_adjustment,
            norm_constraint=norm_constraint,
            num_burnin_steps=num_burnin_steps,
            estimation_mode=estimation_mode,
            curvature_ema=curvature_ema,
            inverse_update_period=inverse_update_period,
            use_exact_inverses=use_exact_inverses,
            batch_process_func=batch_process_func,
            register_only_generic=register_only_generic,
            patterns_to_skip=patterns_to_skip,
            auto_register_kwargs=auto_register_kwargs,
            layer_tag_to_block_ctor=layer_tag_to_block_ctor,
            multi_device=multi_device,
            debug=debug,
            batch_size_extractor=batch_size_extractor,
            pmap_axis_name=pmap_axis_name,
            forbid_setting_attributes_after_finalize=forbid_setting_attributes_after_finalize,
            modifiable_attribute_exceptions=modifiable_attribute_exceptions,
            include_norms_in_stats=include_norms_in_stats,
            include_per_param_norms_in_stats=include_per_param_norms_in_stats,
            distributed_precon_apply=distributed_precon_apply,
            distributed_inverses=distributed_inverses,
            curvature_update_period=curvature_update_period,
            num_estimator_samples=num_estimator_samples,
            use_step_rejection=use_step_rejection,
            reject_damping_increase_factor=reject_damping_increase_factor,
            precon_power=precon_power,
            value_func_for_estimator=value_func_for_estimator,
            include_registered_loss_in_stats=include_registered_loss_in_stats,
            regularized_parameters_path_exclusions=regularized_parameters_path_exclusions,
            strict_registration=strict_registration,
            microbatch_size=microbatch_size,
            memory_budget=memory_budget,
            stagger_inverses=stagger_inverses,
            donate_buffers=donate_buffers,
            mesh=mesh,
            shard_state=shard_state,
            use_initial_damping_calibration=use_initial_damping_calibration,
            precon_damping_mult=precon_damping_mult,
            precon_damping_schedule=precon_damping_schedule,
            exact_quad_model_matrix_type=exact_quad_model_matrix_type,
            custom_estimator_ctor=custom_estimator_ctor,
            use_automatic_registration=use_automatic_registration,
            should_vmap_estimator_samples=should_vmap_estimator_samples,
            norm_to_scale_identity_weight_per_block=norm_to_scale_identity_weight_per_block,
            invalid_metric_value=invalid_metric_value,
        )
        self._configure(config)

    def _configure(self, config: OptimizerConfig) -> None:
        """Set the configuration, and discard whatever was traced or compiled."""
        self._config, self._core = config, None
        self._function = ValueFunction(
            config.value_and_grad_func,
            config.value_func_has_aux,
            config.value_func_has_state,
            config.value_func_has_rng,
            **config.sizes,
        )
        axis, has_budget = config.axis_name, config.memory_budget is not None
        self._devices = None if axis is None else self._make_devices(config, axis)
        is_compiled, is_donating = not config.debug, config.donate_buffers
        self._programs = Programs(is_compiled, is_donating, self._devices, has_budget)
        self._counted: tuple[Array | None, int] = (None, 0)

    def _make_devices(self, config: OptimizerConfig, axis: str) -> Devices:
        """Return the devices along an axis, and the form of arguments and results on them."""
        return DataParallel(config.mesh, axis)

    def __getattr__(self, name: str) -> Any:
        if name not in _OPTIONS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A subclass may set attributes before it calls `__init__`.
        config: OptimizerConfig | None = getattr(self, "_config", None)
        if config is None or name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        is_forbidden = config.forbid_setting_attributes_after_finalize
        if self._core and is_forbidden and name not in config.modifiable_attribute_exceptions:
            raise AttributeError(
                f"{where()}: {name} cannot be set any more, because the optimizer was used "
                f"already. Make another one; or name it in modifiable_attribute_exceptions, or set "
                f"forbid_setting_attributes_after_finalize=False."
            )
        if name in _OPTIONS:
            self._configure(replace(config, **{name: value}))
        else:
            object.__setattr__(self, name, value)

    @property
    def num_burnin_steps(self) -> int:
        """The number of curvature updates before the first step."""
        return self._config.num_burnin_steps

    @property
    def l2_reg(self) -> Array:
        """The weight of the regulariser."""
        return jnp.asarray(self._config.l2_reg, float)

    @property
    def estimator(self) -> BlockDiagonalCurvature:
        """The curvature estimator, once the function is traced."""
        return self._traced.preconditioner.estimator

    @property
    def damping_decay_factor(self) -> Number:
        """The factor of one decrease of the adaptive damping; an increase divides by it."""
        return damping_decay_factor(self._config)

    @property
    def _traced(self) -> KFAC:
        if self._core is None:
            raise ValueError(
                f"{where()}: the layers of the function are not known before it is traced. "
                f"Call init or step first."
            )
        return self._core

    def finalize(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> KFAC:
        """Trace the function, unless it is traced already. `init` and `step` call this.

        Arguments:
            params: The parameters.
            rng: A random key.
            batch: A batch, as returned by `batch_process_func`, which is not applied here.
            func_state: The state of the function, if it has one.

        Returns:
            The pure functions that `init` and `step` compile.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> core = optimizer.finalize(params, jax.random.key(0), batch)
            >>> optimizer.estimator.block_dims  # One layer with four parameters.
            (4,)
        """
        if self._core is not None:
            return self._core
        return self._trace(self._function.arguments(params, func_state, rng, batch))

    def init(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> OptimizerState:
        """Return the state before the first step.

        Arguments:
            params: The parameters.
            rng: A random key.
            batch: A batch, to trace the function with.
            func_state: The state of the function, if it has one.

        Returns:
            The state, a pytree of arrays.

        Raises:
            RegistrationError: If the function registers no loss, or JAX dropped a registered loss;
                or, with `strict_registration`, if a parameter is not part of a known kind of layer.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> state = optimizer.init(params, jax.random.key(0), batch)
            >>> int(state.step_counter), state.velocities.shape
            (0, (4, 1))
        """
        batch = self._processed(batch)
        args = {"params": params, "rng": rng, "batch": batch, "func_state": func_state}
        self._programs.check(args)
        init = self.finalize(params, rng, batch, func_state).init
        results, axis = OptimizerState.like_params("params"), self._config.axis_name
        if self._config.num_shards is not None and axis is not None:
            estimator_state = jax.eval_shape(init, *args.values()).estimator_state
            specs = state_specs(estimator_state, axis)
            results = replace(results, estimator_state=specs)
        return self._programs.run("init", init, args, results=results)

    def burnin(
        self,
        num_steps: int,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree],
        func_state: PyTree = None,
    ) -> tuple[OptimizerState, PyTree]:
        """Update the curvature `num_steps` times, and nothing else.

        Arguments:
            num_steps: Number of curvature updates.
            params: The parameters.
            state: The state of the optimizer.
            rng: A random key.
            data_iterator: An iterable of batches, one for each update.
            func_state: The state of the function, if it has one.

        Returns:
            The new state, and `func_state`, unchanged.

        Raises:
            ValueError: If there are too few batches.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> rng = jax.random.key(0)
            >>> state = optimizer.init(params, rng, batch)
            >>> state, _ = optimizer.burnin(3, params, state, rng, [batch, batch, batch])
            >>> state.estimator_state.blocks_states[0].inputs_factor.weight.round(2)
            Array(2.85, dtype=float32)
            >>> int(state.step_counter)
            0
        """
        batches = iter(data_iterator)
        for index in range(num_steps):
            try:
                batch = self._processed(next(batches))
            except StopIteration:
                raise NoMoreBatches(
                    f"{where()}: data_iterator ended after {index} of {num_steps} updates before "
                    f"the first step. Give a longer one, or fewer num_burnin_steps."
                ) from None
            core = self._checked_core(params, state, rng, batch, func_state)
            args = {"params": params, "state": state, "rng": burnin_key(rng, index)}
            args |= {"batch": batch, "func_state": func_state}
            # The first update does not donate the caller's state: an error must not lose it.
            name, replaced = ("burnin", ("state",)) if index else ("first burnin", ())
            state = self._programs.run(name, core.burnin, args, replaced, "state")
        return state, func_state

    @overload
    def step(  # pyright: ignore[reportOverlappingOverload]  A pytree may be None.
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree] | None = None,
        batch: PyTree = None,
        func_state: None = None,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
        global_step_int: int | None = None,
    ) -> StepResult: ...

    @overload
    def step(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree] | None = None,
        batch: PyTree = None,
        func_state: PyTree = ...,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
        global_step_int: int | None = None,
    ) -> StepResultWithFuncState: ...

    def step(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree] | None = None,
        batch: PyTree = None,
        func_state: PyTree = None,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
        global_step_int: int | None = None,
    ) -> StepResult | StepResultWithFuncState:
        """Perform one step of the optimizer.

        The first step is preceded by burn-in: `num_burnin_steps` curvature updates, with batches
        from the iterator, or else with the given batch.

        The step is compiled, and donates the buffers of `params`, `state` and `func_state`, which
        cannot be used afterwards (unless `donate_buffers=False`). Inside a traced function, the
        step becomes part of its program.

        Arguments:
            params: The parameters.
            state: The state of the optimizer.
            rng: A random key, a different one for each step.
            data_iterator: An iterator, from which the next batch is taken. Give this or `batch`.
            batch: A batch.
            func_state: The state of the function, if it has one.
            learning_rate: The learning rate, if it is neither adaptive nor scheduled.
            momentum: The momentum, if it is neither adaptive nor scheduled.
            damping: The damping, if it is neither adaptive nor scheduled.
            global_step_int: The expected index of the step; another one in the state is an error.

        Returns:
            A named tuple `(params, state, stats)`, or `(params, state, func_state, stats)` if the
            function has a state. `stats` is a dictionary with the loss,
            the learning rate, momentum and damping, and what the options of `Optimizer` add.

        Raises:
            TypeError: If the state is not one that `init` returned.
            ValueError: If arguments contradict each other, those of the constructor, or the state.
            MemoryBudgetError: If not even microbatches of one example fit the memory budget.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> state = optimizer.init(params, jax.random.key(0), batch)
            >>> values = dict(learning_rate=0.5, momentum=0.9, damping=1e-3)
            >>> result = optimizer.step(params, state, jax.random.key(1), batch=batch, **values)
            >>> bool(loss(result.params, batch) < result.stats["loss"])
            True
            >>> int(result.stats["batch_size"]), int(result.state.step_counter)
            (4, 1)
        """
        given = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
        dtype = scalar_dtype(params)
        shape = () if self._devices is None else self._devices.scalar_shape
        given = {name: as_scalar(name, value, dtype, shape) for name, value in given.items()}
        self._check_given(given)
        _check_state(state)
        check_alive((params, state, func_state))
        is_inside_trace = is_traced((params, state, rng, batch, func_state, given))
        if is_inside_trace and batch is None:
            raise ValueError(f"{where()}: inside a traced function, give step a batch.")
        if (batch is None) == (data_iterator is None):
            raise ValueError(
                f"{where()}: give step either batch= or data_iterator=, and not both or neither."
            )
        args = {"params": params, "state": state, "rng": rng, "batch": batch}
        args |= {"func_state": func_state, **given}
        self._programs.check(args)
        results = (*_REPLACED, None)
        has_state = self._config.value_func_has_state
        if is_inside_trace:
            args["batch"] = self._processed(batch)
            core = self._checked_core(params, state, rng, args["batch"], func_state)
            result = self._programs.run_traced(core.step_with_burnin, args, results)
            return step_result(*result, has_func_state=has_state)
        count = self._check_step(self._step_counter(state), global_step_int)
        batches = itertools.repeat(batch) if data_iterator is None else iter(data_iterator)
        if count == 0 and self.num_burnin_steps:
            num_steps = self.num_burnin_steps
            args["state"], _ = self.burnin(num_steps, params, state, rng, batches, func_state)
        try:
            args["batch"] = self._processed(next(batches))
        except StopIteration:
            raise NoMoreBatches(f"{where()}: data_iterator has no more batches.") from None
        core = self._checked_core(params, state, rng, args["batch"], func_state)
        if count == 0 and self._config.use_initial_damping_calibration:
            args["state"] = self._programs.run("calibration", core.calibrate, args, (), "state")
        name, core = self._within_budget(args)
        result = self._programs.run(name, core.step, args, _REPLACED, results)
        self._counted = (result[1].step_counter, count + 1)
        return step_result(*result, has_func_state=has_state)

    @overload
    def fit(  # pyright: ignore[reportOverlappingOverload]  A pytree may be None.
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree],
        num_steps: int,
        callback: Callback | None = None,
        progress: bool = True,
        *,
        func_state: None = None,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
    ) -> StepResult: ...

    @overload
    def fit(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree],
        num_steps: int,
        callback: Callback | None = None,
        progress: bool = True,
        *,
        func_state: PyTree = ...,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
    ) -> StepResultWithFuncState: ...

    def fit(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree],
        num_steps: int,
        callback: Callback | None = None,
        progress: bool = True,
        *,
        func_state: PyTree = None,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
    ) -> StepResult | StepResultWithFuncState:
        """Perform `num_steps` steps, with a progress bar. Ctrl-C stops after the current step.

        Arguments:
            params: The parameters.
            state: The state of the optimizer.
            rng: A random key, from which the key of each step is derived.
            data_iterator: An iterable of batches. If there are too few, training stops early, with
                a warning.
            num_steps: The number of steps.
            callback: Called after each step as `callback(params, state, stats)`; its arguments are
                valid until the next step only. Return a truthy value to stop. If it raises, the
                latest result is attached to the exception as `error.reached`.
            progress: Whether to show a bar with the loss, the damping and the time per step.
            func_state: The state of the function, if it has one.
            learning_rate: The learning rate of all steps, if it is neither adaptive nor scheduled.
            momentum: The momentum of all steps, if it is neither adaptive nor scheduled.
            damping: The damping of all steps, if it is neither adaptive nor scheduled.

        Returns:
            The named tuple of the last `step`: `(params, state, stats)`, or
            `(params, state, func_state, stats)` if the function has a state. `stats` is empty if
            there was no step.

        Raises:
            TypeError: If the state is not one that `init` returned.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> rng = jax.random.key(0)
            >>> state = optimizer.init(params, rng, batch)
            >>> values = dict(learning_rate=0.5, momentum=0.5, damping=1e-3)
            >>> batches = [batch] * 100
            >>> fit = optimizer.fit(params, state, rng, batches, 5, progress=False, **values)
            >>> int(fit.state.step_counter), bool(fit.stats["loss"] < 0.1)
            (5, True)
        """
        _check_state(state)
        given = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}

        def step(*args: PyTree, **named: PyTree) -> StepResult | StepResultWithFuncState:
            return self.step(*args, **named, **given)

        has_state = self._config.value_func_has_state
        start = step_result(params, state, func_state, {}, has_func_state=has_state)
        return fit(step, start, rng, data_iterator, num_steps, callback, progress)

    def verify_args_and_get_step_counter(
        self,
        step_counter: SupportsInt,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
        global_step_int: int | None = None,
    ) -> int:
        """Check the arguments of `step`, and return the number of steps so far.

        Arguments:
            step_counter: The number of steps so far, according to the state.
            learning_rate: The learning rate that `step` was given, or None.
            momentum: The momentum that `step` was given, or None.
            damping: The damping that `step` was given, or None.
            global_step_int: The index of the step, if the caller gives it.

        Returns:
            The number of steps so far.

        Raises:
            ValueError: If a value is missing, or is given although it is scheduled or adaptive; or
                if `global_step_int` differs from the number of steps of the state.

        Examples:
            >>> import curvax
            >>> schedule = lambda step: 0.1 / (1 + step)
            >>> options = dict(l2_reg=0.0, learning_rate_schedule=schedule)
            >>> optimizer = curvax.Optimizer(lambda params, batch: (params, params), **options)
            >>> optimizer.verify_args_and_get_step_counter(7, momentum=0.9, damping=1e-3)
            7
        """
        self._check_given(
            {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
        )
        return self._check_step(step_counter, global_step_int)

    def should_update_damping(self, state: OptimizerState) -> Array:
        """Return whether the next step updates an adaptive damping.

        Arguments:
            state: The state of the optimizer.

        Returns:
            A boolean scalar: true in one of `damping_adaptation_interval` steps.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> state = optimizer.init(params, jax.random.key(0), batch)
            >>> bool(optimizer.should_update_damping(state))
            False
            >>> from dataclasses import replace
            >>> fifth = replace(state, step_counter=jnp.array(4))
            >>> bool(optimizer.should_update_damping(fifth))
            True
        """
        return is_damping_due(self._config, jnp.asarray(state.step_counter))

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        """Gather a sharded state (`shard_state=True`) on the host, as NumPy arrays.

        Use it to save a state, to continue without `shard_state`, or, by `split_state`, on another
        number of devices. In a multi-process program all processes must call it.

        Arguments:
            state: A state for the same function, sharded over any number of devices, or gathered.

        Returns:
            The gathered state.

        Raises:
            ValueError: If the function is not traced yet, or if the state is that of a different
                model.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> options = dict(l2_reg=0.0, multi_device=True, shard_state=True)
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), **options)
            >>> state = optimizer.init(params, jax.random.key(0), batch)
            >>> gathered = optimizer.whole_state(state)
            >>> gathered.estimator_state.blocks_states[0].inputs_factor.raw_value.shape
            (4, 4)
        """
        check_alive(state)
        if is_traced(state):
            raise ValueError(
                f"{where()}: whole_state and split_state move arrays to the host. Call them "
                f"outside of functions that are traced."
            )
        host = jax.tree.map(to_host, state)
        return replace(host, estimator_state=whole_state(self.estimator, host.estimator_state))

    def split_state(self, state: OptimizerState) -> OptimizerState:
        """Reshard a state for the devices of this optimizer, which has `shard_state=True`.

        The result is on the host, as NumPy arrays; `step` puts each shard on its device. In a
        multi-process program all processes must call it.

        Arguments:
            state: A state for the same function, sharded over any number of devices, or gathered.

        Returns:
            The state, sharded over the devices of this optimizer.

        Raises:
            ValueError: If the function is not traced yet or `shard_state=False`, if the state is
                that of a different model, or if its cache holds other inverses than this optimizer
                computes (`use_exact_inverses`).

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> options = dict(l2_reg=0.0, multi_device=True, shard_state=True)
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), **options)
            >>> state = optimizer.init(params, jax.random.key(0), batch)
            >>> gathered = optimizer.whole_state(state)
            >>> resharded = optimizer.split_state(gathered)
            >>> resharded.estimator_state.num_devices == jax.device_count()
            True
        """
        estimator = self.estimator
        if not isinstance(estimator, ShardedCurvature):
            raise ValueError(
                f"{where()}: split_state is for shard_state=True, but the state of this optimizer "
                f"is replicated. Gather it instead: state = optimizer.whole_state(state)."
            )
        gathered = self.whole_state(state)
        cached = self._traced.preconditioner.cached_powers
        sharded = split_state(estimator, gathered.estimator_state, *cached)
        return replace(gathered, estimator_state=sharded)

    def compute_loss_value(self, func_args: Sequence[PyTree]) -> Array:
        """Compute the loss.

        Arguments:
            func_args: The arguments of `value_and_grad_func`, as one sequence.

        Returns:
            The loss, on several devices averaged over them.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> optimizer.compute_loss_value((params, batch))
            Array(1., dtype=float32)
        """
        core = self._trace(func_args)
        return self._compute("loss", lambda *args: core.loss(args), self._named(func_args))

    def compute_l2_quad_matrix(self, vectors: Sequence[PyTree]) -> Array:
        """Compute the matrix of products `vᵢᵀ L2 vⱼ` with the curvature L2 of the regulariser.

        Arguments:
            vectors: Pytrees like the parameters.

        Returns:
            The square matrix of inner products of the vectors, over all parameters that are
            regularised, times `l2_reg`.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(jnp.sum), l2_reg=0.1)
            >>> vectors = [{"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}]
            >>> optimizer.compute_l2_quad_matrix(vectors).round(1)
            Array([[0.3, 0.3],
                   [0.3, 0.5]], dtype=float32)
        """
        return l2_matrix(self._config, vectors)

    def compute_exact_quad_model(
        self,
        vectors: Sequence[PyTree],
        grads: PyTree,
        func_args: Sequence[PyTree] | None = None,
    ) -> QuadraticModel:
        """Compute the quadratic model of the loss in a subspace, with the exact curvature C.

        The model predicts that an update `w₁ v₁ + w₂ v₂ + …` of the parameters changes the loss by
        `½ wᵀ (A + damping · D) w + bᵀ w`.

        Arguments:
            vectors: Pytrees like the parameters, which span the subspace.
            grads: The gradient of the loss.
            func_args: The arguments of `value_and_grad_func`, as one sequence. They are required.

        Returns:
            A named tuple `(curvature, identity, gradient)` of the matrix A of products
            `vᵢᵀ (C + L2) vⱼ`, with the curvature L2 of the regulariser, the matrix D of products
            `vᵢᵀ vⱼ`, and the vector b of products `vᵢᵀ grads`.

        Raises:
            ValueError: If there are no `func_args`.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> gradient = jax.grad(loss)(params, batch)
            >>> args = (params, batch)
            >>> model = optimizer.compute_exact_quad_model([gradient], gradient, func_args=args)
            >>> model.curvature.round(3), model.gradient  # C is half the identity.
            (Array([[0.5]], dtype=float32), Array([1.], dtype=float32))
        """
        if func_args is None:
            raise ValueError(
                f"{where()}: compute_exact_quad_model needs func_args, the arguments of "
                f"value_and_grad_func: the exact curvature depends on them."
            )
        core = self._trace(func_args)
        model = lambda vectors, grads, *args: core.exact_model(vectors, grads, args)
        args = {"vectors": list(vectors), "grads": grads, **self._named(func_args)}
        return self._compute("exact model", model, args)

    def compute_approx_quad_model(
        self, state: OptimizerState, vectors: Sequence[PyTree], grads: PyTree
    ) -> QuadraticModel:
        """Compute the quadratic model of the loss in a subspace, with the estimated curvature C.

        Equal to `compute_exact_quad_model`, except that the curvature is that of the state: the
        model predicts that an update `w₁ v₁ + w₂ v₂ + …` of the parameters changes the loss by
        `½ wᵀ (A + damping · D) w + bᵀ w`.

        Arguments:
            state: The state of the optimizer.
            vectors: Pytrees like the parameters, which span the subspace.
            grads: The gradient of the loss.

        Returns:
            A named tuple `(curvature, identity, gradient)` of the matrix A of products
            `vᵢᵀ (C + L2) vⱼ`, with the curvature L2 of the regulariser, the matrix D of products
            `vᵢᵀ vⱼ`, and the vector b of products `vᵢᵀ grads`.

        Raises:
            ValueError: If the function is not traced yet.

        Examples:
            >>> import curvax, jax, jax.numpy as jnp
            >>> def loss(w, batch):
            ...     x, y = batch
            ...     return jnp.mean((curvax.register_squared_error_loss(x @ w, y) - y) ** 2)
            >>> batch, params = (jnp.eye(4), jnp.ones((4, 1))), jnp.zeros((4, 1))
            >>> optimizer = curvax.Optimizer(jax.value_and_grad(loss), l2_reg=0.0)
            >>> rng = jax.random.key(0)
            >>> state = optimizer.init(params, rng, batch)
            >>> state, _ = optimizer.burnin(1, params, state, rng, [batch])
            >>> gradient = jax.grad(loss)(params, batch)
            >>> model = optimizer.compute_approx_quad_model(state, [gradient], gradient)
            >>> model.curvature.shape, model.gradient
            ((1, 1), Array([1.], dtype=float32))
        """
        args = {"state": state, "vectors": list(vectors), "grads": grads}
        return self._compute("approximate model", self._traced.approx_model, args)

    def _trace(self, func_args: Sequence[PyTree]) -> KFAC:
        """Return the pure functions for arguments of this kind; trace the function once."""
        if self._core is None:
            build = lambda args: self._build(self._config, self._function, args)
            devices = self._devices
            self._core = build(func_args) if devices is None else devices.trace(build, func_args)
        return self._core

    def _build(
        self, config: OptimizerConfig, function: ValueFunction, func_args: Sequence[PyTree]
    ) -> KFAC:
        return self._core_type.for_function(
            config,
            function,
            func_args,
            func_for_estimator=config.value_func_for_estimator,
            axis=config.axis_name,
            num_shards=config.num_shards,
            statistics=Statistics(
                config.include_norms_in_stats,
                config.include_per_param_norms_in_stats,
                config.include_registered_loss_in_stats,
                config.invalid_metric_value,
            ),
        )

    def _checked_core(
        self, params: PyTree, state: OptimizerState, rng: Array, batch: PyTree, func_state: PyTree
    ) -> KFAC:
        """Return the pure functions, and check that the state is sharded as they expect."""
        _check_state(state)
        core = self.finalize(params, rng, batch, func_state)
        _check_sharding(core.preconditioner.estimator, state.estimator_state)
        return core

    def _within_budget(self, args: Mapping[str, PyTree]) -> tuple[str, KFAC]:
        """Return the name of the program of a step, and its pure functions.

        With a memory budget, on one device, their microbatches are such that the step fits.
        """
        config = self._config
        if config.memory_budget is None or config.debug or config.axis_name is not None:
            return "step", self._traced
        names = ("params", "func_state", "rng", "batch")
        func_args = self._function.arguments(*(args[name] for name in names))

        def build(sizes: MicrobatchSizes) -> KFAC:
            function = replace(self._function, **sizes)
            return self._build(replace(config, **sizes), function, func_args)

        name, self._core = self._programs.within_budget(
            build, args, _REPLACED, config.memory_budget
        )
        return name, self._core

    def _compute(self, name: str, fun: Callable[..., T], args: Mapping[str, PyTree]) -> T:
        """Return `fun(*args.values())`, with the batch sharded if there are several devices."""
        if self._config.axis_name is None:
            return fun(*args.values())
        if is_traced(args):
            return self._programs.run_traced(fun, args)
        return self._programs.run(name, fun, args)

    def _named(self, func_args: Sequence[PyTree]) -> dict[str, PyTree]:
        """Return the arguments of the function by name."""
        return dict(zip(self._function.names, func_args, strict=True))

    def _processed(self, batch: PyTree) -> PyTree:
        process = self._config.batch_process_func
        return batch if process is None else process(batch)

    def _step_counter(self, state: OptimizerState) -> SupportsInt:
        """Return the number of steps, without blocking if the state is that of the last step."""
        array, count = self._counted
        return count if state.step_counter is array else np.ravel(state.step_counter)[0]

    def _check_given(self, given: Mapping[str, ArrayLike | None]) -> None:
        for name, value in given.items():
            check_given(name, getattr(self._config, name), value)

    def _check_step(self, step_counter: SupportsInt, global_step_int: int | None) -> int:
        count = int(step_counter)
        if global_step_int is not None and global_step_int != count:
            raise ValueError(
                f"{where()}: global_step_int={global_step_int}, but the state is that of step "
                f"{count} (state.step_counter). Pass the state that belongs to it, or leave "
                f"global_step_int out."
            )
        return count


def _check_state(state: Any) -> None:
    if not isinstance(state, OptimizerState):
        raise TypeError(
            f"{where()}: state must be one that init returned, got {type(state).__name__}. "
            f"Make one: state = optimizer.init(params, rng, batch)."
        )


def _check_sharding(estimator: BlockDiagonalCurvature, state: EstimatorState) -> None:
    """Check that the state is sharded over the estimator's devices if and only if that shards."""
    count = num_shards(state)
    if not isinstance(estimator, ShardedCurvature):
        if count is not None:
            raise ValueError(
                f"{where()}: the state was made with shard_state=True, and is sharded over {count} "
                f"devices. Also set shard_state=True here, or gather it: "
                f"state = optimizer.whole_state(state)."
            )
        return
    if not isinstance(state, ShardedState):
        raise ValueError(
            f"{where()}: the state was made without shard_state=True, and is replicated. "
            f"Leave shard_state out, or shard it: state = optimizer.split_state(state)."
        )
    if count != estimator.num_devices:
        raise ValueError(
            f"{where()}: the state is sharded over {count} devices, but here are "
            f"{estimator.num_devices}. Reshard it: state = optimizer.split_state(state)."
        )
    check_rows(estimator, state)
