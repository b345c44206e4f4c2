"""`Optimizer`: the stateful shell of K-FAC.

It maps its arguments to an `OptimizerConfig`, traces the function when it first sees a batch,
compiles the pure functions of `KFAC`, donates buffers and counts steps. All mathematics is there.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax import _jax
from curvax._errors import where
from curvax._types import Array, Fun, PyTree
from curvax.curvature.batch import default_batch_size_extractor
from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.curvature.state_sharding import (
    ShardedCurvature,
    check_rows,
    num_shards,
    split_state,
    state_specs,
    whole_state,
)
from curvax.devices.mesh_axis import to_host
from curvax.optimizer.config import Number, OptimizerConfig, Schedule, as_scalar, check_given
from curvax.optimizer.damping import damping_decay_factor, is_damping_due
from curvax.optimizer.data_parallel import DataParallel, without_places
from curvax.optimizer.fit import Callback, NoMoreBatches, fit
from curvax.optimizer.preconditioner import l2_matrix
from curvax.optimizer.programs import Programs, check_alive, is_traced
from curvax.optimizer.state import (
    OptimizerState,
    StepResult,
    StepResultWithFuncState,
    number_type,
    step_result,
)
from curvax.optimizer.step import KFAC, Statistics, burnin_key
from curvax.optimizer.value_function import ValueFunction

_OPTIONS = {option.name for option in fields(OptimizerConfig)}
_REPLACED = ("params", "state", "func_state")


class Optimizer:
    """K-FAC: steps along the gradient, preconditioned by an estimate of the curvature.

    With the gradient g and the estimated curvature C of the losses that the function registers,

        direction = (C + (damping + l2_reg) * identity) ** -1 @ g
        update = -learning_rate * direction + momentum * last_update

    Losses are registered in `value_func_for_estimator` if that is given; else in the function that
    `jax.value_and_grad` was applied to; else in `value_and_grad_func` itself, as with a
    `jax.custom_jvp` whose rule registers.

    A step for which the loss, the gradient or the update is not finite is skipped: parameters and
    the state of the function stay as they are, and the damping rises for a while. If the loss or
    the gradient is not finite, the curvature stays as it is, too; otherwise momentum starts again
    from zero.

    `step` returns statistics: `step`, `batch_size`, `data_seen`, `loss`, `learning_rate`,
    `momentum`, `damping`; `rho`, `new_loss` and `quad_model_change`, the ratio of the change of the
    loss to the predicted one, the loss after the step and the predicted change, which are NaN in
    steps that do not need them; `scaled_grad_norm_sq`, the squared norm of
    `learning_rate * direction` in the metric of the estimate, before any constraint; `skipped`, the
    number of steps that were skipped so far; `aux` if the function returns it. On request
    `rejected`, `registered_loss`, `param_norm`, `grad_norm`, `precon_grad_norm`, `update_norm`, and
    by parameter `param_norms` and so on.

    The arguments are attributes. They can be set until the function was traced, and afterwards if
    that is allowed; then it is traced and compiled again.

    Arguments:
        value_and_grad_func: Returns the loss and its gradient, as `jax.value_and_grad(loss)` does:
            `(out, grads) = value_and_grad_func(params, func_state, rng, batch)`, where `out` is
            `(loss, func_state, aux)`, or the loss alone. The next options say which of them the
            function has.
        l2_reg: Weight of a regulariser `l2_reg / 2 * sum(params**2)` that is part of the loss. It
            is not added to the loss here, only to the curvature.
        value_func_has_aux: Whether there is `aux`.
        value_func_has_state: Whether there is `func_state`.
        value_func_has_rng: Whether there is `rng`.
        use_adaptive_learning_rate: Whether each step takes the learning rate that minimises a
            quadratic model with the exact curvature. For batches that hardly differ.
        learning_rate_schedule: A function of the step. Without a schedule or an adaptive learning
            rate, `step` is given the learning rate.
        use_adaptive_momentum: Whether each step takes the momentum that minimises that model.
        momentum_schedule: A function of the step. Otherwise as for the learning rate.
        use_adaptive_damping: Whether to adapt the damping by the Levenberg-Marquardt rule: by how
            well the model predicts the loss.
        damping_schedule: A function of the step. Otherwise as for the learning rate.
        initial_damping: Initial value of an adaptive damping.
        min_damping: Lower bound on an adaptive damping.
        max_damping: Upper bound on an adaptive damping.
        include_damping_in_quad_change: Whether the predicted change includes the damping.
        damping_adaptation_interval: Number of steps between updates of an adaptive damping.
        damping_adaptation_decay: It changes by this to the power of the interval.
        damping_lower_threshold: It rises if the ratio of changes is below this.
        damping_upper_threshold: It falls if the ratio is above this.
        always_use_exact_qmodel_for_damping_adjustment: Whether the predicted change is computed
            with the exact curvature even where learning rate and momentum are not adaptive.
        norm_constraint: Upper bound on the squared norm of `learning_rate * direction` in the
            metric of the estimate. Longer directions are scaled down.
        num_burnin_steps: Number of updates of the curvature before the first step.
        estimation_mode: How the curvature is estimated, such as "fisher_gradients" or "ggn_exact";
            see `BlockDiagonalCurvature.update_curvature_matrix_estimate`.
        curvature_ema: Decay of the moving average of the curvature in each update.
        inverse_update_period: Number of steps between updates of the inverses.
        use_exact_inverses: Whether to add the damping to the curvature of a layer instead of to its
            Kronecker factors. It takes eigenvalues; a new damping then has its effect at once.
        batch_process_func: Applied to each batch before it is used.
        register_only_generic: Whether to treat all parameters as generic ones.
        patterns_to_skip: Names of the kinds of layers that are not looked for.
        auto_register_kwargs: Further arguments of `auto_register_tags`, and `examples_interact` of
            `BlockDiagonalCurvature`.
        layer_tag_to_block_ctor: Classes of curvature blocks by layer tag ("dense_tag" or "dense"),
            in place of the default ones.
        multi_device: Whether to shard batches over devices: all of them, or those of `mesh`.
        debug: Whether to run without compiling, on one device.
        batch_size_extractor: From a batch to its number of examples.
        pmap_axis_name: Name of the mesh axis along which batches are sharded: one of `mesh`, if it
            has several; or that of a `jax.shard_map` or `jax.pmap` around `step`.
        forbid_setting_attributes_after_finalize: Whether attributes cannot be set any more once the
            function was traced.
        modifiable_attribute_exceptions: Names of attributes that can be set even then.
        include_norms_in_stats: Whether statistics include norms.
        include_per_param_norms_in_stats: Whether statistics include norms by parameter.
        distributed_precon_apply: Whether products with inverses are distributed over devices.
        distributed_inverses: Whether inverses are distributed over devices.
        curvature_update_period: Number of steps between updates of the curvature.
        num_estimator_samples: Number of samples of an update, in modes that sample.
        use_step_rejection: Whether to reject a step that makes the loss of its batch rise. The
            damping rises then, wherever it comes from, and momentum starts again from zero.
        reject_damping_increase_factor: Factor by which it rises, also for a step that is skipped. A
            given or scheduled damping returns to its value with the steps that follow, by
            `damping_adaptation_decay` each.
        precon_power: Power of the curvature, in place of -1.
        value_func_for_estimator: A function like the one inside `value_and_grad_func`, which
            registers the losses.
        include_registered_loss_in_stats: Whether statistics include the mean of the registered
            losses.
        regularized_parameters_path_exclusions: Regular expressions. Parameters in whose paths
            (such as `['layer']['bias']`) one is found are not regularised. In the preconditioner
            that counts for layers none of whose parameters are.
        strict_registration: Whether a parameter outside the known kinds of layers is an error.
        microbatch_size: Number of examples to take at a time, for gradient and curvature. In `aux`,
            real numbers are then averaged, integers summed, and rows of examples concatenated. All
            microbatches get the same `rng`.
        memory_budget: Memory that a step may add to what is there: its results, less what it writes
            into donated buffers, its temporaries, and the scratch memory of libraries. The
            microbatch size is chosen for it. In burn-in, on several devices, and inside a function
            that is traced, it holds for each of gradient and curvature.
        stagger_inverses: Whether each step computes the inverses of some of the layers, so that
            steps take about the same time.
        donate_buffers: Whether `step` donates the buffers of parameters and states.
        mesh: The devices, with an axis called `pmap_axis_name` or a single one. It implies
            `multi_device`. Parameters may be sharded along other axes.
        shard_state: Whether to shard the Kronecker factors over devices instead of replicating
            them. Pairs of factors of equal shape are distributed, so memory falls with the number
            of devices as far as there are several.

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

    State: ClassVar[Any] = OptimizerState

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
        layer_tag_to_block_ctor: Mapping[str, Any] | None = None,
        multi_device: bool = False,
        debug: bool = False,
        batch_size_extractor: Callable[[PyTree], Any] = default_batch_size_extractor,
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
        )
        self._configure(config)

    def _configure(self, config: OptimizerConfig) -> None:
        """Start afresh from a configuration."""
        self._config, self._core = config, None
        self._function = ValueFunction(
            config.value_and_grad_func,
            config.value_func_has_aux,
            config.value_func_has_state,
            config.value_func_has_rng,
            **config.sizes,
        )
        axis, has_budget = config.axis_name, config.memory_budget is not None
        devices = None if axis is None else DataParallel(config.mesh, axis)
        self._programs = Programs(not config.debug, config.donate_buffers, devices, has_budget)
        self._counted: tuple[Any, int] = (None, 0)

    def __getattr__(self, name: str) -> Any:
        if name not in _OPTIONS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A subclass may set attributes before it calls `__init__`; private ones are always ours.
        config: OptimizerConfig | None = getattr(self, "_config", None)
        if config is None or name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        is_forbidden = config.forbid_setting_attributes_after_finalize
        if self._core and is_forbidden and name not in config.modifiable_attribute_exceptions:
            raise AttributeError(
                f"{where()}: {name} cannot be set any more, because the optimizer was used "
                f"already. Make another one; or name it in modifiable_attribute_exceptions, or say "
                f"forbid_setting_attributes_after_finalize=False."
            )
        if name in _OPTIONS:
            self._configure(replace(config, **{name: value}))
        else:
            object.__setattr__(self, name, value)

    @property
    def num_burnin_steps(self) -> int:
        """Number of updates of the curvature before the first step."""
        return self._config.num_burnin_steps

    @property
    def l2_reg(self) -> Array:
        """Weight of the regulariser in the curvature."""
        return jnp.asarray(self._config.l2_reg, float)

    @property
    def estimator(self) -> BlockDiagonalCurvature:
        """The curvature estimator, once the optimizer was used."""
        return self._traced.preconditioner.estimator

    @property
    def damping_decay_factor(self) -> Any:
        """Factor by which an adaptive damping falls at once; it rises by the inverse."""
        return damping_decay_factor(self._config)

    @property
    def _traced(self) -> KFAC:
        if self._core is None:
            raise ValueError(
                f"{where()}: what the function consists of is not known before it was traced. "
                f"Call init or step first."
            )
        return self._core

    def finalize(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> KFAC:
        """Trace the function if that was not done yet; `init` and `step` do it by themselves.

        Arguments:
            params: The parameters.
            rng: A random key.
            batch: A batch as `batch_process_func` returns it: it is not applied here.
            func_state: The state of the function, if it has one.

        Returns:
            The pure functions that `init` and `step` compile.
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
            The state.

        Raises:
            RegistrationError: If the function registers no loss, or one was lost; or, with
                `strict_registration`, if a parameter is not part of a known kind of layer.
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
        """Update the curvature a number of times, and nothing else.

        Arguments:
            num_steps: Number of updates.
            params: The parameters.
            state: The state of the optimizer.
            rng: A random key.
            data_iterator: Batches, one for each update.
            func_state: The state of the function, if it has one.

        Returns:
            The state, and the state of the function, unchanged.
        """
        batches = iter(data_iterator)
        for number in range(num_steps):
            try:
                batch = self._processed(next(batches))
            except StopIteration:
                raise NoMoreBatches(
                    f"{where()}: data_iterator ended after {number} of {num_steps} updates before "
                    f"the first step. Give one that goes on, or fewer num_burnin_steps."
                ) from None
            core = self._checked_core(params, state, rng, batch, func_state)
            args = {"params": params, "state": state, "rng": burnin_key(rng, number)}
            args |= {"batch": batch, "func_state": func_state}
            # The first update does not donate the caller's state: an error must not lose it.
            name, replaced = ("burnin", ("state",)) if number else ("first burnin", ())
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
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
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
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
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
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
        global_step_int: int | None = None,
    ) -> StepResult | StepResultWithFuncState:
        """Do one step of the optimizer.

        The first step burns in: it updates the curvature `num_burnin_steps` times before, with
        batches from the iterator, or else with the given batch each time.
        A step is compiled, and the buffers of `params`, `state` and `func_state` are donated: they
        cannot be used afterwards. Inside a function that is traced it becomes part of that.

        Arguments:
            params: The parameters.
            state: The state of the optimizer.
            rng: A random key, another one for each step.
            data_iterator: Where to take a batch from, if it is not given.
            batch: The batch.
            func_state: The state of the function, if it has one.
            learning_rate: The learning rate, if it is not adaptive and has no schedule.
            momentum: The momentum, if it is not adaptive and has no schedule.
            damping: The damping, if it is not adaptive and has no schedule.
            global_step_int: The index of the step, if the caller knows it. It must be that of the
                state.

        Returns:
            A named tuple `(params, state, stats)`, or `(params, state, func_state, stats)` if the
            function has a state. Statistics are a dictionary; see `Optimizer`.

        Raises:
            TypeError: If the state is not one that `init` returned.
            ValueError: If arguments contradict each other, those of the constructor, or the state.
            MemoryBudgetError: If not even microbatches of one example fit the memory budget.
        """
        given = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
        dtype = number_type(params)
        given = {name: as_scalar(name, value, dtype) for name, value in given.items()}
        self._check_given(given)
        _check_state(state)
        check_alive((params, state, func_state))
        is_inside = is_traced((params, state, rng, batch, func_state, given))
        if is_inside and batch is None:
            raise ValueError(f"{where()}: inside of a traced function, give step a batch.")
        if (batch is None) == (data_iterator is None):
            raise ValueError(
                f"{where()}: give step either batch= or data_iterator=, and not both or neither."
            )
        args = {"params": params, "state": state, "rng": rng, "batch": batch}
        args |= {"func_state": func_state, **given}
        self._programs.check(args)
        results = (*_REPLACED, None)
        has_state = self._config.value_func_has_state
        if is_inside:
            args["batch"] = self._processed(batch)
            core = self._checked_core(params, state, rng, args["batch"], func_state)
            found = self._programs.inside(core.step_with_burnin, args, results)
            return step_result(*found, has_func_state=has_state)
        count = self._check_step(self._step_counter(state), global_step_int)
        batches = itertools.repeat(batch) if data_iterator is None else iter(data_iterator)
        if count == 0 and self.num_burnin_steps:
            num_steps = self.num_burnin_steps
            args["state"], _ = self.burnin(num_steps, params, state, rng, batches, func_state)
        try:
            args["batch"] = self._processed(next(batches))
        except StopIteration:
            raise NoMoreBatches(f"{where()}: data_iterator has no more batches.") from None
        self._checked_core(params, state, rng, args["batch"], func_state)
        name, core = self._within_budget(args)
        found = self._programs.run(name, core.step, args, _REPLACED, results)
        self._counted = (found[1].step_counter, count + 1)
        return step_result(*found, has_func_state=has_state)

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
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
    ) -> Any:
        """Do a number of steps, with a progress bar. Ctrl-C stops after the current step.

        Arguments:
            params: The parameters.
            state: The state of the optimizer.
            rng: A random key.
            data_iterator: Batches. If there are too few, training stops early, with a warning.
            num_steps: The number of steps.
            callback: Called after each step as `callback(params, state, stats)`; its arguments are
                valid until the next step only. Return a truthy value to stop. If it raises, the
                latest result is attached to the exception as `error.reached`.
            progress: Whether to show a bar with the loss, the damping and the time of a step.
            func_state: The state of the function, if it has one.
            learning_rate: The learning rate of all steps, if it is not adaptive or scheduled.
            momentum: The momentum of all steps, if it is not adaptive or scheduled.
            damping: The damping of all steps, if it is not adaptive or scheduled.

        Returns:
            The named tuple of the last `step`; `stats` are empty if there was none.

        Raises:
            TypeError: If the state is not one that `init` returned.
        """
        _check_state(state)
        given = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
        step: Any = lambda *args, **named: self.step(*args, **named, **given)
        has_state = self._config.value_func_has_state
        carried = (params, state, func_state)
        return fit(step, carried, rng, data_iterator, num_steps, callback, progress, has_state)

    def verify_args_and_get_step_counter(
        self,
        step_counter: Any,
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
        global_step_int: int | None = None,
    ) -> int:
        """Check what `step` was given.

        Arguments:
            step_counter: The number of steps so far, by the state.
            learning_rate: The learning rate that `step` was given, or None.
            momentum: The momentum that `step` was given, or None.
            damping: The damping that `step` was given, or None.
            global_step_int: The index of the step, if the caller knows it.

        Returns:
            The number of steps so far.

        Raises:
            ValueError: If a value is missing, or is given although it is scheduled or adaptive; or
                if `global_step_int` differs from the number of steps of the state.
        """
        self._check_given(
            {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
        )
        return self._check_step(step_counter, global_step_int)

    def should_update_damping(self, state: OptimizerState) -> Array:
        """Return whether the next step adapts the damping (if that is adaptive)."""
        return jnp.asarray(is_damping_due(self._config, state.step_counter))

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        """Gather a state that is sharded (`shard_state=True`) into one that is not.

        It is on the host, as NumPy arrays: to be saved, to go on without `shard_state`, or, by
        `split_state`, with another number of devices. Of several processes all must call it.

        Arguments:
            state: A state for the same function, sharded over any number of devices, or gathered.

        Returns:
            The gathered state.

        Raises:
            ValueError: If the optimizer was not used yet, or if the state is that of another model.
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
        """Arrange a state as this optimizer (with `shard_state=True`) shards it over its devices.

        It is on the host, as what `whole_state` returns; `step` puts each shard on its device.

        Arguments:
            state: A state for the same function, sharded over any number of devices, or gathered.

        Returns:
            The state for as many devices as the optimizer has.

        Raises:
            ValueError: If the optimizer was not used yet or has no `shard_state`, if the state is
                that of another model, or if its cache holds other inverses than this optimizer
                computes (`use_exact_inverses`).
        """
        estimator = self.estimator
        if not isinstance(estimator, ShardedCurvature):
            raise ValueError(
                f"{where()}: split_state is for shard_state=True, but this optimizer goes on "
                f"with a whole state: state = optimizer.whole_state(state)."
            )
        whole = self.whole_state(state)
        cached = self._traced.preconditioner.cached_powers
        split = split_state(estimator, whole.estimator_state, *cached)
        return replace(whole, estimator_state=split)

    def compute_loss_value(self, func_args: Sequence[PyTree]) -> Array:
        """Return the loss, for arguments of `value_and_grad_func`."""
        core = self._trace(func_args)
        return self._compute("loss", lambda *args: core.loss(args), self._named(func_args))

    def compute_l2_quad_matrix(self, vectors: Sequence[PyTree]) -> Array:
        """Return the matrix of `vᵢᵀ L2 vⱼ`, where L2 is the curvature of the regulariser.

        Arguments:
            vectors: Pytrees like the parameters.

        Returns:
            A matrix: `l2_reg` times the inner products of the vectors, over all parameters that
            are regularised.
        """
        return l2_matrix(self._config, vectors)

    def compute_exact_quad_model(
        self,
        vectors: Sequence[PyTree],
        grads: PyTree,
        func_args: Sequence[PyTree] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return the quadratic model of the loss with its exact curvature C, in a subspace.

        Arguments:
            vectors: Pytrees like the parameters, which span the subspace.
            grads: The gradient of the loss.
            func_args: The arguments of `value_and_grad_func`.

        Returns:
            The matrices of `vᵢᵀ (C + L2) vⱼ` and `vᵢᵀ vⱼ`, and the vector of `vᵢᵀ grads`.

        Raises:
            ValueError: If there are no `func_args`.
        """
        if func_args is None:
            raise ValueError(
                f"{where()}: compute_exact_quad_model needs func_args, the arguments of "
                f"value_and_grad_func: the exact curvature depends on them."
            )
        core = self._trace(func_args)
        model = lambda vectors, grads, *args: tuple(core.exact_model(vectors, grads, args))
        args = {"vectors": list(vectors), "grads": grads, **self._named(func_args)}
        return self._compute("exact model", model, args)

    def compute_approx_quad_model(
        self, state: OptimizerState, vectors: Sequence[PyTree], grads: PyTree
    ) -> tuple[Array, Array, Array]:
        """Return the quadratic model of the loss with the curvature that a state estimates.

        Arguments:
            state: The state of the optimizer.
            vectors: Pytrees like the parameters, which span the subspace.
            grads: The gradient of the loss.

        Returns:
            The matrices of `vᵢᵀ (C + L2) vⱼ` and `vᵢᵀ vⱼ`, and the vector of `vᵢᵀ grads`.
        """
        core = self._traced
        model = lambda *args: tuple(core.approx_model(*args))
        args = {"state": state, "vectors": list(vectors), "grads": grads}
        return self._compute("approximate model", model, args)

    def _trace(self, func_args: Sequence[PyTree]) -> KFAC:
        """Return the pure functions for arguments of this kind; trace if that was not done yet."""
        if self._core is None:
            axis = self._config.axis_name
            if axis is not None and not _jax.is_bound(axis):
                func_args = without_places(func_args)
            self._core = self._build(self._config, self._function, func_args)
        return self._core

    @staticmethod
    def _build(
        config: OptimizerConfig, function: ValueFunction, func_args: Sequence[PyTree]
    ) -> KFAC:
        return KFAC.for_function(
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
            ),
        )

    def _checked_core(
        self, params: PyTree, state: OptimizerState, rng: Array, batch: PyTree, func_state: PyTree
    ) -> KFAC:
        """Return the pure functions, after checking that the state is sharded as they expect."""
        _check_state(state)
        core = self.finalize(params, rng, batch, func_state)
        _check_sharding(core.preconditioner.estimator, state.estimator_state)
        return core

    def _within_budget(self, args: Mapping[str, Any]) -> tuple[str, KFAC]:
        """Return the name of the program of a step, and its pure functions.

        With a memory budget, on one device, their microbatches are so small that all of it fits.
        """
        config = self._config
        if config.memory_budget is None or config.debug or config.axis_name is not None:
            return "step", self._traced
        names = ("params", "func_state", "rng", "batch")
        func_args = self._function.arguments(*(args[name] for name in names))

        def build(sizes: Mapping[str, Any]) -> KFAC:
            function = replace(self._function, **sizes)
            return self._build(replace(config, **sizes), function, func_args)

        name, self._core = self._programs.within_budget(
            build, args, _REPLACED, config.memory_budget
        )
        return name, self._core

    def _compute(self, name: str, fun: Callable[..., Any], args: Mapping[str, Any]) -> Any:
        """Run a function, on several devices if there are."""
        if self._config.axis_name is None:
            return fun(*args.values())
        if is_traced(args):
            return self._programs.inside(fun, args)
        return self._programs.run(name, fun, args)

    def _named(self, func_args: Sequence[PyTree]) -> dict[str, PyTree]:
        """Return arguments of the function by name."""
        return dict(zip(self._function.names, func_args, strict=True))

    def _processed(self, batch: PyTree) -> PyTree:
        process = self._config.batch_process_func
        return batch if process is None else process(batch)

    def _step_counter(self, state: OptimizerState) -> Any:
        """Return the number of steps, without a wait if the last step returned the state."""
        array, count = self._counted
        return count if state.step_counter is array else state.step_counter

    def _check_given(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            check_given(name, getattr(self._config, name), value)

    def _check_step(self, step_counter: Any, global_step_int: int | None) -> int:
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


def _check_sharding(estimator: BlockDiagonalCurvature, state: Any) -> None:
    """Check that an estimator's state is sharded as the estimator expects it, or replicated."""
    found = num_shards(state)
    if not isinstance(estimator, ShardedCurvature):
        if found is not None:
            raise ValueError(
                f"{where()}: the state was made with shard_state=True, and is sharded over {found} "
                f"devices. Say shard_state=True here, too, or gather it: "
                f"state = optimizer.whole_state(state)."
            )
        return
    if found is None:
        raise ValueError(
            f"{where()}: the state was made without shard_state=True, and is replicated. "
            f"Leave shard_state out, or shard it: state = optimizer.split_state(state)."
        )
    if found != estimator.num_devices:
        raise ValueError(
            f"{where()}: the state is sharded over {found} devices, but here are "
            f"{estimator.num_devices}. Shard it again: state = optimizer.split_state(state)."
        )
    check_rows(estimator, state)
