"""K-FAC as pure functions of a configuration: the initial state, burn-in, and one step.

With the gradient g and the estimate C of the curvature, the preconditioned gradient is
`p = (C + damping + L2)⁻¹ g` (Martens & Grosse 2015). The update is `w₁ p + w₂ v`, where v is the
last update. The coefficients are minus the learning rate, and the momentum; where these are
adaptive, they minimise a quadratic model of the loss with the exact curvature. How well such a
model predicts the loss decides about an adaptive damping.

A step for which something is not finite is skipped: only counters change, the damping rises, and
the next step computes curvature and inverses again.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._cpu import all_finite
from curvax._types import Array, Fun, PyTree
from curvax.curvature.implicit import ImplicitExactCurvature
from curvax.optimizer.config import Adaptive, Hyperparameter, KFACConfig
from curvax.optimizer.damping import is_damping_due, next_damping, next_factor
from curvax.optimizer.preconditioner import Preconditioner, l2_matrix
from curvax.optimizer.quadratic_model import QuadraticModel
from curvax.optimizer.state import (
    OptimizerState,
    combined,
    inner,
    inner_products,
    norm,
    norms,
    number_type,
    selected,
)
from curvax.optimizer.value_function import Evaluation, ValueFunction


class Hyperparameters(NamedTuple):
    """The three numbers of a step; None for those that the quadratic model chooses."""

    learning_rate: Array | None
    momentum: Array | None
    damping: Array


class ProposedUpdate(NamedTuple):
    """An update of the parameters: a linear combination of the direction and the last update.

    `scaled_norm` is the inner product of the gradient and the direction, times the square of the
    learning rate.
    """

    update: PyTree
    vectors: tuple[PyTree, PyTree]
    coefficients: Sequence[Array]
    scaled_norm: Array
    model: QuadraticModel | None

    @property
    def has_finite_direction(self) -> Array:
        """Whether direction and coefficients are finite. Overflow gives a false negative.

        The norm is a sum over elements of the gradient times those of the direction, so that it is
        not finite if one of either is not.
        """
        return jnp.all(jnp.isfinite(jnp.stack([self.scaled_norm, *self.coefficients])))


class Outcome(NamedTuple):
    """The loss after an update, its predicted change, their ratio; NaN where nothing needs them."""

    new_loss: Array
    quad_model_change: Array
    rho: Array


class Verdict(NamedTuple):
    """What becomes of a proposed update; one that is neither taken nor rejected is skipped."""

    is_taken: Array
    is_rejected: Array
    forgets_velocities: Array


class Statistics(NamedTuple):
    """Which statistics a step returns besides the usual ones."""

    norms: bool = False
    per_param_norms: bool = False
    registered_loss: bool = False


@dataclass(frozen=True)
class KFAC:
    """The optimizer of one function, as pure functions of parameters, state and batch.

    Attributes:
        config: the options.
        function: the user-supplied function, called with its arguments as one sequence.
        preconditioner: the estimate of the curvature and its inverse.
        statistics: which statistics to return.
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
        """Trace a function of such arguments, the last of which is the batch."""
        func = function.for_estimator(func_for_estimator, func_args)
        preconditioner = Preconditioner.for_function(config, func, func_args, axis, num_shards)
        return cls(config, function, preconditioner, statistics or Statistics())

    @property
    def axis(self) -> str | None:
        """The name of the mesh axis along which batches are sharded, if there is one."""
        return self.preconditioner.axis

    @functools.cached_property
    def exact(self) -> ImplicitExactCurvature:
        """Products with the exact curvature."""
        estimator, config = self.preconditioner.estimator, self.config
        index = estimator.batch_argument
        return ImplicitExactCurvature(
            estimator.func, 0, config.batch_size_extractor, batch_index=index, **config.sizes
        )

    # Functions of the parameters, a random key, the batch and the state of the function.

    def init(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> OptimizerState:
        """Return the state before the first step."""
        rng, own = jax.random.split(rng)
        return self.initial_state(self.function.arguments(params, func_state, own, batch), rng)

    def burnin(
        self, params: PyTree, state: OptimizerState, rng: Array, batch: PyTree, func_state: PyTree
    ) -> OptimizerState:
        """Update the curvature by one batch, and nothing else."""
        rng, own = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, self._device_key(own), batch)
        return self.update_curvature(state, func_args, rng)

    def step(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        batch: PyTree,
        func_state: PyTree = None,
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
    ) -> tuple[PyTree, OptimizerState, PyTree, dict[str, Any]]:
        """Return parameters, state and state of the function after a step, and its statistics."""
        params, state = jax.tree.map(jnp.asarray, (params, state))
        rng, own = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, self._device_key(own), batch)
        found = self._evaluate(func_args)
        hyperparameters = self.hyperparameters(state, learning_rate, momentum, damping)
        update, after, stats = self.update(state, found, func_args, rng, hyperparameters)
        new_params = combined([jnp.ones((), number_type(params))] * 2, [params, update])
        is_used = after.skipped == state.skipped
        return new_params, after, selected(is_used, found.func_state, func_state), stats

    def step_with_burnin(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        batch: PyTree,
        func_state: PyTree = None,
        *hyperparameters: Any,
    ) -> tuple[PyTree, OptimizerState, PyTree, dict[str, Any]]:
        """Equal to `step`, except that the first step burns in before, with the same batch."""
        params, state = jax.tree.map(jnp.asarray, (params, state))
        burnin = lambda state, key: self.burnin(params, state, key, batch, func_state)
        state = self.burn_in(burnin, state, rng)
        return self.step(params, state, rng, batch, func_state, *hyperparameters)

    # Functions of the arguments of the user-supplied function, as one sequence.

    def initial_state(self, func_args: Sequence[PyTree], rng: Array) -> OptimizerState:
        """Return the state before the first step."""
        params, config = func_args[0], self.config
        dtype, is_adaptive = number_type(params), config.use_adaptive_damping
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
        """Update the curvature by one batch, and nothing else."""
        estimate = self.preconditioner.update_curvature(state.estimator_state, func_args, rng)
        return replace(state, estimator_state=estimate)

    def burn_in(
        self,
        burnin: Callable[[OptimizerState, Array], OptimizerState],
        state: OptimizerState,
        rng: Array,
    ) -> OptimizerState:
        """Apply `burnin(state, key)` as often as configured if no step was done yet."""
        if not self.config.num_burnin_steps:
            return state
        count = jnp.where(state.step_counter == 0, self.config.num_burnin_steps, 0)
        body = lambda k, state: burnin(state, burnin_key(rng, k))
        return lax.fori_loop(0, count, body, state)

    def hyperparameters(
        self,
        state: OptimizerState,
        learning_rate: Any = None,
        momentum: Any = None,
        damping: Any = None,
    ) -> Hyperparameters:
        """Return the numbers of a step, from those that it was given, schedules and the state."""
        count, dtype = state.step_counter, state.damping_factor.dtype

        def value(hyperparameter: Hyperparameter, given: Any) -> Array | None:
            if isinstance(hyperparameter, Adaptive):
                return None
            found = given if hyperparameter is None else hyperparameter(count)
            return jnp.asarray(found, dtype)

        config = self.config
        base = value(config.damping, damping)
        return Hyperparameters(
            value(config.learning_rate, learning_rate),
            value(config.momentum, momentum),
            state.damping if base is None else base * state.damping_factor,
        )

    def update(
        self,
        state: OptimizerState,
        found: Evaluation,
        func_args: Sequence[PyTree],
        rng: Array,
        hyperparameters: Hyperparameters,
    ) -> tuple[PyTree, OptimizerState, dict[str, Any]]:
        """Return the update of the parameters, the state after it, and statistics.

        An update that is not taken is zero.
        """
        count, is_stale, damping = state.step_counter, state.is_stale, hyperparameters.damping
        is_finite_batch = jnp.isfinite(found.loss) & all_finite(found.gradient)
        curvature = self.preconditioner.update_curvature_if_due(
            state.estimator_state, count, is_stale, func_args, rng, is_finite_batch
        )
        curvature = self.preconditioner.update_inverses_if_due(curvature, count, is_stale, damping)
        state = replace(state, estimator_state=curvature)
        proposed = self._propose(state, found.gradient, hyperparameters, func_args)
        outcome = self._outcome(state, found, proposed, damping, func_args)
        verdict = self._verdict(is_finite_batch, found.loss, proposed, outcome)
        total = self._total(self.config.batch_size_extractor(func_args[-1]), state.data_seen.dtype)
        after = self._state_after(state, proposed.update, verdict, found.loss, outcome, total)
        stats = self._stats(found, proposed, damping, outcome, after, func_args, total)
        # An update that is taken equals the new velocities, so it is computed once.
        zeros = jax.tree.map(jnp.zeros_like, proposed.update)
        return selected(verdict.is_taken, after.velocities, zeros), after, stats

    def loss(self, func_args: Sequence[PyTree]) -> Array:
        """Return the value of the function; the compiler drops what else it computes."""
        return self._mean(self.function(func_args).loss)

    def exact_model(
        self, vectors: Sequence[PyTree], gradient: PyTree, func_args: Sequence[PyTree]
    ) -> QuadraticModel:
        """Return the model with the exact curvature: with `C = B Bᵀ`, products of the `Bᵀ v`."""
        if self.preconditioner.estimator.default_mat_type == "fisher":
            factor = self.exact.multiply_fisher_factor_transpose
        else:
            factor = self.exact.multiply_ggn_factor_transpose
        products = [factor(func_args, v) for v in vectors]
        curvature = self._mean(inner_products(products, products)).astype(number_type(gradient))
        return _model(curvature + l2_matrix(self.config, vectors), vectors, gradient)

    def approx_model(
        self, state: OptimizerState, vectors: Sequence[PyTree], gradient: PyTree
    ) -> QuadraticModel:
        """Return the model with the estimated curvature."""
        multiply = self.preconditioner.multiply
        products = [multiply(state.estimator_state, v) for v in vectors]
        return _model(inner_products(vectors, products), vectors, gradient)

    def _evaluate(self, func_args: Sequence[PyTree]) -> Evaluation:
        """Evaluate the function, averaged over all devices.

        Each device computes the gradient of its own examples: inside a `shard_map`, gradients with
        respect to replicated arrays would be sums over devices otherwise.
        """
        params, *rest = func_args
        leaves = jax.tree.leaves(rest)
        own = jax.tree.map(lambda x: _jax.varying_like(jnp.asarray(x), *leaves), params)
        found = self.function((own, *rest))
        if self.axis is None:
            return found
        aux = jax.tree.map(jnp.asarray, found.aux)
        rows = self.function.rows_of_aux((own, *rest), aux)
        return found._replace(
            loss=self._mean(found.loss),
            gradient=self._mean(found.gradient),
            func_state=jax.tree.map(self._mean_if_real, found.func_state),
            aux=jax.tree.map(self._gather_aux, aux, rows),
        )

    def _gather_aux(self, x: Array, has_rows: bool) -> Array:
        """Reduce a leaf of `aux` over all devices, as microbatches are reduced."""
        if has_rows:
            return lax.all_gather(x, self.axis, tiled=True)
        is_real = jnp.issubdtype(x.dtype, jnp.inexact)
        return self._mean(x) if is_real else lax.psum(x, self.axis)

    def _mean_if_real(self, x: Any) -> Any:
        return self._mean(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x

    def _mean(self, x: Any) -> Any:
        return x if self.axis is None else lax.pmean(x, self.axis)

    def _total(self, batch_size: Any, dtype: Any) -> Array:
        """Return the batch size of all devices together."""
        size = jnp.asarray(batch_size).astype(dtype)
        return size if self.axis is None else lax.psum(size, self.axis)

    def _device_key(self, rng: Array) -> Array:
        """Return another random key on each device."""
        return rng if self.axis is None else jax.random.fold_in(rng, lax.axis_index(self.axis))

    def _propose(
        self,
        state: OptimizerState,
        gradient: PyTree,
        hyperparameters: Hyperparameters,
        func_args: Sequence[PyTree],
    ) -> ProposedUpdate:
        rate, momentum, damping = hyperparameters
        dtype = damping.dtype
        direction = self.preconditioner.apply(state.estimator_state, gradient, damping)
        squared = inner(gradient, direction).astype(dtype)
        if self.config.norm_constraint is not None and rate is not None:
            limit = jnp.asarray(self.config.norm_constraint, dtype)
            scale = jnp.sqrt(limit / jnp.maximum(limit, rate**2 * squared))
            direction = combined([scale], [direction])
        vectors = (direction, state.velocities)
        model = None
        if rate is None or momentum is None:
            model = self.exact_model(vectors, gradient, func_args)
            fixed = (None if rate is None else -rate, momentum)
            coefficients: Sequence[Any] = model.minimiser(damping, fixed)
        else:
            coefficients = (-rate, momentum)
        update = combined(coefficients, vectors)
        return ProposedUpdate(update, vectors, coefficients, coefficients[0] ** 2 * squared, model)

    def _outcome(
        self,
        state: OptimizerState,
        found: Evaluation,
        proposed: ProposedUpdate,
        damping: Array,
        func_args: Sequence[PyTree],
    ) -> Outcome:
        config, dtype = self.config, damping.dtype
        unknown = jnp.full((), jnp.nan, dtype)
        is_adaptive = config.use_adaptive_damping
        is_due = is_damping_due(config, state.step_counter) if is_adaptive else False
        change = unknown
        if proposed.model is not None:
            change = self._predicted_change(proposed.model, proposed, damping)
        elif is_adaptive:

            def predict(_: Any) -> Array:
                if config.always_use_exact_qmodel_for_damping_adjustment:
                    model = self.exact_model(proposed.vectors, found.gradient, func_args)
                else:
                    model = self.approx_model(state, proposed.vectors, found.gradient)
                return self._predicted_change(model, proposed, damping)

            change = lax.cond(is_due, predict, lambda _: unknown, None)
        new_loss = unknown
        if config.needs_loss:

            def loss_after(_: Any) -> Array:
                params, *rest = func_args
                params = combined([jnp.ones((), dtype)] * 2, [params, proposed.update])
                return self.loss((params, *rest)).astype(dtype)

            is_wanted = True if config.use_step_rejection else is_due
            new_loss = lax.cond(is_wanted, loss_after, lambda _: unknown, None)
        return Outcome(new_loss, change, (new_loss - found.loss.astype(dtype)) / change)

    def _predicted_change(
        self, model: QuadraticModel, proposed: ProposedUpdate, damping: Array
    ) -> Array:
        included = damping if self.config.include_damping_in_quad_change else 0.0
        return model.change(proposed.coefficients, included)

    def _verdict(
        self, is_finite_batch: Array, loss: Array, proposed: ProposedUpdate, outcome: Outcome
    ) -> Verdict:
        is_finite = is_finite_batch & proposed.has_finite_direction
        # The last update is not finite if the state was restored so, and sums may overflow.
        is_taken = is_finite & all_finite(proposed.update)
        is_rejected = jnp.zeros((), bool)
        if self.config.use_step_rejection:
            is_taken &= outcome.new_loss <= loss
            is_rejected = is_finite & ~is_taken
        # If the batch is not to blame, the last update may be, and no damping helps against that.
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
        config = self.config
        is_taken, is_rejected, forgets_velocities = verdict
        zeros = jax.tree.map(jnp.zeros_like, update)
        kept = selected(forgets_velocities, zeros, state.velocities)
        velocities = selected(is_taken, update, kept)
        damping, damping_factor = state.damping, state.damping_factor
        if damping is None:
            damping_factor = next_factor(config, damping_factor, is_taken)
        else:
            new_loss, change, _ = outcome
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
        found: Evaluation,
        proposed: ProposedUpdate,
        damping: Array,
        outcome: Outcome,
        after: OptimizerState,
        func_args: Sequence[PyTree],
        batch_size: Array,
    ) -> dict[str, Any]:
        stats = {
            "step": after.step_counter - 1,
            "batch_size": batch_size,
            "data_seen": after.data_seen,
            "loss": found.loss,
            "learning_rate": -proposed.coefficients[0],
            "momentum": proposed.coefficients[1],
            "damping": damping,
            "rho": outcome.rho,
            "new_loss": outcome.new_loss,
            "quad_model_change": outcome.quad_model_change,
            "scaled_grad_norm_sq": proposed.scaled_norm,
            "skipped": after.skipped,
        }
        if self.function.has_aux:
            stats["aux"] = found.aux
        if self.statistics.registered_loss:
            stats["registered_loss"] = self._mean(self.exact.mean_loss(func_args))
        if self.config.use_step_rejection:
            stats["rejected"] = after.rejected
        direction, _ = proposed.vectors
        trees = {
            "param": func_args[0],
            "grad": found.gradient,
            "precon_grad": direction,
            "update": proposed.update,
        }
        for name, tree in trees.items():
            if self.statistics.norms:
                stats[f"{name}_norm"] = norm(tree)
            if self.statistics.per_param_norms:
                stats[f"{name}_norms"] = norms(tree)
        return stats


def burnin_key(rng: Array, number: Any) -> Array:
    """Return the random key of an update before the first step, from the key of that step."""
    return jax.random.fold_in(jax.random.fold_in(rng, 1), number)


def _model(curvature: Array, vectors: Sequence[PyTree], gradient: PyTree) -> QuadraticModel:
    linear = inner_products(vectors, [gradient])[:, 0]
    return QuadraticModel(curvature, inner_products(vectors, vectors), linear)
