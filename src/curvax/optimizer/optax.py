"""K-FAC as gradient transformations of optax: pure functions, to be chained with others.

Parameters that `optax.masked` hides are not parameters for K-FAC either. The loss still depends on
them, so they are passed as an argument of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from curvax import _jax
from curvax._cpu import all_finite
from curvax._errors import where
from curvax._types import Fun, PyTree
from curvax.optimizer.config import (
    KFACConfig,
    Number,
    OptimizerConfig,
    PreconditionerConfig,
    Schedule,
)
from curvax.optimizer.data_parallel import without_places
from curvax.optimizer.preconditioner import Preconditioner
from curvax.optimizer.state import OptimizerState, number_type, selected
from curvax.optimizer.step import KFAC
from curvax.optimizer.value_function import Evaluation, ValueFunction


class KFACState(NamedTuple):
    """The state of `kfac`: that of the optimizer, and the data of a random key."""

    optimizer: OptimizerState
    rng: Any


class ScaleByKFACState(NamedTuple):
    """The state of `scale_by_kfac`.

    Attributes:
        estimator_state: The state of the curvature estimator.
        step_counter: The number of steps so far.
        skipped: The number of steps whose gradient, before or after, was not finite.
        is_stale: Whether the next step computes curvature and inverses whatever their periods.
        rng: The data of a random key.
    """

    estimator_state: Any
    step_counter: Any
    skipped: Any
    is_stale: Any
    rng: Any


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
) -> Any:
    """Return the K-FAC optimizer as a gradient transformation of optax.

    Equal to `Optimizer(jax.value_and_grad(loss_fn), …)`, except that modes that sample draw other
    random numbers, and that the caller computes the gradient and applies the update:

        gradient = jax.grad(loss_fn)(params, batch)
        updates, state = transformation.update(gradient, state, params, batch=batch)
        params = optax.apply_updates(params, updates)

    It is pure, and works inside `jax.jit`, `jax.lax.scan` and `jax.shard_map`. A caller that knows
    the loss may give it to `update` as `value=`.

    Arguments:
        loss_fn: A function of the parameters and a batch, which registers a loss and returns the
            mean over the batch.
        example_batch: A batch, or the shapes of one, to trace the function with.
        learning_rate: A number, or a function of the step. None if it is adaptive.
        momentum: A number, or a function of the step. None if it is adaptive.
        damping: A number, or a function of the step. None if it is adaptive.
        example_params: All parameters, for `optax.masked(kfac(…), mask)`. Then `update` is given
            all of them, too, as `full_params=`.
        axis_name: Name of a mesh axis, if `update` is called inside a `shard_map` that shards the
            batch along it. The gradient that `update` is given must be averaged over it already.
        seed: Seed of the random numbers of estimates that sample.
        options: Further arguments of `Optimizer`: `l2_reg` (zero by default), `estimation_mode`,
            `norm_constraint`, periods, `use_adaptive_learning_rate` and so on. There is no burn-in
            by default.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    Raises:
        ImportError: If optax is not installed.
        TypeError: If an option is not one of a gradient transformation.
        ValueError: If options contradict each other.
    """
    optax = _optax()
    values = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
    config = _kfac_config(values, options)
    is_given = lambda name: getattr(config, name) is None
    given = {name: value for name, value in values.items() if is_given(name)}

    def build(value_and_grad: Fun, func_args: Sequence[PyTree]) -> KFAC:
        function = ValueFunction(value_and_grad, False, False, False, **config.sizes)
        return KFAC.for_function(config, function, func_args, axis=axis_name)

    processed = config.batch_process_func or (lambda batch: batch)
    loss = _MaskedLoss(loss_fn, example_batch, processed, axis_name, build)

    def init(params: PyTree) -> KFACState:
        rng, own = jax.random.split(jax.random.key(seed))
        func_args = loss.arguments(params, example_params, example_batch)
        own, _ = jax.random.split(own)
        state = loss.traced(func_args).initial_state(func_args, own)
        return KFACState(state, jax.random.key_data(rng))

    def update(
        updates: PyTree,
        state: KFACState,
        params: PyTree = None,
        *,
        batch: PyTree = None,
        value: Any = None,
        full_params: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, KFACState]:
        del extra
        rng, own = jax.random.split(jax.random.wrap_key_data(state.rng))
        func_args = loss.arguments(params, full_params, batch)
        core = loss.traced(func_args)

        def burnin(state: OptimizerState, key: Any) -> OptimizerState:
            return core.update_curvature(state, func_args, jax.random.split(key)[0])

        before = core.burn_in(burnin, state.optimizer, own)
        if value is None and config.needs_loss:
            value = core.loss(func_args)
        found = jnp.asarray(0.0 if value is None else value, number_type(updates))
        evaluation = Evaluation(found, None, None, updates)
        hyperparameters = core.hyperparameters(before, **given)
        change, after, _ = core.update(before, evaluation, func_args, own, hyperparameters)
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
) -> Any:
    """Precondition gradients by K-FAC, and nothing else: to be chained with what optax has.

    Equal to the product of the gradient and the inverse of
    `curvature + (damping + l2_reg) * identity`, where the curvature is an exponential moving
    average over batches. A gradient that is not finite becomes zero, and its batch is not part of
    the average; so does one that is not finite once it is preconditioned.

        transformation = optax.chain(
            optax.clip_by_global_norm(1.0),
            curvax.scale_by_kfac(loss_fn, batch),
            optax.trace(0.9),
            optax.scale_by_learning_rate(0.1),
        )
        state = transformation.init(params)
        updates, state = transformation.update(gradient, state, params, batch=batch)

    Arguments:
        loss_fn: A function of the parameters and a batch, which registers a loss and returns the
            mean over the batch.
        example_batch: A batch, or the shapes of one, to trace the function with.
        damping: A number, or a function of the step.
        example_params: All parameters, for `optax.masked(scale_by_kfac(…), mask)`. Then `update` is
            given all of them, too, as `full_params=`.
        axis_name: Name of a mesh axis, if `update` is called inside a `shard_map` that shards the
            batch along it. The gradient that `update` is given must be averaged over it already.
        seed: Seed of the random numbers of estimates that sample.
        options: Those arguments of `Optimizer` that are about the curvature and its inverse:
            `l2_reg` (zero by default), `estimation_mode`, `curvature_ema`,
            `curvature_update_period`, `inverse_update_period`, `use_exact_inverses`,
            `precon_power`, `stagger_inverses`, and so on.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    Raises:
        ImportError: If optax is not installed.
        TypeError: If an option is not about the curvature.
        ValueError: If options contradict each other.
    """
    optax = _optax()
    _check_known(options, PreconditionerConfig)
    config = PreconditionerConfig(**options)

    def build(value_and_grad: Fun, func_args: Sequence[PyTree]) -> Preconditioner:
        func = ValueFunction(value_and_grad, False, False, False).for_estimator(None, func_args)
        return Preconditioner.for_function(config, func, func_args, axis_name)

    loss = _MaskedLoss(loss_fn, example_batch, lambda batch: batch, axis_name, build)

    def init(params: PyTree) -> ScaleByKFACState:
        rng, own = jax.random.split(jax.random.key(seed))
        func_args = loss.arguments(params, example_params, example_batch)
        state = loss.traced(func_args).init(own, func_args)
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
        rng, own = jax.random.split(jax.random.wrap_key_data(state.rng))
        func_args = loss.arguments(params, full_params, batch)
        preconditioner = loss.traced(func_args)
        count, is_stale = state.step_counter, state.is_stale
        value = jnp.asarray(damping(count) if callable(damping) else damping, number_type(updates))
        is_finite = all_finite(updates)
        found = preconditioner.update_curvature_if_due(
            state.estimator_state, count, is_stale, func_args, own, is_finite
        )
        found = preconditioner.update_inverses_if_due(found, count, is_stale, value)
        scaled = preconditioner.apply(found, updates, value)
        is_finite &= all_finite(scaled)
        scaled = selected(is_finite, scaled, jax.tree.map(jnp.zeros_like, scaled))
        one = jnp.ones((), jnp.int32)
        skipped = state.skipped + jnp.where(is_finite, 0, one)
        after = (found, count + one, skipped, ~is_finite, jax.random.key_data(rng))
        return scaled, ScaleByKFACState(*after)

    return optax.GradientTransformationExtraArgs(init, update)


def _kfac_config(values: dict[str, Any], options: dict[str, Any]) -> KFACConfig:
    """Return the configuration of `kfac`, with those of the values that are schedules."""
    found: dict[str, Any] = {"num_burnin_steps": 0, **options}
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
            found[f"{name}_schedule"] = value
    foreign = sorted((_names(OptimizerConfig) - _names(KFACConfig)) & options.keys())
    if foreign:
        raise TypeError(
            f"{where()}: these options of Optimizer mean nothing here: {', '.join(foreign)}. There "
            f"are no statistics, and the caller compiles; devices are named by axis_name."
        )
    _check_known(options, KFACConfig)
    return KFACConfig(**found)


def _names(config: type[PreconditionerConfig]) -> set[str]:
    return {option.name for option in fields(config)}


def _check_known(options: dict[str, Any], config: type[PreconditionerConfig]) -> None:
    known = _names(config)
    wrong = sorted(options.keys() - known)
    if not wrong:
        return
    if config is PreconditionerConfig:
        raise TypeError(
            f"{where()}: not about the curvature: {', '.join(wrong)}. Chain other transformations "
            f"for that, or use curvax.kfac. The options are {', '.join(sorted(known))}."
        )
    raise TypeError(
        f"{where()}: no such options: {', '.join(wrong)}. There are {', '.join(sorted(known))}."
    )


T = TypeVar("T")


class _MaskedLoss(Generic[T]):
    """A loss as a function of parameters, of all parameters if a mask hides some, and a batch.

    `build(value_and_grad, func_args)` is called when it is first traced.
    """

    def __init__(
        self,
        loss_fn: Fun,
        example_batch: PyTree,
        process: Callable[[PyTree], PyTree],
        axis_name: str | None,
        build: Callable[[Fun, Sequence[PyTree]], T],
    ) -> None:
        if example_batch is None:
            raise ValueError(
                f"{where()}: example_batch must be a batch, or the shapes of one, to trace the "
                f"function with; got None."
            )

        def loss(params: PyTree, full_params: PyTree, batch: PyTree) -> Any:
            return loss_fn(_merged(params, full_params), batch)

        self._value_and_grad = jax.value_and_grad(loss)
        self._example_batch, self._process = example_batch, process
        self._axis_name, self._build = axis_name, build
        self._traced: T | None = None

    def traced(self, func_args: Sequence[PyTree]) -> T:
        """Return what was built for such parameters and the example batch."""
        if self._traced is None:
            func_args = (*func_args[:2], self._process(self._example_batch))
            if self._axis_name is not None and not _jax.is_bound(self._axis_name):
                func_args = without_places(func_args)
            self._traced = self._build(self._value_and_grad, func_args)
        return self._traced

    def arguments(self, params: PyTree, full_params: PyTree, batch: PyTree) -> tuple[PyTree, ...]:
        """Return the arguments of the function, the batch processed."""
        if params is None:
            raise ValueError(
                f"{where()}: update needs the parameters: update(gradient, state, params, "
                f"batch=batch)."
            )
        is_masked = _is_masked(params)
        if is_masked and full_params is None:
            raise ValueError(
                f"{where()}: a mask hides some parameters, on which the loss depends too. Pass "
                f"all of them as example_params= here and as full_params= to update."
            )
        if batch is None:
            raise ValueError(
                f"{where()}: update needs the batch: update(gradient, state, params, "
                f"batch=batch). In a chain, optax passes it on."
            )
        return params, full_params if is_masked else (), self._process(batch)


def _merged(params: PyTree, full_params: PyTree) -> PyTree:
    """Return all parameters; those that are hidden are taken from `full_params`."""
    if not _is_masked(params):
        return params
    pick = lambda p, full: full if _is_hidden(p) else p
    return jax.tree.map(pick, params, full_params, is_leaf=_is_hidden)


def _is_masked(params: PyTree) -> bool:
    return any(map(_is_hidden, jax.tree.leaves(params, is_leaf=_is_hidden)))


def _is_hidden(x: Any) -> bool:
    return isinstance(x, _optax().MaskedNode)


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"{where()} needs optax: pip install 'curvax[optax]'.") from error
    return optax
