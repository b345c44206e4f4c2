"""`Optimizer`: K-FAC, as an object that compiles the pure step and looks after its arguments."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from curvax import _jax
from curvax._types import Array, Fun, PyTree
from curvax.curvature.batch_size import default_batch_size_extractor
from curvax.curvature.block_diagonal import BlockDiagonalCurvature
from curvax.curvature.sharded import (
    ShardedCurvature,
    split_state,
    state_specs,
    whole_state,
)
from curvax.devices.placement import to_host
from curvax.memory.budget import parse_memory
from curvax.optimizer.config import Settings, algorithm_of, settings_of
from curvax.optimizer.devices import DataParallel, axis_of, without_places
from curvax.optimizer.fit import Callback, NoMoreBatches, fit
from curvax.optimizer.hyperparameters import Given, Schedule
from curvax.optimizer.programs import Programs, Sizes, check_alive, is_traced, sizes_within
from curvax.optimizer.state import OptimizerState, number_type
from curvax.optimizer.step import Algorithm, burnin_key

__all__ = ["Facade", "Optimizer", "Quantities"]


# What is around the algorithm: the user's arguments as attributes, the trace, what is compiled.


class Facade:
    """Holds the arguments of a constructor, and makes the algorithm when it can be made.

    The arguments are attributes. They may be set until the function was traced, and afterwards if
    the user said so; then everything is made anew.
    """

    _where: str
    _settings: Settings
    _programs: Programs
    _given: dict[str, Any]
    _made: Algorithm | None
    _fitting: dict[Any, tuple[str, Algorithm]]

    def __init__(self, given: Mapping[str, Any], where: str) -> None:
        self.__dict__["_where"] = where
        self._set_up(dict(given))

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("_given", {})
        if name not in given:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return given[name]

    def __setattr__(self, name: str, value: Any) -> None:
        given = self.__dict__.get("_given")
        if given is None:  # A class that extends this one, before it calls `__init__`.
            object.__setattr__(self, name, value)
            return
        is_forbidden = given["forbid_setting_attributes_after_finalize"]
        exceptions = given["modifiable_attribute_exceptions"]
        if self._made is not None and is_forbidden and name not in exceptions:
            raise AttributeError(
                f"{self._where}: {name} cannot be set any more, because the optimizer was used "
                f"already. Make another one; or name it in modifiable_attribute_exceptions, or say "
                f"forbid_setting_attributes_after_finalize=False."
            )
        if name in given:
            self._set_up({**given, name: value})
        else:
            object.__setattr__(self, name, value)

    @property
    def _algorithm(self) -> Algorithm:
        """The algorithm of a function that was traced already."""
        if self._made is None:
            raise ValueError(
                f"{self._where}: what the function consists of is not known before it was traced. "
                f"Call init or step first."
            )
        return self._made

    def finalize(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> Algorithm:
        """Trace the function, if that was not done yet; `init` and `step` do it by themselves.

        Arguments:
            params: the parameters.
            rng: a random key.
            batch: a batch.
            func_state: the state of the function, if it has one.

        Returns:
            The algorithm: the pure functions that `init` and `step` compile.
        """
        if self._made is not None:
            return self._made
        return self._for_args(self._settings.function.arguments(params, func_state, rng, batch))

    def _for_args(self, func_args: Sequence[PyTree]) -> Algorithm:
        """As `finalize`."""
        if self._made is None:
            axis = self._axis
            if axis is not None and not _jax.is_bound(axis):
                func_args = without_places(func_args)
            made = algorithm_of(self._given, self._settings, func_args, axis)
            self.__dict__["_made"] = made
        return self._algorithm

    def _within_budget(
        self, args: Mapping[str, Any], replaced: Sequence[str], axis: str | None
    ) -> tuple[str, Algorithm]:
        """The name of the program of a step, and the algorithm it is of.

        With a memory budget, on one device, of one whose microbatches are so small that the whole
        step fits.
        """
        made, given = self._algorithm, self._given
        if given["memory_budget"] is None or given["debug"] or axis is not None:
            return "step", made
        leaves, structure = jax.tree.flatten(args)
        key = structure, _jax.call_key(leaves)
        if key not in self._fitting:
            self._fitting[key] = self._fit(len(self._fitting), args, replaced)
        return self._fitting[key]

    def _fit(
        self, number: int, args: Mapping[str, Any], replaced: Sequence[str]
    ) -> tuple[str, Algorithm]:
        names = ("params", "func_state", "rng", "batch")
        func_args = self._settings.function.arguments(*(args[name] for name in names))
        tried: dict[Any, tuple[str, Algorithm]] = {}

        def needs(sizes: Sizes) -> int:
            given = {**self._given, **sizes}
            algorithm = algorithm_of(given, settings_of(given), func_args, None)
            name = f"step {number}.{len(tried)}"
            tried[tuple(sizes.values())] = name, algorithm
            return self._programs.usage(name, algorithm.alone, args, replaced).added_bytes

        budget = parse_memory(self._given["memory_budget"])
        # The gradient is there while all else is computed; old states are if they are not donated.
        kept = args["params"], () if self._given["donate_buffers"] else args["state"]
        left = budget - sum(jnp.asarray(x).nbytes for x in jax.tree.leaves(kept))
        found = tuple(sizes_within(budget, left, needs, self._where).values())
        for sizes, (name, _) in tried.items():
            if sizes != found:
                self._programs.forget(name)
        name, algorithm = tried[found]
        self.__dict__["_made"] = algorithm
        return name, algorithm

    def _like_state(self, init: Callable[..., Any], args: Mapping[str, Any]) -> OptimizerState:
        """How a new state is placed: what is like the parameters as these, and rows are split."""
        like = OptimizerState.like_params("params")
        if not self._given["shard_state"] or self._axis is None:
            return like
        made = jax.eval_shape(init, *args.values()).estimator_state
        return replace(like, estimator_state=state_specs(made, self._axis))

    @property
    def _axis(self) -> str | None:
        """The name of the axis of devices, if there is one."""
        given = self._given
        has_axis = (given["multi_device"] or given["mesh"] is not None) and not given["debug"]
        return axis_of(given["mesh"], given["pmap_axis_name"]) if has_axis else None

    def _check_given(self, given: Given) -> None:
        """What a call gives for learning rate, momentum and damping, if it shall give anything."""
        rules = self._settings.rules
        for rule, value in zip(
            (rules.learning_rate, rules.momentum, rules.damping), given, strict=True
        ):
            rule.check(value)

    def _set_up(self, given: dict[str, Any]) -> None:
        settings = settings_of(given)
        self.__dict__.update(_given=given, _settings=settings, _made=None)
        is_compiled, is_donating = not given["debug"], given["donate_buffers"]
        devices = None if self._axis is None else DataParallel(given["mesh"], self._axis)
        has_budget = given["memory_budget"] is not None
        self.__dict__["_programs"] = Programs(is_compiled, is_donating, devices, has_budget)
        self.__dict__["_fitting"] = {}


# What the optimizer tells beside steps: properties, checks, losses and quadratic models.


class Quantities(Facade):
    """The part of `Optimizer` that changes nothing."""

    @property
    def num_burnin_steps(self) -> int:
        """How often the curvature is updated before the first step."""
        return self._given["num_burnin_steps"]

    @property
    def l2_reg(self) -> Array:
        """The weight of the regulariser in the curvature."""
        return jnp.asarray(self._given["l2_reg"], float)

    @property
    def estimator(self) -> BlockDiagonalCurvature:
        """The curvature estimator, once the optimizer was used."""
        return self._algorithm.preconditioner.estimator

    @property
    def damping_decay_factor(self) -> Any:
        """By how much an adaptive damping falls or rises at once."""
        return self._settings.adaptation.factor

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
            step_counter: the number of steps so far, by the state.
            learning_rate: as in `step`.
            momentum: as in `step`.
            damping: as in `step`.
            global_step_int: as in `step`.

        Returns:
            The number of steps so far.

        Raises:
            ValueError: if a value is missing, or is given although the constructor says how it is
                chosen; or if `global_step_int` is another number than that of the state.
        """
        self._check_given(Given(learning_rate, momentum, damping))
        count = int(step_counter)
        if global_step_int is not None and global_step_int != count:
            raise ValueError(
                f"{self._where}: global_step_int={global_step_int}, but the state is that of step "
                f"{count} (state.step_counter). Pass the state that belongs to it, or leave "
                f"global_step_int out."
            )
        return count

    def should_update_damping(self, state: OptimizerState) -> Array:
        """Whether the next step adapts the damping (if that is adaptive)."""
        return jnp.asarray(self._settings.adaptation.is_due(state.step_counter))

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        """A state that is split among devices (`shard_state=True`), as one that is not.

        It is on the host, as arrays of NumPy's: to be saved, to go on without `shard_state`, or, by
        `split_state`, with another number of devices. Of several processes all must call it.

        Arguments:
            state: a state for the same function, split among any number of devices, or whole.

        Returns:
            The whole state.

        Raises:
            ValueError: if the optimizer was not used yet, or if the state is that of another model.
        """
        self._check_movable(state)
        host = jax.tree.map(to_host, state)
        return replace(host, estimator_state=whole_state(self.estimator, host.estimator_state))

    def split_state(self, state: OptimizerState) -> OptimizerState:
        """A state as this optimizer (with `shard_state=True`) splits it among its devices.

        It is on the host, as what `whole_state` returns; `step` gives each device its share.

        Arguments:
            state: a state for the same function, split among any number of devices, or whole.

        Returns:
            The state for as many devices as the optimizer has.

        Raises:
            ValueError: as `whole_state`; if the optimizer has no `shard_state`, or computes other
                inverses than the state has (`use_exact_inverses`).
        """
        estimator = self.estimator
        if not isinstance(estimator, ShardedCurvature):
            raise ValueError(
                f"{self._where}: split_state is for shard_state=True, but this optimizer goes on "
                f"with a whole state: state = optimizer.whole_state(state)."
            )
        whole = self.whole_state(state)
        cached = self._algorithm.preconditioner.cached
        split = split_state(estimator, whole.estimator_state, *cached)
        return replace(whole, estimator_state=split)

    def compute_loss_value(self, func_args: Sequence[PyTree]) -> Array:
        """The loss, for arguments of `value_and_grad_func`."""
        loss = lambda algorithm: lambda *func_args: algorithm.loss(func_args)
        return self._computed("loss", loss, self._named(func_args), func_args)

    def compute_l2_quad_matrix(self, vectors: Sequence[PyTree]) -> Array:
        """The matrix of `vᵢᵀ L2 vⱼ`, where L2 is the curvature of the regulariser.

        Arguments:
            vectors: pytrees like the parameters.

        Returns:
            A matrix: `l2_reg` times the inner products of the vectors, over all parameters that
            have the regulariser.
        """
        return self._settings.l2.matrix(vectors)

    def compute_exact_quad_model(
        self,
        vectors: Sequence[PyTree],
        grads: PyTree,
        func_args: Sequence[PyTree] | None = None,
    ) -> tuple[Array, Array, Array]:
        """The quadratic model of the loss with its exact curvature C, in the span of vectors.

        Arguments:
            vectors: pytrees like the parameters.
            grads: the gradient of the loss.
            func_args: the arguments of `value_and_grad_func`.

        Returns:
            The matrices of `vᵢᵀ (C + L2) vⱼ` and `vᵢᵀ vⱼ`, and the vector of `vᵢᵀ grads`.

        Raises:
            ValueError: if there are no `func_args`.
        """
        if func_args is None:
            raise ValueError(
                f"{self._where}: compute_exact_quad_model needs func_args, the arguments of "
                f"value_and_grad_func: the exact curvature depends on them."
            )

        def model(algorithm: Algorithm) -> Callable[..., Any]:
            return lambda vectors, grads, *args: tuple(algorithm.exact_model(vectors, grads, args))

        args = {"vectors": list(vectors), "grads": grads, **self._named(func_args)}
        return self._computed("exact model", model, args, func_args)

    def compute_approx_quad_model(
        self, state: OptimizerState, vectors: Sequence[PyTree], grads: PyTree
    ) -> tuple[Array, Array, Array]:
        """As `compute_exact_quad_model`, with the estimate of the curvature in a state."""
        model = lambda algorithm: lambda *args: tuple(algorithm.approx_model(*args))
        args = {"state": state, "vectors": list(vectors), "grads": grads}
        return self._computed("approximate model", model, args)

    def _check_movable(self, state: OptimizerState) -> None:
        check_alive(state)
        if is_traced(state):
            raise ValueError(
                f"{self._where}: whole_state and split_state move arrays to the host. Call them "
                f"outside of functions that are traced."
            )

    def _named(self, func_args: Sequence[PyTree]) -> dict[str, PyTree]:
        """Arguments of the function by name."""
        return dict(zip(self._settings.function.names, func_args, strict=True))

    def _computed(
        self,
        name: str,
        of: Callable[[Algorithm], Callable[..., Any]],
        args: Mapping[str, Any],
        func_args: Sequence[PyTree] | None = None,
    ) -> Any:
        """A function of the algorithm's, on several devices if there are."""
        algorithm = self._algorithm if func_args is None else self._for_args(func_args)
        if algorithm.axis is None:
            return of(algorithm)(*args.values())
        if is_traced(args):
            return self._programs.inside(of(algorithm), args)
        return self._programs.run(name, of(algorithm), args)


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
