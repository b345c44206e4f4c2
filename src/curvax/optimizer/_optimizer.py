"""`Optimizer`: K-FAC, as an object that compiles the pure step and looks after its arguments."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jax.sharding import Mesh

from curvax._types import Array, Fun, PyTree
from curvax.curvature import default_batch_size_extractor
from curvax.optimizer._fit import Callback, NoMoreBatches, fit
from curvax.optimizer._programs import check_alive, is_traced
from curvax.optimizer._quantities import Quantities
from curvax.optimizer._rules import Given, Schedule
from curvax.optimizer._state import OptimizerState
from curvax.optimizer._step import burnin_key
from curvax.optimizer._vectors import number_type

__all__ = ["Optimizer"]

Number = float | int | Array
_WHERE = "curvax.Optimizer"


class Optimizer(Quantities):
    """K-FAC: steps along the gradient, preconditioned by an estimate of the curvature.

    With the gradient g and the estimated curvature C of the losses that the function registers,

        direction = (C + (damping + l2_reg) * identity) ** -1 @ g
        update = -learning_rate * direction + momentum * last_update

    The function registers its losses where `value_func_for_estimator` is traced if that is given;
    else in what `jax.value_and_grad` was applied to; else in `value_and_grad_func` itself, as with
    a `jax.custom_jvp` whose rule registers.

    A step for which the loss, the gradient or the update is not finite is skipped: parameters and
    the state of the function stay as they are, and the damping rises for a while. So does the
    curvature, if the loss or the gradient is not finite.

    `step` returns statistics: `step`, `batch_size`, `data_seen`, `loss`, `learning_rate`,
    `momentum`, `damping`; `rho`, `new_loss` and `quad_model_change`, the ratio of the change of the
    loss to what was expected, and both of these, which are NaN in steps that do not need them;
    `scaled_grad_norm_sq`, the squared norm of `learning_rate * direction` in the metric of the
    estimate, before any constraint; `skipped`, the number of steps that were, so far; `aux` if the
    function has such. On request `rejected`, `registered_loss`, `param_norm`, `grad_norm`,
    `precon_grad_norm`, `update_norm`, and by parameter `param_norms` and so on.

    Arguments:
        value_and_grad_func: returns the loss and its gradient, as `jax.value_and_grad(loss)` does:
            `(out, grads) = value_and_grad_func(params, func_state, rng, batch)`, where `out` is
            `(loss, func_state, aux)`, without those that the following say it does not have, or the
            loss alone.
        l2_reg: the weight of a regulariser `l2_reg / 2 * sum(params**2)` that is part of the loss.
            It is only told here, for the curvature.
        value_func_has_aux: whether there is `aux`.
        value_func_has_state: whether there is `func_state`.
        value_func_has_rng: whether there is `rng`.
        use_adaptive_learning_rate: whether each step takes the learning rate that minimises a
            quadratic model with the exact curvature. For batches that hardly differ.
        learning_rate_schedule: a function of the step. Without this and the former, `step` is given
            the learning rate; momentum and damping likewise.
        use_adaptive_momentum: as for the learning rate.
        momentum_schedule: as for the learning rate.
        use_adaptive_damping: whether the damping follows how well the loss is foretold (by the rule
            of Levenberg and Marquardt).
        damping_schedule: as for the learning rate.
        initial_damping: where an adaptive damping begins.
        min_damping: the least that an adaptive damping can be.
        max_damping: the most.
        include_damping_in_quad_change: whether the damping counts in the change that is expected.
        damping_adaptation_interval: once in how many steps the damping is adapted.
        damping_adaptation_decay: it changes by this to the power of the interval.
        damping_lower_threshold: it rises if the ratio of changes is below this.
        damping_upper_threshold: it falls if the ratio is above this.
        always_use_exact_qmodel_for_damping_adjustment: whether the expected change is computed with
            the exact curvature also where learning rate and momentum are not adaptive.
        norm_constraint: the most that the squared norm of `learning_rate * direction` may be, in
            the metric of the estimate. What is longer is scaled down.
        num_burnin_steps: how often the curvature is updated before the first step.
        estimation_mode: as in `BlockDiagonalCurvature.update_curvature_matrix_estimate`.
        curvature_ema: what the average of the curvature is multiplied with in each update.
        inverse_update_period: once in how many steps inverses are computed.
        use_exact_inverses: whether to add the damping to the curvature of a layer, instead of to
            its factors. It takes eigenvalues; a new damping then has its effect at once.
        batch_process_func: what is done to each batch before it is used.
        register_only_generic: whether all parameters are taken for generic ones.
        patterns_to_skip: as in `auto_register_tags`.
        auto_register_kwargs: further arguments of `auto_register_tags`.
        layer_tag_to_block_ctor: as in `BlockDiagonalCurvature`.
        multi_device: whether to split batches among devices: all, or those of `mesh`.
        debug: whether to run without compiling, on one device.
        batch_size_extractor: from a batch to its number of examples.
        pmap_axis_name: the axis of devices along which batches are split: that of `mesh`, if it has
            several; or that of a `jax.shard_map` or `jax.pmap` of the caller's around `step`.
        forbid_setting_attributes_after_finalize: whether these arguments, which are attributes,
            cannot be set once the function was traced.
        modifiable_attribute_exceptions: names of attributes that can.
        include_norms_in_stats: whether norms are among the statistics.
        include_per_param_norms_in_stats: whether norms by parameter are.
        distributed_precon_apply: whether devices share out products with inverses.
        distributed_inverses: whether they share out inverses.
        curvature_update_period: once in how many steps the curvature is updated.
        num_estimator_samples: how many samples an update takes, in modes that draw.
        use_step_rejection: whether a step that makes the loss of its batch rise is not taken. The
            damping rises then, whoever sets it, and momentum begins anew.
        reject_damping_increase_factor: by how much it rises, also for a step that is skipped. A
            damping that is given or scheduled comes back to what it is with further steps, by
            `damping_adaptation_decay` each.
        precon_power: the power of the curvature, in place of -1.
        value_func_for_estimator: a function like that inside of `value_and_grad_func`, which
            registers the losses.
        include_registered_loss_in_stats: whether the mean of the registered losses is there.
        regularized_parameters_path_exclusions: regular expressions. Parameters in whose paths
            (such as `['layer']['bias']`) one is found are not regularised. In the preconditioner
            that counts for layers none of whose parameters are.
        strict_registration: whether a parameter outside of known kinds of layers is an error.
        microbatch_size: how many examples to take at a time, for gradient and curvature. In `aux`,
            numbers are then averaged, integers summed, and rows of examples concatenated. All
            microbatches get the same `rng`.
        memory_budget: how much memory a step may add to what is there: what it returns, less what
            it writes into donated buffers, its temporaries, and the scratch memory of libraries.
            The microbatch size is chosen for it. In burn-in, on several devices, and inside a
            function that is traced, it is for each of gradient and curvature.
        stagger_inverses: whether each step computes the inverses of its share of layers, so that
            steps take about the same time.
        donate_buffers: whether `step` takes over the buffers of parameters and states.
        mesh: the devices, with an axis that `pmap_axis_name` names, or a single one. It implies
            `multi_device`. Parameters may be split along other axes.
        shard_state: whether each device keeps and inverts a share of the Kronecker factors instead
            of all. Pairs of factors of equal shape are shared out, so memory falls with devices as
            far as there are several.

    Raises:
        ValueError: if arguments contradict each other.

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
        given = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        super().__init__(given, _WHERE)
        self.__dict__["_counted"] = (None, 0)

    def init(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> OptimizerState:
        """The state before the first step.

        Arguments:
            params: the parameters.
            rng: a random key.
            batch: a batch, to trace the function with.
            func_state: the state of the function, if it has one.

        Returns:
            The state.

        Raises:
            RegistrationError: if the function registers no loss, or one was lost; or, with
                `strict_registration`, if a parameter is not part of a known kind of layer.
        """
        batch = self._processed(batch)
        args = {"params": params, "rng": rng, "batch": batch, "func_state": func_state}
        self._programs.check(args)
        init = self.finalize(params, rng, batch, func_state).init
        return self._programs.run("init", init, args, results=self._like_state(init, args))

    def burnin(
        self,
        num_steps: int,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        data_iterator: Iterable[PyTree],
        func_state: PyTree = None,
    ) -> tuple[OptimizerState, PyTree]:
        """Update the curvature some times, and nothing else.

        Arguments:
            num_steps: how often.
            params: the parameters.
            state: the state of the optimizer.
            rng: a random key.
            data_iterator: batches, one for each update.
            func_state: the state of the function, if it has one.

        Returns:
            The state, and the state of the function, as it was.
        """
        batches = iter(data_iterator)
        for number in range(num_steps):
            try:
                batch = self._processed(next(batches))
            except StopIteration:
                raise NoMoreBatches(
                    f"{_WHERE}: data_iterator ended after {number} of {num_steps} updates before "
                    f"the first step. Give one that goes on, or fewer num_burnin_steps."
                ) from None
            burnin = self.finalize(params, rng, batch, func_state).checked_for(state).burnin
            args = {"params": params, "state": state, "rng": burnin_key(rng, number)}
            args |= {"batch": batch, "func_state": func_state}
            # The caller's own state is not given away: an error must not lose it.
            name, replaced = ("burnin", ("state",)) if number else ("first burnin", ())
            state = self._programs.run(name, burnin, args, replaced, "state")
        return state, func_state

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
    ) -> tuple[Any, ...]:
        """A step of the optimizer.

        The first one burns in: it updates the curvature `num_burnin_steps` times before, with
        batches from the iterator, or else with the given batch again and again.
        It is compiled, and the buffers of `params`, `state` and `func_state` are donated: they are
        gone afterwards. Inside of a function that is being traced it becomes part of that.

        Arguments:
            params: the parameters.
            state: the state of the optimizer.
            rng: a random key, another one for each step.
            data_iterator: where to take a batch from, if it is not given.
            batch: the batch.
            func_state: the state of the function, if it has one.
            learning_rate: the learning rate, if it is not adaptive and has no schedule.
            momentum: the momentum, likewise.
            damping: the damping, likewise.
            global_step_int: the number of the step, if the caller knows it. It must be that of the
                state.

        Returns:
            `(params, state, stats)`, or `(params, state, func_state, stats)` if the function has a
            state. Statistics are a dictionary; see `Optimizer`.

        Raises:
            ValueError: if arguments contradict each other, those of the constructor, or the state.
            MemoryBudgetError: if not even microbatches of one example fit the memory budget.
        """
        given = Given(learning_rate, momentum, damping).as_arrays(number_type(params))
        self._check_given(given)
        check_alive((params, state, func_state))
        is_inside = is_traced((params, state, rng, batch, func_state, given))
        if is_inside and batch is None:
            raise ValueError(f"{_WHERE}: inside of a traced function, give step a batch.")
        if (batch is None) == (data_iterator is None):
            raise ValueError(
                f"{_WHERE}: give step either batch= or data_iterator=, and not both or neither."
            )
        args = {"params": params, "state": state, "rng": rng, "batch": batch}
        args |= {"func_state": func_state, "given": given}
        self._programs.check(args)
        results = ("params", "state", "func_state", None)
        if is_inside:
            args["batch"] = self._processed(batch)
            step = self.finalize(params, rng, args["batch"], func_state).checked_for(state).step
            return self._returned(self._programs.inside(step, args, results))
        count = self.verify_args_and_get_step_counter(
            self._counter(state), *given, global_step_int=global_step_int
        )
        batches = itertools.repeat(batch) if data_iterator is None else iter(data_iterator)
        if count == 0 and self.num_burnin_steps:
            num_steps = self.num_burnin_steps
            args["state"], _ = self.burnin(num_steps, params, state, rng, batches, func_state)
        try:
            args["batch"] = self._processed(next(batches))
        except StopIteration:
            raise NoMoreBatches(f"{_WHERE}: data_iterator has no more batches.") from None
        self.finalize(params, rng, args["batch"], func_state).checked_for(state)
        replaced = ("params", "state", "func_state")
        name, algorithm = self._within_budget(args, replaced, self._axis)
        found = self._programs.run(name, algorithm.alone, args, replaced, results)
        self.__dict__["_counted"] = (found[1].step_counter, count + 1)
        return self._returned(found)

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
    ) -> tuple[Any, ...]:
        """Some steps, with a progress bar. Ctrl-C ends it after the step that is being done.

        Arguments:
            params: the parameters.
            state: the state of the optimizer.
            rng: a random key.
            data_iterator: batches. If there are too few, it ends early, with a warning.
            num_steps: how many steps.
            callback: called after each step as `callback(params, state, stats)`. What it is given
                lives until the next step only. It ends the training by returning something true. If
                it raises an error, that has what was reached as its attribute `reached`.
            progress: whether to show a bar with the loss, the damping and the time of a step.
            func_state: the state of the function, if it has one.
            learning_rate: as in `step`, for all steps.
            momentum: as in `step`.
            damping: as in `step`.

        Returns:
            As `step`, after the last one; statistics are empty if there was none.
        """
        values = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
        step = lambda *args, **named: self.step(*args, **named, **values)
        has_state = self._given["value_func_has_state"]
        carried = (params, state, func_state)
        return fit(step, carried, rng, data_iterator, num_steps, callback, progress, has_state)

    def _processed(self, batch: PyTree) -> PyTree:
        process = self._given["batch_process_func"]
        return batch if process is None else process(batch)

    def _counter(self, state: OptimizerState) -> Any:
        """The number of steps of a state, without waiting for it if the last step returned it."""
        array, count = self._counted
        return count if state.step_counter is array else state.step_counter

    def _returned(self, found: tuple[PyTree, OptimizerState, PyTree, Any]) -> tuple[Any, ...]:
        params, state, func_state, stats = found
        has_state = self._given["value_func_has_state"]
        return (params, state, func_state, stats) if has_state else (params, state, stats)
