"""The algorithm: one step, as a pure function.

With the gradient g and the estimate of curvature, the preconditioned gradient is
`p = (C + damping + L2)⁻¹ g`. The update is `w₁ p + w₂ v`, where v is the last update. The
coefficients are minus the learning rate, and the momentum; where these are adaptive, they minimise
a quadratic model of the loss with the exact curvature. How well such a model foretold the loss
decides about an adaptive damping.

A step for which something is not finite is skipped: only counters change, the damping rises, and
the next step begins with fresh inverses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvax import _jax
from curvax._cpu import all_finite
from curvax._types import Array, PyTree
from curvax.curvature.implicit import ImplicitExactCurvature
from curvax.optimizer.devices import check_sharding
from curvax.optimizer.hyperparameters import Adaptive, Given, LevenbergMarquardt, Options, Rules
from curvax.optimizer.preconditioner import Preconditioner
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

__all__ = ["Algorithm", "Move", "burnin_key"]


# `Move`: an update of the parameters, with how it was made.


class Move(NamedTuple):
    """A sum of vectors times coefficients: those of the direction and of the last update.

    `scaled_norm` is the inner product of the gradient and the direction, times the square of the
    learning rate.
    """

    update: PyTree
    vectors: tuple[PyTree, PyTree]
    coefficients: Sequence[Array]
    scaled_norm: Array
    model: QuadraticModel | None

    @property
    def is_finite(self) -> Array:
        """Whether the update is, if the last one was; the answer may be no for what is huge.

        The norm is a sum over elements of the gradient times those of the direction, and so it is
        not finite if one of them is not, whatever the other is. But it does not tell whether an
        update that is finite is still so in a dtype of a smaller range.
        """
        numbers = jnp.isfinite(jnp.stack([self.scaled_norm, *self.coefficients]))
        largest = jnp.finfo(self.scaled_norm.dtype).max
        narrow = [x for x in jax.tree.leaves(self.update) if jnp.finfo(x.dtype).max < largest]
        return jnp.all(numbers) & all_finite(narrow)


_LARGEST_FACTOR = 1e4
"""How much larger a damping that is given can become by trouble: so that it comes back."""


@dataclass(frozen=True)
class Algorithm:
    """The optimizer's functions of parameters, state and batch, none of which changes anything."""

    function: ValueFunction
    preconditioner: Preconditioner
    exact: ImplicitExactCurvature
    batch_size_extractor: Callable[[PyTree], Any]
    rules: Rules
    adaptation: LevenbergMarquardt
    options: Options
    num_burnin_steps: int
    axis: str | None

    def checked_for(self, state: OptimizerState) -> "Algorithm":
        """The same, if the state is one of this algorithm's on as many devices."""
        check_sharding(self.preconditioner.estimator, state.estimator_state)
        return self

    @property
    def needs_loss(self) -> bool:
        """Whether a step depends on the loss, and not only on its gradient."""
        return isinstance(self.rules.damping, Adaptive) or self.options.use_step_rejection

    def init(
        self, params: PyTree, rng: Array, batch: PyTree, func_state: PyTree = None
    ) -> OptimizerState:
        """The state before the first step."""
        rng, own = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, own, batch)
        dtype = number_type(params)
        is_adaptive = isinstance(self.rules.damping, Adaptive)
        return OptimizerState(
            velocities=jax.tree.map(lambda x: jnp.zeros_like(jnp.asarray(x)), params),
            estimator_state=self.preconditioner.init(rng, func_args),
            damping=jnp.asarray(self.adaptation.initial, dtype) if is_adaptive else None,
            data_seen=jnp.zeros((), int),
            step_counter=jnp.zeros((), jnp.int32),
            damping_factor=jnp.ones((), dtype),
        )

    def burnin(
        self, params: PyTree, state: OptimizerState, rng: Array, batch: PyTree, func_state: PyTree
    ) -> OptimizerState:
        """The state with the curvature of one more batch in it."""
        rng, own = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, self._of_device(own), batch)
        size = self.batch_size_extractor(batch)
        estimate = self.preconditioner.updated(state.estimator_state, func_args, size, rng)
        return replace(state, estimator_state=estimate)

    def step(
        self,
        params: PyTree,
        state: OptimizerState,
        rng: Array,
        batch: PyTree,
        func_state: PyTree,
        given: Given,
        has_burnin: bool = True,
    ) -> tuple[PyTree, OptimizerState, PyTree, dict[str, Any]]:
        """Parameters, state and state of the function after a step, and statistics of it.

        `has_burnin` says whether to burn in before the first step, with this batch.
        """
        params, state = jax.tree.map(jnp.asarray, (params, state))
        if has_burnin:
            state = self.burnt_in(params, state, rng, batch, func_state)
        rng, own = jax.random.split(rng)
        func_args = self.function.arguments(params, func_state, self._of_device(own), batch)
        size = self.batch_size_extractor(batch)
        found = self._evaluated(func_args)
        update, after, stats = self.advance(state, found, func_args, size, rng, given)
        moved = combined([jnp.ones((), number_type(params))] * 2, [params, update])
        is_fine = after.skipped == state.skipped
        new_func_state = selected(is_fine, found.func_state, func_state)
        return moved, after, new_func_state, stats

    def alone(self, *args: Any) -> tuple[PyTree, OptimizerState, PyTree, dict[str, Any]]:
        """As `step`, without burning in."""
        return self.step(*args, has_burnin=False)

    def advance(
        self,
        state: OptimizerState,
        found: Evaluation,
        func_args: Sequence[PyTree],
        batch_size: Any,
        rng: Array,
        given: Given,
    ) -> tuple[PyTree, OptimizerState, dict[str, Any]]:
        """As `step`, from what the function returned; the update, and not the parameters."""
        is_fine = jnp.isfinite(found.loss) & all_finite(found.gradient)
        damping = self._damping(state, given)
        count, is_stale = state.step_counter, state.is_stale
        curvature = self.preconditioner.updated_in_turn(
            state.estimator_state, count, is_stale, func_args, batch_size, rng, is_fine=is_fine
        )
        curvature = self.preconditioner.refreshed(curvature, count, is_stale, damping)
        learning = replace(state, estimator_state=curvature)
        move = self._move(learning, found.gradient, damping, given, func_args)
        is_fine &= move.is_finite
        outcome = self._outcome(learning, found, move, damping, func_args)
        is_taken = is_fine & ~outcome["is_rejected"]
        flags = is_fine, is_taken
        after = self._state_after(learning, move.update, flags, found.loss, outcome, batch_size)
        stats = self._stats(found, move, damping, outcome, after, func_args, batch_size)
        # An update that was taken is what the velocities are now; so it is computed once.
        update = selected(is_taken, after.velocities, jax.tree.map(jnp.zeros_like, move.update))
        return update, after, stats

    def exact_model(
        self, vectors: Sequence[PyTree], gradient: PyTree, func_args: Sequence[PyTree]
    ) -> QuadraticModel:
        """The model with the exact curvature: with `C = B Bᵀ`, products of the `Bᵀ v`."""
        if self.preconditioner.estimator.default_mat_type == "fisher":
            factor = self.exact.multiply_fisher_factor_transpose
        else:
            factor = self.exact.multiply_ggn_factor_transpose
        moved = [factor(func_args, v) for v in vectors]
        curvature = self._mean(inner_products(moved, moved)).astype(number_type(gradient))
        return _model(curvature + self.preconditioner.l2.matrix(vectors), vectors, gradient)

    def approx_model(
        self, state: OptimizerState, vectors: Sequence[PyTree], gradient: PyTree
    ) -> QuadraticModel:
        """The model with the estimated curvature."""
        multiply = self.preconditioner.multiply
        products = [multiply(state.estimator_state, v) for v in vectors]
        return _model(inner_products(vectors, products), vectors, gradient)

    def burnt_in(
        self, params: PyTree, state: OptimizerState, rng: Array, batch: PyTree, func_state: PyTree
    ) -> OptimizerState:
        """The state after all of `burnin`, if no step was done yet."""
        if not self.num_burnin_steps:
            return state
        count = jnp.where(state.step_counter == 0, self.num_burnin_steps, 0)

        def body(k: Any, state: OptimizerState) -> OptimizerState:
            return self.burnin(params, state, burnin_key(rng, k), batch, func_state)

        return lax.fori_loop(0, count, body, state)

    def _evaluated(self, func_args: Sequence[PyTree]) -> Evaluation:
        """What the function returns, averaged over all devices.

        Each device computes the gradient of its own examples: inside of a `shard_map`, gradients of
        what all devices share would be sums over them otherwise.
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
            aux=jax.tree.map(self._of_all, aux, rows),
        )

    def _of_all(self, x: Array, has_rows: bool) -> Array:
        """A part of `aux` of all devices; as it is put together from microbatches."""
        if has_rows:
            return lax.all_gather(x, self.axis, tiled=True)
        is_real = jnp.issubdtype(x.dtype, jnp.inexact)
        return self._mean(x) if is_real else lax.psum(x, self.axis)

    def _mean_if_real(self, x: Any) -> Any:
        return self._mean(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x

    def _of_device(self, rng: Array) -> Array:
        """A random key of each device's own."""
        return rng if self.axis is None else jax.random.fold_in(rng, lax.axis_index(self.axis))

    def _mean(self, x: Any) -> Any:
        return x if self.axis is None else lax.pmean(x, self.axis)

    def _damping(self, state: OptimizerState, given: Given) -> Array:
        if isinstance(self.rules.damping, Adaptive):
            return state.damping
        value = self.rules.damping.value(state.step_counter, given.damping)
        return jnp.asarray(value, state.damping_factor.dtype) * state.damping_factor

    def _move(
        self,
        state: OptimizerState,
        gradient: PyTree,
        damping: Array,
        given: Given,
        func_args: Sequence[PyTree],
    ) -> Move:
        dtype, count = damping.dtype, state.step_counter
        direction = self.preconditioner.apply(state.estimator_state, gradient, damping)
        rate = self.rules.learning_rate.value(count, given.learning_rate)
        momentum = self.rules.momentum.value(count, given.momentum)
        rate = None if rate is None else jnp.asarray(rate, dtype)
        squared = inner(gradient, direction).astype(dtype)
        if self.options.norm_constraint is not None and rate is not None:
            limit = jnp.asarray(self.options.norm_constraint, dtype)
            scale = jnp.sqrt(limit / jnp.maximum(limit, rate**2 * squared))
            direction = combined([scale], [direction])
        vectors = (direction, state.velocities)
        fixed = (None if rate is None else -rate, momentum)
        model = None
        if self.rules.adapt_coefficients:
            model = self.exact_model(vectors, gradient, func_args)
            coefficients: Sequence[Any] = model.minimiser(damping, fixed)
        else:
            coefficients = [jnp.asarray(c, dtype) for c in fixed]
        update = combined(coefficients, vectors)
        return Move(update, vectors, coefficients, coefficients[0] ** 2 * squared, model)

    def _outcome(
        self,
        state: OptimizerState,
        found: Evaluation,
        move: Move,
        damping: Array,
        func_args: Sequence[PyTree],
    ) -> dict[str, Any]:
        """The new loss, the change that was expected, their ratio; NaN where nobody asks."""
        dtype, unknown = damping.dtype, jnp.full((), jnp.nan, damping.dtype)
        is_adaptive = isinstance(self.rules.damping, Adaptive)
        is_due = self.adaptation.is_due(state.step_counter) if is_adaptive else False
        change = unknown
        if move.model is not None:
            change = self._change(move.model, move, damping)
        elif is_adaptive:

            def compute(_: Any) -> Array:
                if self.options.always_exact_model:
                    model = self.exact_model(move.vectors, found.gradient, func_args)
                else:
                    model = self.approx_model(state, move.vectors, found.gradient)
                return self._change(model, move, damping)

            change = lax.cond(is_due, compute, lambda _: unknown, None)
        new_loss = unknown
        if self.needs_loss:
            moved = lambda: combined([jnp.ones((), dtype)] * 2, [func_args[0], move.update])
            loss_after = lambda _: self.loss((moved(), *func_args[1:])).astype(dtype)
            is_wanted = True if self.options.use_step_rejection else is_due
            new_loss = lax.cond(is_wanted, loss_after, lambda _: unknown, None)
        rejects = self.options.use_step_rejection
        return {
            "new_loss": new_loss,
            "quad_model_change": change,
            "rho": (new_loss - found.loss.astype(dtype)) / change,
            "is_rejected": ~(new_loss <= found.loss) if rejects else jnp.zeros((), bool),
        }

    def loss(self, func_args: Sequence[PyTree]) -> Array:
        """The value of the function alone; what else it computes is dropped by the compiler."""
        return self._mean(self.function(func_args).loss)

    def _change(self, model: QuadraticModel, move: Move, damping: Array) -> Array:
        included = damping if self.options.include_damping_in_quad_change else 0.0
        return model.change(move.coefficients, included)

    def _state_after(
        self,
        state: OptimizerState,
        update: PyTree,
        flags: tuple[Array, Array],
        loss: Array,
        outcome: dict[str, Any],
        batch_size: Any,
    ) -> OptimizerState:
        is_fine, is_taken = flags
        is_rejected = is_fine & ~is_taken
        # After a rejection momentum begins anew: no damping would help against what it does.
        zeros = jax.tree.map(jnp.zeros_like, update)
        velocities = selected(is_taken, update, selected(is_rejected, zeros, state.velocities))
        factor = jnp.asarray(self.options.reject_factor, state.damping_factor.dtype)
        decay = jnp.asarray(self.adaptation.decay, factor.dtype)
        if state.damping is None:
            damping = None
            falling = jnp.maximum(1, state.damping_factor * decay)
            rising = jnp.minimum(state.damping_factor * factor, _LARGEST_FACTOR)
            damping_factor = jnp.where(is_taken, falling, rising)
        else:
            damping_factor = state.damping_factor
            is_due = self.adaptation.is_due(state.step_counter)
            change, new_loss = outcome["quad_model_change"], outcome["new_loss"]
            loss = loss.astype(new_loss.dtype)
            adapted = self.adaptation.update(state.damping, loss, new_loss, change)
            usual = jnp.where(is_due, adapted, state.damping)
            damping = jnp.where(is_taken, usual, self.adaptation.raised(state.damping, factor))
        seen = state.data_seen + self._total(batch_size, state.data_seen.dtype)
        one = jnp.ones((), jnp.int32)
        return replace(
            state,
            velocities=velocities,
            damping=damping,
            data_seen=jnp.where(seen < state.data_seen, state.data_seen, seen),
            step_counter=state.step_counter + one,
            damping_factor=damping_factor,
            skipped=state.skipped + jnp.where(is_fine, 0, one),
            rejected=state.rejected + jnp.where(is_rejected, one, 0),
            is_stale=~is_taken,
        )

    def _total(self, batch_size: Any, dtype: Any) -> Array:
        """The batch size of all devices together."""
        size = jnp.asarray(batch_size).astype(dtype)
        return size if self.axis is None else lax.psum(size, self.axis)

    def _stats(
        self,
        found: Evaluation,
        move: Move,
        damping: Array,
        outcome: dict[str, Any],
        after: OptimizerState,
        func_args: Sequence[PyTree],
        batch_size: Any,
    ) -> dict[str, Any]:
        stats = {
            "step": after.step_counter - 1,
            "batch_size": self._total(batch_size, after.data_seen.dtype),
            "data_seen": after.data_seen,
            "loss": found.loss,
            "learning_rate": -move.coefficients[0],
            "momentum": move.coefficients[1],
            "damping": damping,
            **{name: outcome[name] for name in ("rho", "new_loss", "quad_model_change")},
            "scaled_grad_norm_sq": move.scaled_norm,
            "skipped": after.skipped,
        }
        if self.function.has_aux:
            stats["aux"] = found.aux
        if self.options.include_registered_loss:
            stats["registered_loss"] = self._mean(self.exact.mean_loss(func_args))
        if self.options.use_step_rejection:
            stats["rejected"] = after.rejected
        direction, _ = move.vectors
        trees = {
            "param": func_args[0],
            "grad": found.gradient,
            "precon_grad": direction,
            "update": move.update,
        }
        for name, tree in trees.items():
            if self.options.include_norms:
                stats[f"{name}_norm"] = norm(tree)
            if self.options.include_param_norms:
                stats[f"{name}_norms"] = norms(tree)
        return stats


def burnin_key(rng: Array, number: Any) -> Array:
    """The random key of one of the updates before the first step, from that of the step."""
    return jax.random.fold_in(jax.random.fold_in(rng, 1), number)


def _model(curvature: Array, vectors: Sequence[PyTree], gradient: PyTree) -> QuadraticModel:
    linear = inner_products(vectors, [gradient])[:, 0]
    return QuadraticModel(curvature, inner_products(vectors, vectors), linear)
