"""K-FAC as pure functions of a configuration: the initial state, burn-in, and one step.

The method is that of Martens & Grosse (2015), "Optimizing neural networks with Kronecker-factored
approximate curvature". With the gradient g and the estimated curvature C, the preconditioned
gradient is `p = (C + damping + L2)⁻¹ g`. The update is `w₁ p + w₂ v`, where v is the last update.
The coefficients are minus the learning rate, and the momentum; adaptive ones minimise a quadratic
model of the loss with the exact curvature (section 7 of the paper). How well such a model predicts
the loss determines an adaptive damping (section 6.5).

A step with a non-finite loss, gradient or update is skipped: only counters change, the damping
increases, and the next step updates curvature and inverses whatever their periods.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from curvax import _jax
from curvax._cpu import all_finite, run_if
from curvax._types import Array, Fun, PyTree
from curvax.curvature.implicit import ImplicitExactCurvature
from curvax.optimizer.config import (
    Adaptive,
    Hyperparameter,
    KFACConfig,
    Number,
    Schedule,
)
from curvax.optimizer.damping import (
    adapted,
    calibrated,
    is_damping_due,
    next_damping,
    next_factor,
)
from curvax.optimizer.preconditioner import Preconditioner, l2_matrix
from curvax.optimizer.quadratic_model import QuadraticModel
from curvax.optimizer.state import (
    OptimizerState,
    Stats,
    inner,
    inner_products,
    linear_combination,
    norm,
    norms,
    scalar_dtype,
    select,
)
from curvax.optimizer.value_function import Evaluation, ValueFunction


class Hyperparameters(NamedTuple):
    """The values of a step; None for those that the quadratic model chooses.

    Attributes:
        learning_rate: The learning rate.
        momentum: The momentum.
        damping: The damping of the quadratic model.
        precon_damping: The damping of the preconditioner.
    """

    learning_rate: Array | None
    momentum: Array | None
    damping: Array
    precon_damping: Array


class ProposedUpdate(NamedTuple):
    """An update of the parameters: a linear combination of the direction and the last update.

    Attributes:
        update: The linear combination.
        vectors: The direction, which is the preconditioned gradient, and the last update.
        coefficients: Their coefficients: minus the learning rate, and the momentum.
        scaled_norm: The squared learning rate times the inner product of gradient and direction.
        model: The quadratic model that chose the coefficients, if one did.
    """

    update: PyTree
    vectors: tuple[PyTree, PyTree]
    coefficients: Sequence[Array]
    scaled_norm: Array
    model: QuadraticModel | None

    @property
    def has_finite_direction(self) -> Array:
        """Whether direction and coefficients are finite. Overflow gives a false negative.

        The norm is a sum over products of elements of gradient and direction, so it is not finite
        if any of them is not.
        """
        return jnp.all(jnp.isfinite(jnp.stack([self.scaled_norm, *self.coefficients])))


class Outcome(NamedTuple):
    """The effect of a proposed update; NaN in steps that do not need it.

    Attributes:
        new_loss: The loss after the update.
        quad_model_change: The change of the loss that the quadratic model predicts.
        rho: The ratio of the change of the loss to the predicted one.
        has_new_loss: Whether the step needs the loss after the update.
        has_change: Whether the step needs the predicted change.
    """

    new_loss: Array
    quad_model_change: Array
    rho: Array
    has_new_loss: Array | bool
    has_change: Array | bool


class Verdict(NamedTuple):
    """The decision about a proposed update; one that is neither taken nor rejected is skipped."""

    is_taken: Array
    is_rejected: Array
    resets_velocities: Array


class Statistics(NamedTuple):
    """The optional statistics that a step returns, and the value of those it does not compute."""

    norms: bool = False
    per_param_norms: bool = False
    registered_loss: bool = False
    invalid_value: Number | None = None


@dataclass(frozen=True)
class KFAC:
    """The optimizer of one function, as pure functions of parameters, state and batch.

    Attributes:
        config: The options.
        function: The user-supplied function, called with its arguments as one sequence.
        preconditioner: The curvature estimate and its inverse.
        statistics: The optional statistics to return.
    """

    config: KFACConfig
    function: ValueFunction
    preconditioner: Preconditioner
    statistics: Statistics

    @classmethod
    def for_function(
        cls,
        config: KFACConfig,
        function: ValueFunction,
        func_args: Sequence[PyTree],
        *,
        func_for_estimator: Fun | None = None,
        axis: str | None = None,
        num_shards: int | None = None,
        statistics: Statistics | None = None,
    ) -> "KFAC":
        """Trace a function with these arguments, the last of which is the batch."""
        func = function.for_estimator(func_for_estimator, func_args)

        def func_and_grad(*args: PyTree) -> tuple[Array, PyTree]:
            evaluation = function(args)
            return evaluation.loss, evaluation.gradient

        preconditioner = Preconditioner.for_function(
            config, func, func_args, axis, num_shards, func_and_grad
        )
        return cls(config, function, preconditioner, statistics or Statistics())

    @property
    def axis(self) -> str | None:
        """The name of the mesh axis along which batches are sharded; None on one device."""
        return self.preconditioner.axis

    @property
    def burnin_decay(self) -> Number:
        """The decay of the moving average of the curvature at each update of burn-in."""
        return self.config.curvature_ema

    @functools.cached_property
    def exact(self) -> ImplicitExactCurvature:
        """Products with the exact curvature."""
        estimator, config = self.preconditioner.estimator, self.config
        index = estimator.batch_argument
        return ImplicitExactCurvature(
            estimator.func, 0, config.batch_size_extractor, batch_index=index, **config.sizes
        )

    # Functions of parameters, random key, batch and state of the function.

    def init(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> OptimizerState:
        """Return the state before the first step."""
        rng, func_rng = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, func_rng, batch)
        return self.initial_state(func_args, rng)

    def burnin(
        self, params: PyTree, state: OptimizerState, rng: Array, batch: PyTree, func_state: PyTree
    ) -> OptimizerState:
        """Update the curvature with one batch, and nothing else."""
        rng, func_rng = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, self._device_key(func_rng), batch)
        return self.update_curvature(state, func_args, rng)

    def step(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        batch: PyTree,
        func_state: PyTree = None,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
    ) -> tuple[PyTree, OptimizerState, PyTree, Stats]:
        """Return parameters, state and state of the function after a step, and its statistics."""
        params, state = jax.tree.map(jnp.asarray, (params, state))
        rng, func_rng = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, self._device_key(func_rng), batch)
        evaluation = self._evaluate(func_args)
        hyperparameters = self.hyperparameters(state, learning_rate, momentum, damping)
        update, after, stats = self.update(state, evaluation, func_args, rng, hyperparameters)
        new_params = linear_combination([jnp.ones((), scalar_dtype(params))] * 2, [params, update])
        is_used = after.skipped == state.skipped
        return new_params, after, select(is_used, evaluation.func_state, func_state), stats

    def step_with_burnin(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        batch: PyTree,
        func_state: PyTree = None,
        *hyperparameters: ArrayLike | None,
    ) -> tuple[PyTree, OptimizerState, PyTree, Stats]:
        """Equal to `step`, except that the first step is preceded by burn-in on its batch."""
        params, state = jax.tree.map(jnp.asarray, (params, state))
        burnin = lambda state, key: self.burnin(params, state, key, batch, func_state)
        state = self.burn_in(burnin, state, rng)
        if self.config.use_initial_damping_calibration:
            args = rng, batch, func_state, *hyperparameters
            calibrate = lambda state: self.calibrate(params, state, *args)
            state = run_if(state.step_counter == 0, calibrate, state)
        return self.step(params, state, rng, batch, func_state, *hyperparameters)

    def calibrate(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        batch: PyTree,
        func_state: PyTree = None,
        *hyperparameters: ArrayLike | None,
    ) -> OptimizerState:
        """Return the state with an adaptive damping that a step with these arguments would keep."""
        rng, func_rng = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, self._device_key(func_rng), batch)
        evaluation = self._evaluate(func_args)
        return self.with_calibrated_damping(state, evaluation, func_args, rng, *hyperparameters)

    # Functions of the arguments of the user-supplied function, as one sequence.

    def initial_state(self, func_args: Sequence[PyTree], rng: Array) -> OptimizerState:
        """Return the state before the first step."""
        params, config = func_args[0], self.config
        dtype, is_adaptive = scalar_dtype(params), config.use_adaptive_damping
        return OptimizerState(
            velocities=jax.tree.map(lambda x: jnp.zeros_like(jnp.asarray(x)), params),
            estimator_state=self.preconditioner.init(rng, func_args),
            damping=jnp.asarray(config.initial_damping, dtype) if is_adaptive else None,
            data_seen=jnp.zeros((), int),
            step_counter=jnp.zeros((), jnp.int32),
            damping_factor=jnp.ones((), dtype),
        )

    def update_curvature(
        self, state: OptimizerState, func_args: Sequence[PyTree], rng: Array
    ) -> OptimizerState:
        """Update the curvature with one batch, and nothing else."""
        estimate = self.preconditioner.update_curvature(
            state.estimator_state, func_args, rng, decay=self.burnin_decay
        )
        return replace(state, estimator_state=estimate)

    def burn_in(
        self,
        burnin: Callable[[OptimizerState, Array], OptimizerState],
        state: OptimizerState,
        rng: Array,
    ) -> OptimizerState:
        """Apply `burnin(state, key)` `num_burnin_steps` times if this is the first step."""
        if not self.config.num_burnin_steps:
            return state
        count = jnp.where(state.step_counter == 0, self.config.num_burnin_steps, 0)
        body = lambda k, state: burnin(state, burnin_key(rng, k))
        return lax.fori_loop(0, count, body, state)

    def hyperparameters(
        self,
        state: OptimizerState,
        learning_rate: ArrayLike | None = None,
        momentum: ArrayLike | None = None,
        damping: ArrayLike | None = None,
    ) -> Hyperparameters:
        """Return the values of a step, from those that it was given, schedules and the state."""
        dtype = state.damping_factor.dtype

        def value(hyperparameter: Hyperparameter, given: ArrayLike | None) -> Array | None:
            if isinstance(hyperparameter, Adaptive):
                return None
            found = given if hyperparameter is None else scheduled(hyperparameter, state)
            return jnp.asarray(found, dtype)

        config = self.config
        base = value(config.damping, damping)
        total = jnp.asarray(state.damping) if base is None else base * state.damping_factor
        return Hyperparameters(
            value(config.learning_rate, learning_rate),
            value(config.momentum, momentum),
            total,
            self._precon_damping(state, total),
        )

    def _precon_damping(self, state: OptimizerState, damping: Array) -> Array:
        """Return the damping of the preconditioner: scheduled, or a multiple of the damping."""
        config = self.config
        if config.precon_damping_schedule is not None:
            return jnp.asarray(scheduled(config.precon_damping_schedule, state), damping.dtype)
        if isinstance(config.precon_damping_mult, float | int) and config.precon_damping_mult == 1:
            return damping
        return damping * jnp.asarray(config.precon_damping_mult, damping.dtype)

    def update(
        self,
        state: OptimizerState,
        evaluation: Evaluation,
        func_args: Sequence[PyTree],
        rng: Array,
        hyperparameters: Hyperparameters,
    ) -> tuple[PyTree, OptimizerState, Stats]:
        """Return the update of the parameters, the state after it, and statistics.

        The update is zero if it is not taken.
        """
        count, is_stale, damping = state.step_counter, state.is_stale, hyperparameters.damping
        precon_damping = hyperparameters.precon_damping
        is_finite_batch = jnp.isfinite(evaluation.loss) & all_finite(evaluation.gradient)
        curvature = self.preconditioner.update_curvature_if_due(
            state.estimator_state, count, is_stale, func_args, rng, is_finite_batch, precon_damping
        )
        curvature = self.preconditioner.update_inverses_if_due(
            curvature, count, is_stale, precon_damping
        )
        state = replace(state, estimator_state=curvature)
        proposed = self._propose(state, evaluation.gradient, hyperparameters, func_args)
        is_due = self.config.use_adaptive_damping and is_damping_due(self.config, count)
        outcome = self._outcome(state, evaluation, proposed, damping, func_args, is_due)
        verdict = self._verdict(is_finite_batch, evaluation.loss, proposed, outcome)
        total = self._total(self.config.batch_size_extractor(func_args[-1]), state.data_seen.dtype)
        after = self._state_after(state, proposed.update, verdict, evaluation.loss, outcome, total)
        stats = self._stats(evaluation, proposed, damping, outcome, after, func_args, total)
        if precon_damping is not damping:
            stats["precon_damping"] = precon_damping
        # If the update is taken it equals the new velocities, so both share one computation.
        zeros = jax.tree.map(jnp.zeros_like, proposed.update)
        return select(verdict.is_taken, after.velocities, zeros), after, stats

    def with_calibrated_damping(
        self,
        state: OptimizerState,
        evaluation: Evaluation,
        func_args: Sequence[PyTree],
        rng: Array,
        *given: ArrayLike | None,
    ) -> OptimizerState:
        """Return the state with an adaptive damping that this step would keep if it were due."""
        loss = evaluation.loss
        estimate = self.preconditioner.update_curvature(state.estimator_state, func_args, rng)

        def next_value(damping: Array) -> Array:
            hyperparameters = self.hyperparameters(replace(state, damping=damping), *given)
            inverses = self.preconditioner.update_inverses(estimate, hyperparameters.precon_damping)
            trial = replace(state, estimator_state=inverses)
            proposed = self._propose(trial, evaluation.gradient, hyperparameters, func_args)
            outcome = self._outcome(trial, evaluation, proposed, damping, func_args, True)
            new_loss, change = outcome.new_loss, outcome.quad_model_change
            return adapted(self.config, damping, loss.astype(new_loss.dtype), new_loss, change)

        return replace(state, damping=calibrated(next_value, jnp.asarray(state.damping)))

    @jax.named_scope("loss_after_update")
    def loss(self, func_args: Sequence[PyTree]) -> Array:
        """Return the loss; the compiler eliminates the gradient as dead code."""
        return self._mean(self.function(func_args).loss)

    @jax.named_scope("quadratic_model")
    def exact_model(
        self, vectors: Sequence[PyTree], gradient: PyTree, func_args: Sequence[PyTree]
    ) -> QuadraticModel:
        """Return the model with the exact curvature.

        With a factor B of the curvature, `C = B Bᵀ`, its matrix has the elements `(Bᵀ vᵢ)ᵀ Bᵀ vⱼ`.
        """
        matrix = self.config.exact_quad_model_matrix_type
        if (matrix or self.preconditioner.estimator.default_mat_type) == "fisher":
            factor = self.exact.multiply_fisher_factor_transpose
        else:
            factor = self.exact.multiply_ggn_factor_transpose
        products = [factor(func_args, v) for v in vectors]
        curvature = self._mean(inner_products(products, products)).astype(scalar_dtype(gradient))
        return _model(curvature + l2_matrix(self.config, vectors), vectors, gradient)

    @jax.named_scope("quadratic_model")
    def approx_model(
        self, state: OptimizerState, vectors: Sequence[PyTree], gradient: PyTree
    ) -> QuadraticModel:
        """Return the model with the estimated curvature."""
        multiply = self.preconditioner.multiply
        products = [multiply(state.estimator_state, v) for v in vectors]
        return _model(inner_products(vectors, products), vectors, gradient)

    @jax.named_scope("value_and_grad")
    def _evaluate(self, func_args: Sequence[PyTree]) -> Evaluation:
        """Evaluate the function, averaged over all devices.

        Under `shard_map`, a gradient with respect to replicated arrays is summed over devices. So
        parameters are made to vary over them, and each device computes the gradient of its shard.
        """
        params, *rest = func_args
        leaves = jax.tree.leaves(rest)
        varying = jax.tree.map(lambda x: _jax.varying_like(jnp.asarray(x), *leaves), params)
        local = self.function((varying, *rest))
        if self.axis is None:
            return local
        func_state, aux = self._reduced_state_and_aux(local, (varying, *rest))
        return Evaluation(self._mean(local.loss), func_state, aux, self._mean(local.gradient))

    def _reduced_state_and_aux(
        self, local: Evaluation, func_args: Sequence[PyTree]
    ) -> tuple[PyTree, PyTree]:
        """Return the state of the function and `aux`, reduced over devices."""
        aux = jax.tree.map(jnp.asarray, local.aux)
        rows = self.function.rows_of_aux(func_args, aux)
        func_state = jax.tree.map(self._mean_if_real, local.func_state)
        return func_state, jax.tree.map(self._reduce_aux, aux, rows)

    def _reduce_aux(self, x: Array, has_rows: bool) -> Array:
        """Reduce a leaf of `aux` over devices by the rule for microbatches."""
        if has_rows:
            return lax.all_gather(x, self.axis, tiled=True)
        is_real = jnp.issubdtype(x.dtype, jnp.inexact)
        return self._mean(x) if is_real else lax.psum(x, self.axis)

    def _mean_if_real(self, x: ArrayLike) -> ArrayLike:
        return self._mean(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x

    def _mean(self, x: PyTree) -> PyTree:
        """Return the mean over devices."""
        return x if self.axis is None else lax.pmean(x, self.axis)

    def _total(self, batch_size: ArrayLike, dtype: np.dtype) -> Array:
        """Return the sum of the batch sizes of all devices."""
        size = jnp.asarray(batch_size).astype(dtype)
        return size if self.axis is None else lax.psum(size, self.axis)

    def _device_key(self, rng: Array) -> Array:
        """Return a random key that differs between devices."""
        return rng if self.axis is None else jax.random.fold_in(rng, lax.axis_index(self.axis))

    def _propose(
        self,
        state: OptimizerState,
        gradient: PyTree,
        hyperparameters: Hyperparameters,
        func_args: Sequence[PyTree],
    ) -> ProposedUpdate:
        """Return the update, from the preconditioned gradient and the last update."""
        rate, momentum, damping, precon_damping = hyperparameters
        dtype = damping.dtype
        direction = self.preconditioner.apply(state.estimator_state, gradient, precon_damping)
        squared = inner(gradient, direction).astype(dtype)
        if self.config.norm_constraint is not None and rate is not None:
            limit = jnp.asarray(self.config.norm_constraint, dtype)
            scale = jnp.sqrt(limit / jnp.maximum(limit, rate**2 * squared))
            direction = linear_combination([scale], [direction])
        vectors = (direction, state.velocities)
        model = None
        if rate is None or momentum is None:
            model = self.exact_model(vectors, gradient, func_args)
            fixed = (None if rate is None else -rate, momentum)
            coefficients: Sequence[Array] = model.minimiser(damping, fixed)
        else:
            coefficients = (-rate, momentum)
        update = linear_combination(coefficients, vectors)
        return ProposedUpdate(update, vectors, coefficients, coefficients[0] ** 2 * squared, model)

    def _outcome(
        self,
        state: OptimizerState,
        evaluation: Evaluation,
        proposed: ProposedUpdate,
        damping: Array,
        func_args: Sequence[PyTree],
        is_due: Array | bool,
    ) -> Outcome:
        """Return the effect of an update, as far as this step needs it.

        `is_due` says whether the step adapts the damping.
        """
        config, dtype = self.config, damping.dtype
        unknown = jnp.full((), jnp.nan, dtype)
        is_adaptive = config.use_adaptive_damping
        change, has_change = unknown, proposed.model is not None or is_due
        if proposed.model is not None:
            change = self._predicted_change(proposed.model, proposed, damping)
        elif is_adaptive:

            def predict(_: None) -> Array:
                if config.always_use_exact_qmodel_for_damping_adjustment:
                    model = self.exact_model(proposed.vectors, evaluation.gradient, func_args)
                else:
                    model = self.approx_model(state, proposed.vectors, evaluation.gradient)
                return self._predicted_change(model, proposed, damping)

            change = lax.cond(is_due, predict, lambda _: unknown, None)
        new_loss, has_new_loss = unknown, config.use_step_rejection or is_due
        if config.needs_loss:

            def loss_after(_: None) -> Array:
                params, *rest = func_args
                params = linear_combination([jnp.ones((), dtype)] * 2, [params, proposed.update])
                return self.loss((params, *rest)).astype(dtype)

            new_loss = lax.cond(has_new_loss, loss_after, lambda _: unknown, None)
        rho = (new_loss - evaluation.loss.astype(dtype)) / change
        return Outcome(new_loss, change, rho, has_new_loss, has_change)

    def _predicted_change(
        self, model: QuadraticModel, proposed: ProposedUpdate, damping: Array
    ) -> Array:
        included = damping if self.config.include_damping_in_quad_change else 0.0
        return model.change(proposed.coefficients, included)

    def _verdict(
        self, is_finite_batch: Array, loss: Array, proposed: ProposedUpdate, outcome: Outcome
    ) -> Verdict:
        """Decide whether an update is taken, rejected or skipped."""
        is_finite = is_finite_batch & proposed.has_finite_direction
        # The last update may be non-finite in a restored state, and the sum may overflow.
        is_taken = is_finite & all_finite(proposed.update)
        is_rejected = jnp.zeros((), bool)
        if self.config.use_step_rejection:
            is_taken &= outcome.new_loss <= loss
            is_rejected = is_finite & ~is_taken
        # If the batch is finite the last update may be at fault, which damping cannot mend.
        return Verdict(is_taken, is_rejected, is_finite_batch & ~is_taken)

    def _state_after(
        self,
        state: OptimizerState,
        update: PyTree,
        verdict: Verdict,
        loss: Array,
        outcome: Outcome,
        batch_size: Array,
    ) -> OptimizerState:
        """Return the state after a step: velocities, damping and counters."""
        config = self.config
        is_taken, is_rejected, resets_velocities = verdict
        zeros = jax.tree.map(jnp.zeros_like, update)
        kept = select(resets_velocities, zeros, state.velocities)
        velocities = select(is_taken, update, kept)
        damping, damping_factor = state.damping, state.damping_factor
        if damping is None:
            damping_factor = next_factor(config, damping_factor, is_taken)
        else:
            new_loss, change = outcome.new_loss, outcome.quad_model_change
            damping = next_damping(
                config, damping, state.step_counter, is_taken, loss, new_loss, change
            )
        seen = state.data_seen + batch_size
        one = jnp.ones((), jnp.int32)
        return replace(
            state,
            velocities=velocities,
            damping=damping,
            data_seen=jnp.where(seen < state.data_seen, state.data_seen, seen),
            step_counter=state.step_counter + one,
            damping_factor=damping_factor,
            skipped=state.skipped + jnp.where(is_taken | is_rejected, 0, one),
            rejected=state.rejected + jnp.where(is_rejected, one, 0),
            is_stale=~is_taken,
        )

    def _stats(
        self,
        evaluation: Evaluation,
        proposed: ProposedUpdate,
        damping: Array,
        outcome: Outcome,
        after: OptimizerState,
        func_args: Sequence[PyTree],
        batch_size: Array,
    ) -> Stats:
        invalid_value = self.statistics.invalid_value
        invalid = jnp.asarray(jnp.nan if invalid_value is None else invalid_value, damping.dtype)
        has_loss, has_change = outcome.has_new_loss, outcome.has_change
        stats: Stats = {
            "step": after.step_counter - 1,
            "batch_size": batch_size,
            "data_seen": after.data_seen,
            "loss": evaluation.loss,
            "learning_rate": -proposed.coefficients[0],
            "momentum": proposed.coefficients[1],
            "damping": damping,
            "rho": jnp.where(has_loss & has_change, outcome.rho, invalid),
            "new_loss": jnp.where(has_loss, outcome.new_loss, invalid),
            "quad_model_change": jnp.where(has_change, outcome.quad_model_change, invalid),
            "scaled_grad_norm_sq": proposed.scaled_norm,
            "skipped": after.skipped,
        }
        if self.function.has_aux:
            stats["aux"] = evaluation.aux
        if self.statistics.registered_loss:
            stats["registered_loss"] = self._mean(self.exact.mean_loss(func_args))
        if self.config.use_step_rejection:
            stats["rejected"] = after.rejected
        direction, _ = proposed.vectors
        trees = {
            "param": func_args[0],
            "grad": evaluation.gradient,
            "precon_grad": direction,
            "update": proposed.update,
        }
        for name, tree in trees.items():
            if self.statistics.norms:
                stats[f"{name}_norm"] = norm(tree)
            if self.statistics.per_param_norms:
                stats[f"{name}_norms"] = norms(tree)
        return stats


def scheduled(schedule: Schedule, state: OptimizerState) -> ArrayLike:
    """Return the value of a schedule at the next step.

    A schedule may have a second argument, called `data_seen`: the number of examples so far.
    """
    try:
        takes_data_seen = "data_seen" in inspect.signature(schedule).parameters
    except (TypeError, ValueError):  # Some callables have no signature.
        takes_data_seen = False
    named = {"data_seen": state.data_seen} if takes_data_seen else {}
    return schedule(state.step_counter, **named)


def burnin_key(rng: Array, index: int | Array) -> Array:
    """Return the random key of a burn-in update of this index, from that of the first step.

    Of several keys along a leading axis, return as many.
    """
    fold = lambda key: jax.random.fold_in(jax.random.fold_in(key, 1), index)
    is_single = jnp.ndim(rng) == (0 if _jax.is_key(jnp.asarray(rng)) else 1)
    return fold(rng) if is_single else jax.vmap(fold)(rng)


def _model(curvature: Array, vectors: Sequence[PyTree], gradient: PyTree) -> QuadraticModel:
    linear = inner_products(vectors, [gradient])[:, 0]
    return QuadraticModel(curvature, inner_products(vectors, vectors), linear)
