"""K-FAC as gradient transformations of optax: pure functions, to be chained with others.

Parameters that `optax.masked` hides are not parameters for K-FAC either. The loss still depends on
them, so they are passed beside the others, as the state of the function.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvax._cpu import all_finite
from curvax._types import Array, Fun, PyTree
from curvax.optimizer.hyperparameters import Given, Schedule
from curvax.optimizer.optimizer import Optimizer
from curvax.optimizer.state import OptimizerState, number_type, selected
from curvax.optimizer.step import Algorithm
from curvax.optimizer.value_function import Evaluation

__all__ = ["KFACState", "ScaleByKFACState", "kfac", "scale_by_kfac"]


Number = float | int | Array


class KFACState(NamedTuple):
    """The state of `kfac`: that of the optimizer, and the data of a random key."""

    optimizer: OptimizerState
    rng: Any


class ScaleByKFACState(NamedTuple):
    """The state of `scale_by_kfac`.

    Attributes:
        estimator_state: the state of the curvature estimator.
        step_counter: the number of steps so far.
        skipped: in how many of them the gradient was not finite.
        is_stale: whether the next step computes curvature and inverses, whatever their periods.
        rng: the data of a random key.
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
    """The K-FAC optimizer, as a gradient transformation of optax.

    Equal to `Optimizer(jax.value_and_grad(loss_fn), …)`, except that the caller computes the
    gradient and applies the update:

        gradient = jax.grad(loss_fn)(params, batch)
        updates, state = transformation.update(gradient, state, params, batch=batch)
        params = optax.apply_updates(params, updates)

    It is pure, and works inside of `jax.jit`, `jax.lax.scan` and `jax.shard_map`. A caller that
    knows the loss may give it to `update` as `value=`.

    Arguments:
        loss_fn: a function of the parameters and a batch, which registers a loss and returns the
            mean over the batch.
        example_batch: a batch, or the shapes of one, to trace the function with.
        learning_rate: a number, or a function of the step. None if it is adaptive.
        momentum: likewise.
        damping: likewise.
        example_params: all parameters, for `optax.masked(kfac(…), mask)`. Then `update` is given
            all of them, too, as `full_params=`.
        axis_name: the name of an axis of devices, if `update` is called inside of a `shard_map`
            that splits the batch along it. The gradient that it is given is that of all devices.
        seed: for what is drawn at random.
        options: further arguments of `Optimizer`: `l2_reg` (zero by default), `estimation_mode`,
            `norm_constraint`, periods, `use_adaptive_learning_rate` and so on. There is no burn-in
            by default.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    Raises:
        ImportError: if optax is not installed.
        ValueError: as `Optimizer`.
    """
    optax = _optax("curvax.kfac")
    rules = {"learning_rate": learning_rate, "momentum": momentum, "damping": damping}
    for name, value in rules.items():
        if value is not None and not options.get(f"use_adaptive_{name}"):
            options[f"{name}_schedule"] = value if callable(value) else _constant(value)
        elif not options.get(f"use_adaptive_{name}"):
            raise ValueError(f"curvax.kfac: give {name}, or use_adaptive_{name}=True.")
    if learning_rate is not None and options.get("use_adaptive_learning_rate"):
        raise ValueError(
            "curvax.kfac: learning_rate and use_adaptive_learning_rate=True contradict each other; "
            "give one of them."
        )
    _check_options(options, _NOT_OF_OPTAX, "curvax.kfac")
    problem = _Problem(loss_fn, example_batch, example_params, axis_name, options, "curvax.kfac")

    def init(params: PyTree) -> KFACState:
        rng, own = jax.random.split(jax.random.key(seed))
        frozen = problem.frozen(params, example_params)
        batch = problem.processed(example_batch)
        state = problem.algorithm(params, frozen, own).init(params, own, batch, frozen)
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
        frozen = problem.frozen(params, full_params)
        algorithm = problem.algorithm(params, frozen, own)
        batch = problem.processed(batch)
        func_args = problem.arguments(params, frozen, batch)
        before = algorithm.burnt_in(params, state.optimizer, own, batch, frozen)
        if value is None and algorithm.needs_loss:
            value = algorithm.loss(func_args)
        loss = jnp.asarray(0.0 if value is None else value, number_type(updates))
        found = Evaluation(loss, None, None, updates)
        size = algorithm.batch_size_extractor(batch)
        change, after, _ = algorithm.advance(before, found, func_args, size, own, Given())
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
    `curvature + (damping + l2_reg) * identity`, where the curvature is that of all batches so far,
    averaged with weights that fall exponentially. A gradient that is not finite becomes zero, and
    its batch is not part of the average.

        transformation = optax.chain(
            optax.clip_by_global_norm(1.0),
            curvax.scale_by_kfac(loss_fn, batch),
            optax.trace(0.9),
            optax.scale_by_learning_rate(0.1),
        )
        state = transformation.init(params)
        updates, state = transformation.update(gradient, state, params, batch=batch)

    Arguments:
        loss_fn: as in `kfac`.
        example_batch: as in `kfac`.
        damping: a number, or a function of the step.
        example_params: as in `kfac`.
        axis_name: as in `kfac`.
        seed: as in `kfac`.
        options: as in `kfac`, those that are about the curvature and its inverse: `l2_reg`,
            `estimation_mode`, `curvature_ema`, `curvature_update_period`, `inverse_update_period`,
            `use_exact_inverses`, `precon_power`, `stagger_inverses`, and so on.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    Raises:
        ImportError: if optax is not installed.
        TypeError: if an option is not about the curvature.
        ValueError: as `Optimizer`.
    """
    where = "curvax.scale_by_kfac"
    optax = _optax(where)
    wrong = sorted(set(options) - _OF_CURVATURE)
    if wrong:
        raise TypeError(
            f"{where}: not about the curvature: {', '.join(wrong)}. Chain other transformations "
            f"for that, or use curvax.kfac. The options are {', '.join(sorted(_OF_CURVATURE))}."
        )
    schedule = damping if callable(damping) else _constant(damping)
    problem = _Problem(loss_fn, example_batch, example_params, axis_name, options, where)

    def init(params: PyTree) -> ScaleByKFACState:
        rng, own = jax.random.split(jax.random.key(seed))
        frozen = problem.frozen(params, example_params)
        preconditioner = problem.algorithm(params, frozen, own).preconditioner
        state = preconditioner.init(own, problem.arguments(params, frozen, example_batch))
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
        frozen = problem.frozen(params, full_params)
        algorithm = problem.algorithm(params, frozen, own)
        preconditioner = algorithm.preconditioner
        func_args = problem.arguments(params, frozen, batch)
        size = algorithm.batch_size_extractor(batch)
        count, is_stale = state.step_counter, state.is_stale
        value = jnp.asarray(schedule(count), number_type(updates))
        is_fine = all_finite(updates)
        found = preconditioner.updated_in_turn(
            state.estimator_state, count, is_stale, func_args, size, own, is_fine=is_fine
        )
        found = preconditioner.refreshed(found, count, is_stale, value)
        scaled = preconditioner.apply(found, updates, value)
        scaled = selected(is_fine, scaled, jax.tree.map(jnp.zeros_like, scaled))
        one = jnp.ones((), jnp.int32)
        skipped = state.skipped + jnp.where(is_fine, 0, one)
        after = (found, count + one, skipped, ~is_fine, jax.random.key_data(rng))
        return scaled, ScaleByKFACState(*after)

    return optax.GradientTransformationExtraArgs(init, update)


_OF_CURVATURE = {
    "l2_reg",
    "estimation_mode",
    "curvature_ema",
    "inverse_update_period",
    "use_exact_inverses",
    "register_only_generic",
    "patterns_to_skip",
    "auto_register_kwargs",
    "layer_tag_to_block_ctor",
    "batch_size_extractor",
    "distributed_precon_apply",
    "distributed_inverses",
    "curvature_update_period",
    "num_estimator_samples",
    "precon_power",
    "regularized_parameters_path_exclusions",
    "strict_registration",
    "microbatch_size",
    "memory_budget",
    "stagger_inverses",
}


_NOT_OF_OPTAX = {
    "value_func_has_aux",
    "value_func_has_state",
    "value_func_has_rng",
    "value_func_for_estimator",
    "multi_device",
    "mesh",
    "pmap_axis_name",
    "debug",
    "forbid_setting_attributes_after_finalize",
    "modifiable_attribute_exceptions",
    "include_norms_in_stats",
    "include_per_param_norms_in_stats",
    "include_registered_loss_in_stats",
    "donate_buffers",
    "shard_state",
}


def _check_options(options: dict[str, Any], excluded: set[str], where: str) -> None:
    wrong = sorted(set(options) & excluded)
    if wrong:
        raise TypeError(
            f"{where}: these options of Optimizer mean nothing here: {', '.join(wrong)}. There are "
            f"no statistics, and the caller compiles; devices are named by axis_name."
        )


class _Problem:
    """A loss, with the algorithm for it, which is made when it is first asked for."""

    def __init__(
        self,
        loss_fn: Fun,
        example_batch: PyTree,
        example_params: PyTree,
        axis_name: str | None,
        options: dict[str, Any],
        where: str,
    ) -> None:
        def with_frozen(params: PyTree, frozen: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
            return loss_fn(_merged(params, frozen), batch), frozen

        devices = {} if axis_name is None else {"multi_device": True, "pmap_axis_name": axis_name}
        options = {"l2_reg": 0.0, "num_burnin_steps": 0} | options | devices
        value_and_grad = jax.value_and_grad(with_frozen, has_aux=True)
        self._optimizer = Optimizer(value_and_grad, value_func_has_state=True, **options)
        self._example_batch, self._example_params = example_batch, example_params
        self._where = where

    def processed(self, batch: PyTree) -> PyTree:
        """A batch as the function shall see it."""
        process = self._optimizer.batch_process_func
        return batch if process is None or batch is None else process(batch)

    def algorithm(self, params: PyTree, frozen: PyTree, rng: Array) -> Algorithm:
        """The algorithm for these parameters."""
        return self._optimizer.finalize(params, rng, self.processed(self._example_batch), frozen)

    def arguments(self, params: PyTree, frozen: PyTree, batch: PyTree) -> Sequence[PyTree]:
        """The arguments of the function."""
        if batch is None:
            raise ValueError(
                f"{self._where}: update needs the batch: update(gradient, state, params, "
                f"batch=batch). In a chain, optax passes it on."
            )
        return params, frozen, batch

    def frozen(self, params: PyTree, full_params: PyTree) -> PyTree:
        """All parameters, if some are hidden by a mask; else nothing."""
        if params is None:
            raise ValueError(
                f"{self._where}: update needs the parameters: update(gradient, state, params, "
                f"batch=batch)."
            )
        if not _is_masked(params):
            return ()
        if full_params is None:
            raise ValueError(
                f"{self._where}: a mask hides some parameters, on which the loss depends too. Pass "
                f"all of them as example_params= here and as full_params= to update."
            )
        return full_params


def _merged(params: PyTree, frozen: PyTree) -> PyTree:
    """All parameters: those that are hidden come from the others."""
    if not _is_masked(params):
        return params
    return jax.tree.map(lambda p, f: f if _is_hidden(p) else p, params, frozen, is_leaf=_is_hidden)


def _is_masked(params: PyTree) -> bool:
    return any(map(_is_hidden, jax.tree.leaves(params, is_leaf=_is_hidden)))


def _is_hidden(x: Any) -> bool:
    return isinstance(x, _optax("curvax").MaskedNode)


def _constant(value: Number) -> Schedule:
    return lambda step: value


def _optax(where: str) -> Any:
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"{where} needs optax: pip install 'curvax[optax]'.") from error
    return optax
